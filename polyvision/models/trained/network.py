"""What a trained network is, in plain values: enough to build it again without data or recipe.

A run writes this to ``network.json``, an export to the part ``polyvision`` of its ``config.json``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from polyvision.activations import activation_info, activation_names
from polyvision.errors import PolyvisionError
from polyvision.models.language.shape import MoEShape, TransformerShape
from polyvision.models.language.transformer import Transformer

__all__ = [
    "LanguageNetwork",
    "Network",
    "VisionNetwork",
    "network_from_plain",
    "network_to_plain",
]


@dataclasses.dataclass(frozen=True)
class VisionNetwork:
    """An image classifier of ``create_vision_model``, and how its images are prepared.

    Attributes:
        name: the timm model.
        activation: registered name of the activation at every site.
        activation_options: keywords of its constructor.
        options: further keywords of ``timm.create_model``.
        on_leftover: what is done about activations that cannot be replaced.
        classes: class names; the position of a name is its label.
        in_chans: channels of the images.
        image_size: height and width after cropping.
        test_size: the same in validation and use, None for ``image_size``.
        mean: per-channel mean that is subtracted, on the scale 0 to 1.
        std: per-channel standard deviation that is divided by.
        crop_pct: side of the central crop, as a fraction of the resized image.
        interpolation: how images are resized.
    """

    name: str
    activation: str
    activation_options: Mapping[str, Any]
    options: Mapping[str, Any]
    on_leftover: str
    classes: list[str]
    in_chans: int
    image_size: int
    mean: list[float]
    std: list[float]
    crop_pct: float
    interpolation: str
    test_size: int | None = None

    task = "vision"

    def build(self) -> nn.Module:
        """Build the network with initial weights; the random state stays what it was."""
        from polyvision.models.vision.create import create_vision_model  # loads timm

        with torch.random.fork_rng(devices=[]):
            built = create_vision_model(
                self.name,
                self.activation,
                self.activation_options,
                num_classes=len(self.classes),
                image_size=self.image_size,
                in_chans=self.in_chans,
                model_kwargs=self.options,
                on_leftover="error" if self.on_leftover == "error" else "ignore",
            )
        known: Any = built.model.pretrained_cfg
        setattr(built.model, "pretrained_cfg", known | self.timm_config())  # noqa: B010 - for mypy
        return built.model

    def timm_config(self) -> dict[str, Any]:
        """Return the preprocessing in timm's words, as ``timm.data.resolve_data_config`` reads."""
        test = {}
        if self.test_size is not None:
            test["test_input_size"] = [self.in_chans, self.test_size, self.test_size]
        return {
            "input_size": [self.in_chans, self.image_size, self.image_size],
            **test,
            "interpolation": "bicubic" if self.interpolation == "random" else self.interpolation,
            "crop_pct": self.crop_pct,
            "crop_mode": "center",
            "mean": list(self.mean),
            "std": list(self.std),
            "num_classes": len(self.classes),
            "label_names": list(self.classes),
        }


@dataclasses.dataclass(frozen=True)
class LanguageNetwork:
    """A ``Transformer``."""

    shape: TransformerShape

    task = "language"

    @property
    def name(self) -> str:
        """Name of the architecture."""
        return "transformer"

    @property
    def activation(self) -> str:
        """Registered name of the activation in the feed-forward networks."""
        return self.shape.activation

    @property
    def activation_options(self) -> Mapping[str, Any]:
        """Keywords of the activation's constructor."""
        return self.shape.activation_options

    def build(self) -> nn.Module:
        """Build the network with initial weights; the random state stays what it was."""
        with torch.random.fork_rng(devices=[]):
            return Transformer(self.shape)


Network = VisionNetwork | LanguageNetwork


def network_to_plain(network: Network) -> dict[str, Any]:
    """Return the description as plain values, for JSON."""
    return {"task": network.task, **dataclasses.asdict(network)}


def _with_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Add the activation's options that an earlier version did not have, with their defaults."""
    values, name = dict(values), values["activation"]
    if name in activation_names():
        defaults = dataclasses.asdict(activation_info(name).options())
        values["activation_options"] = {**defaults, **values["activation_options"]}
    return values


def network_from_plain(plain: Any, place: str) -> Network:
    """Read a description back.

    Args:
        plain: what ``network_to_plain`` gave.
        place: where it was found, for the message.

    Raises:
        PolyvisionError: it is not a description of this version.
    """
    try:
        values = dict(plain)
        task = values.pop("task")
        if task == "vision":
            return VisionNetwork(**_with_options(values))
        if task == "language":
            shape = _with_options(values.pop("shape"))
            moe = shape.pop("moe", None)
            experts = None if moe is None else MoEShape(**moe)
            return LanguageNetwork(TransformerShape(**shape, moe=experts), **values)
    except PolyvisionError:
        raise
    except (TypeError, ValueError, KeyError) as error:
        raise PolyvisionError(f"{place} does not describe a network: {error}") from error
    raise PolyvisionError(f"{place} does not describe a network: task is {task!r}")
