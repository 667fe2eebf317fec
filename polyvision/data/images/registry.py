"""Image classification data by name: training and validation sets behind one function.

A further data set is one loader function and one line in ``LOADERS``.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image
from torch.utils.data import Dataset

from polyvision.data.images.arrays import array_data
from polyvision.data.images.augment import Augment, Transform
from polyvision.data.images.class_folders import load_folder, load_imagenet
from polyvision.data.images.hub import load_hfds, load_tfds
from polyvision.data.images.sets import ImageData, Request, Sample, collate, describe
from polyvision.data.images.tar import load_tar, load_wds
from polyvision.data.images.torchvision import (
    load_cifar10,
    load_cifar100,
    load_fashion_mnist,
    load_imagenette,
)
from polyvision.errors import PolyvisionError, unknown

__all__ = [
    "LOADERS",
    "Augment",
    "FakeImages",
    "ImageData",
    "collate",
    "load_image_data",
]


def load_image_data(
    name: str,
    *,
    image_size: int,
    augment: Augment,
    mean: Sequence[float],
    std: Sequence[float],
    val_fraction: float | None = 0.2,
    test_size: int | None = None,
    **options: Any,
) -> ImageData:
    """Load the image data set ``name``.

    Args:
        name: a key of ``LOADERS``.
        image_size: height and width of the images after cropping.
        augment: crops and augmentation.
        mean: per-channel mean that is subtracted, on the scale 0 to 1.
        std: per-channel standard deviation that is divided by.
        val_fraction: share of each class that validates, for data that comes in one piece; None
            for data with a validation set of its own.
        test_size: height and width in validation; None for ``image_size``.
        options: keywords of the loader, such as ``root``; None counts as not given.

    Raises:
        PolyvisionError: a name, option, value, or the data on disk does not fit.
    """
    if name not in LOADERS:
        raise unknown("image data", name, LOADERS)
    given = {key: value for key, value in options.items() if value is not None}
    _check_options(name, given)
    if val_fraction is not None and not 0 < val_fraction < 1:
        raise PolyvisionError(f"val_fraction must be between 0 and 1, got {val_fraction!r}")
    if val_fraction is not None and name in _HAS_VAL:
        raise PolyvisionError(
            f"image data {name!r} has its own validation images: val_fraction must be null, "
            f"got {val_fraction!r}"
        )
    for key, size in (("image_size", image_size), ("test_size", test_size)):
        if size is not None and size < 1:
            raise PolyvisionError(f"{key} must be at least 1, got {size!r}")
    for key, values in (("mean", mean), ("std", std)):
        if len(values) != 3 or (key == "std" and min(values) <= 0):
            positive = " above 0" if key == "std" else ""
            raise PolyvisionError(f"{key} must be three numbers{positive}, got {list(values)}")
    request = Request(
        image_size=image_size,
        augment=augment,
        mean=tuple(mean),
        std=tuple(std),
        val_fraction=val_fraction,
        test_size=test_size,
    )
    return LOADERS[name](request, **given)


def _check_options(name: str, given: Mapping[str, Any]) -> None:
    hints = typing.get_type_hints(LOADERS[name])
    valid = list(inspect.signature(LOADERS[name]).parameters)[1:]
    for option, value in given.items():
        if option not in valid:
            raise PolyvisionError(
                f"image data {name!r} has no option {option!r}. "
                + (f"Valid: {', '.join(valid)}." if valid else "It takes none.")
            )
        kinds = typing.get_args(hints[option]) or (hints[option],)  # of `str | None`
        if type(value) not in kinds:
            wanted = {bool: "true or false", int: "an integer", str: "text"}[kinds[0]]
            raise PolyvisionError(
                f"option {option!r} of image data {name!r} must be {wanted}, got {value!r}"
            )


class FakeImages(Dataset[Sample | None]):
    """Noise over a coarse colour pattern that belongs to the class; no file is read.

    Image ``i`` is the same in every process and run: class ``i % classes``, noise seeded by ``i``.
    """

    def __init__(self, indices: range, classes: int, size: int, transform: Transform) -> None:
        self.indices = indices
        self.classes = classes
        self.size = size
        self.transform = transform

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Sample:
        label = self.indices[index] % self.classes
        return self.transform(self.image(index)), label

    def image(self, index: int) -> Image.Image:
        """Return image ``index`` before the transform."""
        number = self.indices[index]
        side = self.size
        pattern = np.random.default_rng([0, number % self.classes]).integers(
            0, 192, (4, 4, 3), dtype=np.uint8
        )
        rows = np.arange(side) * 4 // side
        noise = np.random.default_rng([1, number]).integers(0, 64, (side, side, 3), dtype=np.uint8)
        return Image.fromarray(pattern[rows][:, rows] + noise)


def _load_digits(request: Request) -> ImageData:
    """1,797 handwritten digits that ship with scikit-learn: 8x8, gray, values 0 to 16.

    Source: Alpaydin and Kaynak 1998, https://doi.org/10.24432/C50P49. The split is fixed.
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    images = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    labels = digits.target.astype(np.int64)
    train, val = train_test_split(
        np.arange(len(labels)), test_size=request.share(), stratify=labels, random_state=0
    )
    return array_data(
        request,
        (images[train], labels[train]),
        (images[val], labels[val]),
        [str(name) for name in digits.target_names],
        "handwritten digits of scikit-learn",
    )


def _load_fake(
    request: Request, samples: int = 1280, classes: int = 1000, source_size: int = 256
) -> ImageData:
    """Images without files, to try a network or to measure speed: ImageNet's shape by default."""
    val = round(samples * request.share())
    if classes < 2 or source_size < 4 or not 0 < val < samples:
        raise PolyvisionError(
            "fake image data needs at least 2 classes, source_size 4 and one sample on each side "
            f"of the split, got classes={classes}, source_size={source_size}, samples={samples} "
            f"with val_fraction={request.share():g}"
        )
    train = samples - val
    return ImageData(
        train=FakeImages(range(train), classes, source_size, request.train_transform),
        val=FakeImages(range(train, samples), classes, source_size, request.val_transform),
        classes=[f"class {i}" for i in range(classes)],
        image_size=request.image_size,
        description=describe("made-up images", train, val, classes),
    )


LOADERS: dict[str, Callable[..., ImageData]] = {
    "cifar10": load_cifar10,
    "cifar100": load_cifar100,
    "digits": _load_digits,
    "fake": _load_fake,
    "fashion_mnist": load_fashion_mnist,
    "folder": load_folder,
    "hfds": load_hfds,
    "imagenet": load_imagenet,
    "tar": load_tar,
    "tfds": load_tfds,
    "wds": load_wds,
    "imagenette": load_imagenette,
}

# Data with a validation set of its own.
_HAS_VAL = frozenset(LOADERS) - {"digits", "fake", "folder"}
