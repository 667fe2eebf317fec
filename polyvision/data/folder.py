"""Image files in class folders: listing, splitting, and a data set that never guesses.

An unreadable file is never replaced by another image. In training it is skipped, counted and named;
in validation, where a missing image would change the result, it is an error.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from polyvision.data.augment import Transform
from polyvision.data.decode import EXTENSIONS, UnreadableImageError, decode_image
from polyvision.errors import PolyvisionError

__all__ = ["ClassTree", "ImageFiles", "scan_class_tree", "split_class_tree"]

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ClassTree:
    """Image files below one folder, one sub-folder per class.

    Attributes:
        root: the folder.
        files: per class name, in sorted order, the sorted paths of its images relative to ``root``.
        notes: what was ignored, one sentence each.
    """

    root: Path
    files: dict[str, list[str]]
    notes: tuple[str, ...] = ()

    @property
    def classes(self) -> list[str]:
        """Class names; the position of a name is its label."""
        return list(self.files)

    def __len__(self) -> int:
        return sum(map(len, self.files.values()))


def scan_class_tree(root: Path) -> ClassTree:
    """List the images in every class folder of ``root``, also in folders further down.

    Names that begin with a dot are ignored, as are files without an image's extension; both are
    noted. Links are followed.

    Raises:
        PolyvisionError: ``root`` cannot be listed, a class folder has no image, or there are fewer
            than two classes.
    """
    ignored: dict[str, list[str]] = collections.defaultdict(list)
    files: dict[str, list[str]] = {}
    try:
        for entry in sorted(os.scandir(root), key=lambda entry: entry.name):
            if entry.is_dir() and not entry.name.startswith("."):
                files[entry.name] = sorted(_images_below(root, Path(entry.name), ignored))
            else:
                kind = "hidden" if entry.name.startswith(".") else "outside any class folder"
                ignored[kind].append(entry.name)
    except OSError as error:
        raise PolyvisionError(f"cannot list the image folder {root}: {error.strerror}") from error
    empty = [name for name, images in files.items() if not images]
    if empty:
        raise PolyvisionError(
            f"no image in class folder {_some(empty)} of {root}. Put images there "
            f"({', '.join(EXTENSIONS)}) or delete the folder."
        )
    if len(files) < 2:
        found = f"only {next(iter(files))!r}" if files else "none"
        raise PolyvisionError(f"{root} must hold one folder per class, at least two; found {found}")
    notes = [f"ignored {kind} in {root}: {_some(names)}" for kind, names in ignored.items()]
    return ClassTree(root, files, tuple(notes))


def _images_below(root: Path, folder: Path, ignored: dict[str, list[str]]) -> Iterator[str]:
    """Yield the images below ``root / folder``, relative to ``root`` and with forward slashes."""
    pending, seen = [folder], set()
    while pending:
        current = pending.pop()
        real = os.path.realpath(root / current)
        if real in seen:  # a link that leads back
            continue
        seen.add(real)
        for entry in os.scandir(root / current):
            path = current / entry.name
            if entry.name.startswith("."):
                ignored["hidden"].append(path.as_posix())
            elif entry.is_dir():
                pending.append(path)
            elif path.suffix.lower() in EXTENSIONS:
                yield path.as_posix()
            else:
                ignored["without an image's extension"].append(path.as_posix())


def _some(names: Sequence[str], limit: int = 5) -> str:
    shown = ", ".join(sorted(names)[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def split_class_tree(tree: ClassTree, val_fraction: float) -> tuple[ClassTree, ClassTree]:
    """Split every class alike into training and validation files.

    The split depends on the relative paths alone (their hashes decide), not on a seed, the machine
    or the order of listing.

    Raises:
        PolyvisionError: a class has one image only.
    """
    train: dict[str, list[str]] = {}
    val: dict[str, list[str]] = {}
    for name, files in tree.files.items():
        if len(files) < 2:
            raise PolyvisionError(
                f"class {name!r} of {tree.root} has one image; a split needs at least two"
            )
        count = min(max(round(len(files) * val_fraction), 1), len(files) - 1)
        shuffled = sorted(files, key=lambda path: hashlib.sha256(os.fsencode(path)).digest())
        train[name], val[name] = sorted(shuffled[count:]), sorted(shuffled[:count])
    return ClassTree(tree.root, train, tree.notes), ClassTree(tree.root, val)


class ImageFiles(Dataset["tuple[Tensor, int] | None"]):
    """The images of a class tree as (tensor, label), read when asked for.

    Paths and flags live in arrays, which worker processes share instead of copying.

    Args:
        tree: the files.
        transform: from an upright RGB image to a tensor.
        max_unreadable: how many unreadable files training may skip; None makes the first an error.
    """

    def __init__(
        self, tree: ClassTree, transform: Transform, *, max_unreadable: int | None
    ) -> None:
        self.root = tree.root
        self.transform = transform
        self.max_unreadable = max_unreadable
        counts = [len(files) for files in tree.files.values()]
        self._labels = np.repeat(np.arange(len(counts)), counts)
        self._paths = np.array([os.fsencode(p) for files in tree.files.values() for p in files])
        self._unreadable = torch.zeros(len(self._paths), dtype=torch.bool)
        self._unreadable.share_memory_()  # type: ignore[no-untyped-call]

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int] | None:
        """Return image and label, or None for a file that was skipped.

        Raises:
            PolyvisionError: an unreadable file in validation, or one too many in training.
        """
        try:
            image = decode_image(self.path(index))
        except UnreadableImageError as error:
            self._skip(index, error)
            return None
        return self.transform(image), int(self._labels[index])

    def path(self, index: int) -> Path:
        """Return the path of image ``index``."""
        return self.root / os.fsdecode(self._paths[index])

    def unreadable(self) -> list[Path]:
        """Name the files skipped so far, in all worker processes."""
        return [self.path(int(index)) for index in self._unreadable.nonzero().flatten()]

    def _skip(self, index: int, error: UnreadableImageError) -> None:
        path = self.path(index)
        if self.max_unreadable is None:
            raise PolyvisionError(
                f"cannot read the validation image {path}: {error}. Repair or remove it."
            ) from error
        if self._unreadable[index]:
            return
        self._unreadable[index] = True
        count = int(self._unreadable.sum())
        if count > self.max_unreadable:
            raise PolyvisionError(
                f"{count} training images cannot be read, more than max_unreadable="
                f"{self.max_unreadable}; the last is {path}: {error}. Repair or remove them, or "
                "raise the limit."
            ) from error
        _log.warning("skipped unreadable training image %d: %s: %s", count, path, error)
