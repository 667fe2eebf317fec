"""Images held in memory as uint8: nothing to decode, and often nothing to resize either."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from polyvision.data.images.augment import Augment
from polyvision.data.images.identity import array_digest, digest
from polyvision.data.images.sets import ImageData, Request, Sample, describe

__all__ = ["ArrayImages", "array_data"]

Pixels = tuple[NDArray[np.uint8], NDArray[np.int64]]


class ArrayImages(Dataset[Sample | None]):
    """Images in memory, (n, height, width) gray or (n, height, width, 3) RGB, as tensors.

    Where the settings ask for no more than a horizontal flip, and the images have the right size
    already, pixels are looked up in a table of normalised levels instead of going through Pillow:
    the same bits in a tenth of the time.

    Args:
        images: uint8 pixels.
        labels: int64 of shape (n,).
        request: size, augmentation and normalisation.
        training: augment.
        beside: images and labels that validate, which belong to the fingerprint of the set.
    """

    def __init__(
        self,
        images: NDArray[np.uint8],
        labels: NDArray[np.int64],
        request: Request,
        *,
        training: bool,
        beside: Pixels | None = None,
    ) -> None:
        assert images.dtype == np.uint8
        assert len(images) == len(labels)
        self.images = images
        self.labels = labels
        self.beside = beside
        self.transform = request.train_transform if training else request.val_transform
        self.flip = request.augment.hflip if training else 0.0
        self._levels = _levels(request) if self._keeps_pixels(request, training) else None

    def _keeps_pixels(self, request: Request, training: bool) -> bool:
        augment = request.augment
        side = request.image_size if training else request.val_size
        if self.images.shape[1:3] != (side, side):
            return False
        return _only_flips(augment) if training else augment.crop_pct == 1

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Sample:
        pixels, label = self.images[index], int(self.labels[index])
        if self._levels is None:
            return self.transform(Image.fromarray(pixels).convert("RGB")), label
        if self.flip and torch.rand(()).item() < self.flip:
            pixels = pixels[:, ::-1]
        return _look_up(self._levels, pixels), label

    def fingerprint(self) -> str:
        """Return a hash of the pixels and labels of training and validation images."""
        return digest(
            array_digest(array) for array in (self.images, self.labels, *(self.beside or ()))
        )


def _only_flips(augment: Augment) -> bool:
    others = (
        augment.color_jitter,
        augment.auto_augment,
        augment.erase,
        augment.rotate,
        augment.translate,
    )
    return tuple(augment.crop_scale) == (1, 1) and not any(others)


def _levels(request: Request) -> NDArray[np.float32]:
    """Return the normalised value of each level, (3, 256), computed as torchvision does."""
    levels = torch.arange(256, dtype=torch.float32).div(255).expand(3, -1)
    mean, std = (
        torch.tensor(tuple(values), dtype=torch.float32)[:, None]
        for values in (request.mean, request.std)
    )
    return ((levels - mean) / std).numpy()


def _look_up(levels: NDArray[np.float32], pixels: NDArray[np.uint8]) -> Tensor:
    if pixels.ndim == 2:
        return torch.from_numpy(levels.take(pixels, axis=1))
    found = [levels[channel].take(pixels[:, :, channel]) for channel in range(3)]
    return torch.from_numpy(np.stack(found))


def array_data(
    request: Request,
    train: Pixels,
    val: Pixels,
    classes: list[str],
    what: str,
) -> ImageData:
    """Make a data set of (images, labels) in memory; ``what`` begins its description."""
    return ImageData(
        train=ArrayImages(*train, request, training=True, beside=val),
        val=ArrayImages(*val, request, training=False),
        classes=classes,
        image_size=request.image_size,
        description=describe(what, len(train[1]), len(val[1]), len(classes)),
    )
