"""Image classification data by name: training and validation sets behind one function.

A further data set is one loader function and one line in ``LOADERS``.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from polyvision.data.augment import Augment, Transform, eval_transform, train_transform
from polyvision.data.folder import ClassTree, ImageFiles, scan_class_tree, split_class_tree
from polyvision.errors import PolyvisionError, unknown

__all__ = [
    "LOADERS",
    "ArrayImages",
    "Augment",
    "FakeImages",
    "ImageData",
    "Request",
    "collate",
    "load_image_data",
]

Sample = tuple[Tensor, int]


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
    """

    train: Dataset[Sample | None]
    val: Dataset[Sample | None]
    classes: list[str]
    image_size: int
    description: str
    notes: tuple[str, ...] = ()
    in_chans: int = 3

    def unreadable(self) -> list[Path]:
        """Name the training files skipped so far as unreadable."""
        return self.train.unreadable() if isinstance(self.train, ImageFiles) else []


@dataclasses.dataclass(frozen=True)
class Request:
    """What every loader is asked for."""

    image_size: int
    val_fraction: float
    train_transform: Transform
    val_transform: Transform


def load_image_data(
    name: str,
    *,
    image_size: int,
    augment: Augment,
    mean: Sequence[float],
    std: Sequence[float],
    val_fraction: float = 0.2,
    **options: Any,
) -> ImageData:
    """Load the image data set ``name``.

    Args:
        name: a key of ``LOADERS``.
        image_size: height and width of the images after cropping.
        augment: crops and augmentation.
        mean: per-channel mean that is subtracted, on the scale 0 to 1.
        std: per-channel standard deviation that is divided by.
        val_fraction: share of each class that validates, for data that comes in one piece.
        options: keywords of the loader, such as ``root``; None counts as not given.

    Raises:
        PolyvisionError: a name, option, value, or the data on disk does not fit.
    """
    if name not in LOADERS:
        raise unknown("image data", name, LOADERS)
    given = {key: value for key, value in options.items() if value is not None}
    valid = list(inspect.signature(LOADERS[name]).parameters)[1:]
    for option in given:
        if option not in valid:
            raise PolyvisionError(
                f"image data {name!r} has no option {option!r}. "
                + (f"Valid: {', '.join(valid)}." if valid else "It takes none.")
            )
    if not 0 < val_fraction < 1:
        raise PolyvisionError(f"val_fraction must be between 0 and 1, got {val_fraction!r}")
    if image_size < 1:
        raise PolyvisionError(f"image_size must be at least 1, got {image_size!r}")
    for key, values in (("mean", mean), ("std", std)):
        if len(values) != 3 or (key == "std" and min(values) <= 0):
            positive = " above 0" if key == "std" else ""
            raise PolyvisionError(f"{key} must be three numbers{positive}, got {list(values)}")
    request = Request(
        image_size=image_size,
        val_fraction=val_fraction,
        train_transform=train_transform(augment, image_size, mean, std),
        val_transform=eval_transform(augment, image_size, mean, std),
    )
    return LOADERS[name](request, **given)


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


class ArrayImages(Dataset[Sample | None]):
    """Images held in memory as uint8, (n, height, width) gray or (n, height, width, 3) RGB."""

    def __init__(
        self, images: NDArray[np.uint8], labels: NDArray[np.int64], transform: Transform
    ) -> None:
        assert images.dtype == np.uint8
        assert len(images) == len(labels)
        self.images = images
        self.labels = labels
        self.transform = transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Sample:
        image = Image.fromarray(self.images[index]).convert("RGB")
        return self.transform(image), int(self.labels[index])


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
        np.arange(len(labels)), test_size=request.val_fraction, stratify=labels, random_state=0
    )
    return ImageData(
        train=ArrayImages(images[train], labels[train], request.train_transform),
        val=ArrayImages(images[val], labels[val], request.val_transform),
        classes=[str(name) for name in digits.target_names],
        image_size=request.image_size,
        description=_describe("handwritten digits of scikit-learn", len(train), len(val), 10),
    )


def _load_fake(
    request: Request, samples: int = 1280, classes: int = 1000, source_size: int = 256
) -> ImageData:
    """Images without files, to try a network or to measure speed: ImageNet's shape by default."""
    val = round(samples * request.val_fraction)
    if classes < 2 or source_size < 4 or not 0 < val < samples:
        raise PolyvisionError(
            "fake image data needs at least 2 classes, source_size 4 and one sample on each side "
            f"of the split, got classes={classes}, source_size={source_size}, samples={samples} "
            f"with val_fraction={request.val_fraction:g}"
        )
    train = samples - val
    return ImageData(
        train=FakeImages(range(train), classes, source_size, request.train_transform),
        val=FakeImages(range(train, samples), classes, source_size, request.val_transform),
        classes=[f"class {i}" for i in range(classes)],
        image_size=request.image_size,
        description=_describe("made-up images", train, val, classes),
    )


def _load_folder(request: Request, root: str | None = None, max_unreadable: int = 20) -> ImageData:
    """Image files in ``root/train/<class>`` and ``root/val/<class>``, or in ``root/<class>``."""
    train, val = _find_trees(_existing_folder(root), request.val_fraction)
    if train.classes != val.classes:
        missing = sorted(set(train.classes) ^ set(val.classes))
        raise PolyvisionError(
            f"{train.root} and {val.root} must hold the same classes; only one of them has: "
            f"{', '.join(missing[:5])}" + (f" and {len(missing) - 5} more" if missing[5:] else "")
        )
    return ImageData(
        train=ImageFiles(train, request.train_transform, max_unreadable=max_unreadable),
        val=ImageFiles(val, request.val_transform, max_unreadable=None),
        classes=train.classes,
        image_size=request.image_size,
        description=_describe(f"images of {root}", len(train), len(val), len(train.classes)),
        notes=train.notes + val.notes,
    )


def _existing_folder(root: str | None) -> Path:
    layout = "<root>/train/<class> and <root>/val/<class>, or <root>/<class>"
    if root is None:
        raise PolyvisionError(f"image data 'folder' needs root: the folder with {layout}")
    folder = Path(root).expanduser()
    if not folder.is_dir():
        state = "is a file" if folder.exists() else "does not exist"
        raise PolyvisionError(f"the image folder {root} {state}; root is the folder with {layout}")
    return folder


def _find_trees(root: Path, val_fraction: float) -> tuple[ClassTree, ClassTree]:
    """Take ``train`` and ``val`` as they are, or split one tree of classes."""
    present = [name for name in ("train", "val") if (root / name).is_dir()]
    if len(present) == 2:
        return scan_class_tree(root / "train"), scan_class_tree(root / "val")
    for name in present:
        if any(entry.is_dir() for entry in (root / name).iterdir()):
            other = "val" if name == "train" else "train"
            raise PolyvisionError(
                f"{root} has {name}/ with class folders but no {other}/. Add it, or give "
                f"{root / name} as root to split it by val_fraction."
            )
    return split_class_tree(scan_class_tree(root), val_fraction)


def _describe(what: str, train: int, val: int, classes: int) -> str:
    return f"{what}: {train:,} training and {val:,} validation images in {classes:,} classes"


LOADERS: dict[str, Callable[..., ImageData]] = {
    "digits": _load_digits,
    "fake": _load_fake,
    "folder": _load_folder,
}
