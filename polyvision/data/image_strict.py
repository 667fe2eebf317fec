"""Encoded images as training samples, with one rule for all of them: nothing is guessed.

An unreadable image is never replaced by another one. In training it is skipped, counted and named;
in validation, where a missing image would change the result, it is an error.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from polyvision.data.augment import Transform
from polyvision.data.decode import UnreadableImageError, decode_image
from polyvision.data.image_sets import ImageData, Request, Sample, describe
from polyvision.errors import PolyvisionError, some

__all__ = ["Source", "StrictImages", "strict_data"]

_log = logging.getLogger(__name__)


class Source(Protocol):
    """Encoded images by index.

    Whatever grows with the number of images is held in arrays, which worker processes share.
    """

    def __len__(self) -> int:
        """Number of images."""

    def read(self, index: int) -> tuple[Path | BinaryIO, int]:
        """Return a file to decode, or its content, and the label."""

    def name(self, index: int) -> str:
        """Name an image so that a person finds it."""

    def labels(self) -> NDArray[np.int64] | None:
        """Return all labels, or None where that would mean to read the images."""


class StrictImages(Dataset[Sample | None]):
    """Images of a source as (tensor, label), decoded when asked for.

    Args:
        source: the encoded images.
        transform: from an upright RGB image to a tensor.
        classes: number of classes.
        max_unreadable: how many unreadable images training may skip; None makes the first an error.
    """

    def __init__(
        self, source: Source, transform: Transform, *, classes: int, max_unreadable: int | None
    ) -> None:
        self.source = source
        self.transform = transform
        self.classes = classes
        self.max_unreadable = max_unreadable
        self._unreadable = torch.zeros(len(source), dtype=torch.bool)
        self._unreadable.share_memory_()  # type: ignore[no-untyped-call]

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Sample | None:
        """Return image and label, or None for an image that was skipped.

        Raises:
            PolyvisionError: an unreadable image in validation, or one too many in training; a label
                out of range.
        """
        try:
            encoded, label = self.source.read(index)
            image = decode_image(encoded)
        except (UnreadableImageError, OSError) as error:
            self._skip(index, error)
            return None
        if not 0 <= label < self.classes:
            raise _out_of_range(self.source, index, label, self.classes)
        return self.transform(image), label

    def unreadable(self) -> list[str]:
        """Name the images skipped so far, in all worker processes."""
        return [self.source.name(index) for index in self._unreadable.nonzero().flatten().tolist()]

    def _skip(self, index: int, error: Exception) -> None:
        name = self.source.name(index)
        if self.max_unreadable is None:
            raise PolyvisionError(
                f"cannot read the validation image {name}: {error}. Repair or remove it."
            ) from error
        if self._unreadable[index]:
            return
        self._unreadable[index] = True
        count = int(self._unreadable.sum())
        if count > self.max_unreadable:
            raise PolyvisionError(
                f"{count} training images cannot be read, more than max_unreadable="
                f"{self.max_unreadable}; the last is {name}: {error}. Repair or remove them, or "
                "raise the limit."
            ) from error
        _log.warning("skipped unreadable training image %d: %s: %s", count, name, error)


def strict_data(
    request: Request,
    train: Source,
    val: Source,
    classes: list[str],
    what: str,
    *,
    max_unreadable: int,
    notes: Sequence[str] = (),
) -> ImageData:
    """Make a data set of two sources; ``what`` begins its description.

    Raises:
        PolyvisionError: a side without images, fewer than two classes, a label out of range, or a
            class in validation that training never shows.
    """
    if max_unreadable < 0:
        raise PolyvisionError(f"max_unreadable must be at least 0, got {max_unreadable}")
    if len(classes) < 2:
        raise PolyvisionError(f"{what}: at least two classes are needed, found {classes or 'none'}")
    for side, source in (("training", train), ("validation", val)):
        if not len(source):
            raise PolyvisionError(f"{what}: there is no {side} image")
        _check_labels(source, len(classes))
    absent = _check_sides(train.labels(), val.labels(), classes, what)
    train_set, val_set = (
        StrictImages(source, transform, classes=len(classes), max_unreadable=limit)
        for source, transform, limit in (
            (train, request.train_transform, max_unreadable),
            (val, request.val_transform, None),
        )
    )
    return ImageData(
        train=train_set,
        val=val_set,
        classes=classes,
        image_size=request.image_size,
        description=describe(what, len(train), len(val), len(classes)),
        notes=[*notes, *absent],
        unreadable=train_set.unreadable,
    )


def _check_labels(source: Source, classes: int) -> None:
    labels = source.labels()
    if labels is None:
        return
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(wrong):
        first = int(wrong[0])
        raise _out_of_range(source, first, int(labels[first]), classes, len(wrong))


def _out_of_range(
    source: Source, index: int, label: int, classes: int, count: int = 1
) -> PolyvisionError:
    more = f", and {count - 1:,} more labels are out of range" if count > 1 else ""
    return PolyvisionError(
        f"{source.name(index)} has the label {label}; {classes} classes have the labels 0 to "
        f"{classes - 1}{more}"
    )


def _check_sides(
    train: NDArray[np.int64] | None,
    val: NDArray[np.int64] | None,
    classes: list[str],
    what: str,
) -> list[str]:
    if train is None or val is None:
        return []
    seen, asked = (np.bincount(labels, minlength=len(classes)) > 0 for labels in (train, val))
    unseen = [name for name, missing in zip(classes, asked & ~seen, strict=True) if missing]
    if unseen:
        raise PolyvisionError(
            f"{what}: validation has images of {some(unseen)}, of which training has none"
        )
    absent = [name for name, missing in zip(classes, ~seen, strict=True) if missing]
    return [f"no image at all of {some(absent)}"] if absent else []
