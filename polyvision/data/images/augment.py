"""Augmentation settings, and the transforms that timm and torchvision build from them.

All randomness comes from the global generators of torch, numpy and Python, so that a loader which
seeds these per sample repeats every image exactly.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from PIL.Image import Image, Resampling
from timm.data import create_transform
from torch import Tensor
from torchvision import transforms

from polyvision.errors import PolyvisionError, unknown

__all__ = ["Augment", "Transform", "eval_transform", "train_transform"]

Transform = Callable[[Image], Tensor]

_INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "lanczos", "random")
_TRIVIAL = "trivial"
_HIGHEST = {"hflip": 1, "color_jitter": 1, "erase": 1, "rotate": 180, "translate": 1}


@dataclasses.dataclass(frozen=True)
class Augment:
    """How images are cropped and varied; the same settings for every data set.

    Attributes:
        crop_scale: smallest and largest share of the image's area that a training crop covers, at a
            ratio of width to height from 3/4 to 4/3; (1, 1) takes the whole of an image within
            these ratios.
        hflip: probability of a horizontal flip.
        color_jitter: strength of brightness, contrast and saturation changes; 0 is off. timm leaves
            it out when ``auto_augment`` is set.
        auto_augment: a timm policy such as ``rand-m7-mstd0.5-inc1``, ``augmix-m3-w3``,
            ``original`` or ``3a``, or ``trivial``, torchvision's TrivialAugmentWide (Mueller and
            Hutter 2021, https://arxiv.org/abs/2103.10158); None is off.
        erase: probability of erasing a rectangle, filled with noise, after normalisation.
        rotate: largest rotation in degrees, to either side; corners are filled with black.
        translate: largest shift as a fraction of the image's side; edges are filled with black.
        interpolation: ``nearest``, ``bilinear``, ``bicubic``, ``lanczos``, or ``random``: bilinear
            or bicubic per training image, bicubic in validation.
        crop_pct: side of validation's central crop, as a fraction of the resized image.
    """

    crop_scale: Sequence[float] = (0.08, 1.0)
    hflip: float = 0.5
    color_jitter: float = 0.0
    auto_augment: str | None = None
    erase: float = 0.0
    rotate: float = 0.0
    translate: float = 0.0
    interpolation: str = "bicubic"
    crop_pct: float = 0.875

    def __post_init__(self) -> None:
        scale = tuple(self.crop_scale)
        if len(scale) != 2 or not 0 < scale[0] <= scale[1] <= 1:
            raise PolyvisionError(
                "augment.crop_scale must be two ascending numbers above 0 and at most 1, "
                f"got {list(scale)}"
            )
        for name, highest in _HIGHEST.items():
            value = getattr(self, name)
            if not 0 <= value <= highest:
                raise PolyvisionError(
                    f"augment.{name} must be from 0 to {highest:g}, got {value!r}"
                )
        if not 0 < self.crop_pct <= 1:
            raise PolyvisionError(
                f"augment.crop_pct must be above 0 and at most 1, got {self.crop_pct!r}"
            )
        if self.interpolation not in _INTERPOLATIONS:
            raise unknown("augment.interpolation", self.interpolation, _INTERPOLATIONS)


def train_transform(
    augment: Augment, image_size: int, mean: Sequence[float], std: Sequence[float]
) -> Transform:
    """Build the transform from an RGB image to a training tensor (3, image_size, image_size).

    Raises:
        PolyvisionError: timm does not know the ``auto_augment`` policy.
    """
    trivial = augment.auto_augment == _TRIVIAL
    _check_policy(augment.auto_augment)
    settings: dict[str, Any] = {
        "scale": tuple(augment.crop_scale),
        "hflip": augment.hflip,
        "color_jitter": None if trivial else augment.color_jitter or None,
        "auto_augment": None if trivial else augment.auto_augment,
        "interpolation": augment.interpolation,
        "re_prob": augment.erase,
        "re_mode": "pixel",
        "mean": tuple(mean),
        "std": tuple(std),
    }
    try:
        spatial, colour, final = create_transform(
            image_size, is_training=True, separate=True, **settings
        )
    except (AssertionError, KeyError, ValueError) as error:
        raise _no_policy(augment.auto_augment) from error
    if trivial:
        colour = transforms.TrivialAugmentWide(interpolation=_resampling(augment.interpolation))
    steps = [spatial, colour, final]
    if augment.rotate or augment.translate:
        shift = (augment.translate, augment.translate)
        bilinear = transforms.InterpolationMode.BILINEAR
        steps.insert(
            1, transforms.RandomAffine(augment.rotate, translate=shift, interpolation=bilinear)
        )
    transform: Transform = transforms.Compose(steps)
    return transform


def _check_policy(policy: str | None) -> None:
    """Refuse parts of a policy without a value, which timm would pass over."""
    parts = [] if policy is None else policy.split("-")
    wrong = [p for p in parts[1:] if not p.startswith("t") and not any(c.isdigit() for c in p)]
    if wrong or parts[:1] == [""]:
        raise _no_policy(policy)


def _no_policy(policy: str | None) -> PolyvisionError:
    return PolyvisionError(
        f"augment.auto_augment={policy!r} is not a policy of timm; examples: rand-m7-mstd0.5-inc1, "
        f"augmix-m3-w3, original, 3a; trivial is torchvision's; null is none"
    )


def _resampling(name: str) -> transforms.InterpolationMode:
    modes = transforms.InterpolationMode
    return {"nearest": modes.NEAREST, "bicubic": modes.BICUBIC}.get(name, modes.BILINEAR)


def eval_transform(
    augment: Augment, image_size: int, mean: Sequence[float], std: Sequence[float]
) -> Transform:
    """Build the transform of validation: resize the shorter side, crop the centre, normalise."""
    interpolation = "bicubic" if augment.interpolation == "random" else augment.interpolation
    whole = create_transform(
        image_size,
        interpolation=interpolation,
        crop_pct=augment.crop_pct,
        mean=tuple(mean),
        std=tuple(std),
    )
    shorter = math.floor(image_size / augment.crop_pct)  # what timm resizes it to
    transform: Transform = transforms.Compose([_ThinImages(shorter, interpolation), whole])
    return transform


# Of a longer image only the middle is resized: 20,000 x 1 pixels would become 5,120,000 x 256.
_LONGEST = 8


class _ThinImages:
    """Resize the middle of a thin image, which is all that the crop after it keeps of one.

    Others stay as they are. What is resized here has the size that ``Resize`` asks for on its
    shorter side, which then changes nothing, and its pixels are those of the whole resized image,
    but for the order in which Pillow rounds rows and columns.

    Args:
        shorter: the shorter side after resizing.
        interpolation: name of the method.
    """

    def __init__(self, shorter: int, interpolation: str) -> None:
        self.shorter = shorter
        self.method = Resampling[interpolation.upper()]

    def __call__(self, image: Image) -> Image:
        short, long = sorted(image.size)
        if long <= _LONGEST * short:
            return image
        whole = int(self.shorter * long / short)
        # The central crop rounds halves to even: the same remainder gives it the same place.
        kept = self.shorter + (whole - self.shorter) % 4
        first = (whole - kept) // 2
        begin, end = (place * long / whole for place in (first, first + kept))
        wide = image.width > image.height
        size = (kept, self.shorter) if wide else (self.shorter, kept)
        box = (begin, 0, end, short) if wide else (0, begin, short, end)
        return image.resize(size, self.method, box=box)
