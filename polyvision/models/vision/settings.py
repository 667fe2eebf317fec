"""What determines an image classifier: the timm network, and how its images are prepared."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from polyvision.typed import Bounds, Count, Positive

__all__ = ["ImagePreparation", "TimmNetwork"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimmNetwork:
    """A network of timm, by name."""

    name: str
    """A model of timm; `timm.list_models()` lists them."""
    on_leftover: Literal["error", "warn", "ignore"] = "error"
    """What to do about activations that cannot be replaced."""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Further arguments of timm's constructor."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImagePreparation:
    """How images become the network's input."""

    image_size: Count = 224
    """Height and width of training images, in pixels."""
    mean: list[float] = dataclasses.field(default_factory=lambda: [0.485, 0.456, 0.406])
    """Mean of each channel, subtracted from pixels in 0 to 1."""
    std: list[Positive] = dataclasses.field(default_factory=lambda: [0.229, 0.224, 0.225])
    """Standard deviation of each channel."""
    crop_pct: Annotated[float, Bounds(gt=0, le=1)]
    """Share of the resized validation image that the centre crop keeps."""
    interpolation: Literal["nearest", "bilinear", "bicubic", "lanczos", "random"] = "bicubic"
    """How images are resized."""
    test_size: Count | None = None
    """Height and width in validation; null: `image_size`."""
