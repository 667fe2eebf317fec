"""Encoded images as training samples, with one rule for all of them: nothing is guessed.

An unreadable image is never replaced by another one. In training it is skipped, counted and named;
in validation, where a missing image would change the result, it is an error.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from polyvision.data.images.augment import Transform
from polyvision.data.images.decode import UnreadableImageError, check_header, decode_image
from polyvision.data.images.identity import content_digests, digest
from polyvision.data.images.sets import ImageData, Request, Sample, describe
from polyvision.data.images.skips import SkippedImages
from polyvision.data.images.source import Source
from polyvision.errors import PolyvisionError, some

__all__ = ["StrictImages", "strict_data"]


class StrictImages(Dataset[Sample | None]):
    """Images of a source as (tensor, label), decoded when asked for.

    Args:
        source: the encoded images.
        transform: from an upright RGB image to a tensor.
        classes: number of classes.
        skipped: counts the unreadable images that training leaves out; None makes the first an
            error.
        beside: the source that validates, which belongs to the fingerprint of the set.
    """

    def __init__(
        self,
        source: Source,
        transform: Transform,
        *,
        classes: int,
        skipped: SkippedImages | None = None,
        beside: Source | None = None,
    ) -> None:
        self.source = source
        self.transform = transform
        self.classes = classes
        self.skipped = skipped
        self.beside = beside

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
            if self.skipped is None:
                raise _unreadable(self.source, index, error) from error
            self.skipped.add(index, error)
            return None
        if not 0 <= label < self.classes:
            raise _out_of_range(self.source, index, label, self.classes)
        return self.transform(image), label

    def fingerprint(self) -> str:
        """Return a hash of the names and labels of training and validation images."""
        return digest(source.identity() for source in self._sources())

    def contents(self) -> list[str | None]:
        """Return hashes of the contents of some images of both; None for one that is unreadable."""
        return [found for source in self._sources() for found in content_digests(source)]

    def check_headers(self, seconds: float = 10.0) -> None:
        """Read the headers of all images, or of as many as the time allows, evenly spread.

        A source that gives no labels without reading its images is not read here either.

        Raises:
            PolyvisionError: some are no images, or too large.
        """
        if self.source.labels() is None:
            return
        end = time.monotonic() + seconds
        broken: dict[int, UnreadableImageError | OSError] = {}
        for index in np.random.default_rng(0).permutation(len(self)).tolist():
            try:
                check_header(self.source.read(index)[0])
            except (UnreadableImageError, OSError) as error:
                broken[index] = error
            if time.monotonic() > end:
                break
        if broken:
            first = min(broken)
            more = f", and {len(broken) - 1:,} more" if len(broken) > 1 else ""
            raise _unreadable(self.source, first, broken[first], more)

    def _sources(self) -> list[Source]:
        return [self.source] if self.beside is None else [self.source, self.beside]


def _unreadable(source: Source, index: int, error: Exception, more: str = "") -> PolyvisionError:
    return PolyvisionError(
        f"cannot read the validation image {source.name(index)}: {error}{more}. Repair or remove "
        f"{'them' if more else 'it'}."
    )


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
    skipped = SkippedImages(train, max_unreadable)
    val_set = StrictImages(val, request.val_transform, classes=len(classes))
    return ImageData(
        train=StrictImages(
            train, request.train_transform, classes=len(classes), skipped=skipped, beside=val
        ),
        val=val_set,
        classes=classes,
        image_size=request.image_size,
        description=describe(what, len(train), len(val), len(classes)),
        notes=[*notes, *absent],
        skipped=skipped,
        check=val_set.check_headers,
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
