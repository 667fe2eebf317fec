"""What an image data set is, whatever it is read from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from torch import Tensor
from torch.utils.data import Dataset, default_collate

from polyvision.data.images.augment import Augment, Transform, eval_transform, train_transform
from polyvision.data.images.skips import SkippedImages
from polyvision.errors import PolyvisionError

__all__ = ["ImageData", "Request", "Sample", "collate", "describe"]

Sample = tuple[Tensor, int]


def _nothing() -> None:
    pass


@dataclasses.dataclass(frozen=True)
class ImageData:
    """Training and validation images of one data set.

    Attributes:
        train: map-style data set of (float32 image of shape (in_chans, image_size, image_size),
            label), or None in place of a file that was skipped; batch it with ``collate``.
        val: the same without None.
        classes: class names; the position of a name is its label.
        image_size: height and width of the images.
        description: one line for the plan.
        notes: what was ignored while the data was listed, one sentence each.
        in_chans: channels of the images.
        skipped: the training images left out because they cannot be read; None where none can be.
        check: looks quickly at the validation images, and raises an error if some are no images.
    """

    train: Dataset[Sample | None]
    val: Dataset[Sample | None]
    classes: list[str]
    image_size: int
    description: str
    notes: list[str] = dataclasses.field(default_factory=list)
    in_chans: int = 3
    skipped: SkippedImages | None = None
    check: Callable[[], None] = _nothing

    def unreadable(self) -> list[str]:
        """Name the training images skipped so far because they cannot be read."""
        return [] if self.skipped is None else self.skipped.names()


@dataclasses.dataclass(frozen=True)
class Request:
    """What every loader is asked for.

    Attributes:
        image_size: height and width of the images after cropping.
        augment: crops and augmentation.
        mean: per-channel mean that is subtracted, on the scale 0 to 1.
        std: per-channel standard deviation that is divided by.
        val_fraction: share that validates, for data that comes in one piece; None for other data.
        test_size: height and width in validation; None for ``image_size``.
    """

    image_size: int
    augment: Augment
    mean: Sequence[float]
    std: Sequence[float]
    val_fraction: float | None
    test_size: int | None = None

    def share(self) -> float:
        """Return the share that validates.

        Raises:
            PolyvisionError: none is given.
        """
        if self.val_fraction is None:
            raise PolyvisionError(
                "this image data comes in one piece: give data.val_fraction, the share of it that "
                "validates, such as 0.1"
            )
        return self.val_fraction

    @property
    def train_transform(self) -> Transform:
        """From an RGB image to a training tensor."""
        return train_transform(self.augment, self.image_size, self.mean, self.std)

    @property
    def val_transform(self) -> Transform:
        """From an RGB image to a validation tensor."""
        return eval_transform(self.augment, self.val_size, self.mean, self.std)

    @property
    def val_size(self) -> int:
        """Height and width of the images in validation."""
        return self.image_size if self.test_size is None else self.test_size


def collate(batch: Sequence[Sample | None]) -> tuple[Tensor, Tensor]:
    """Stack samples into images (B, C, H, W) and labels (B,), leaving skipped ones out.

    Raises:
        PolyvisionError: no sample is left.
    """
    kept = [sample for sample in batch if sample is not None]
    if not kept:
        raise PolyvisionError(
            f"none of the {len(batch)} images of a batch can be read; the log names them. "
            "Repair or remove them, or use larger batches."
        )
    images, labels = default_collate(kept)
    return images, labels


def describe(what: str, train: int, val: int, classes: int) -> str:
    """Return the plan's line about a data set."""
    return f"{what}: {train:,} training and {val:,} validation images in {classes:,} classes"
