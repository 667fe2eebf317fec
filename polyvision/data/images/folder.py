"""Image files in class folders: listing and splitting."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from polyvision.data.images.decode import EXTENSIONS
from polyvision.data.images.identity import array_digest, digest
from polyvision.data.images.names import Names
from polyvision.errors import PolyvisionError, some

__all__ = ["ClassTree", "ImageFiles", "is_image", "scan_class_tree", "split_class_tree"]


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
                files[entry.name] = sorted(_images_below(root, entry.name, ignored))
            else:
                kind = "hidden" if entry.name.startswith(".") else "outside any class folder"
                ignored[kind].append(entry.name)
    except OSError as error:
        raise PolyvisionError(
            f"cannot list the image folder {error.filename or root}: {error.strerror}"
        ) from error
    empty = [name for name, images in files.items() if not images]
    if empty:
        raise PolyvisionError(
            f"no image in class folder {some(empty)} of {root}. Put images there "
            f"({', '.join(sorted(EXTENSIONS))}) or delete the folder."
        )
    if len(files) < 2:
        found = f"only {next(iter(files))!r}" if files else "none"
        loose = [name for name in ignored["outside any class folder"] if is_image(name)]
        if loose:
            found += f", and {len(loose):,} images outside any class folder"
        raise PolyvisionError(f"{root} must hold one folder per class, at least two; found {found}")
    notes = [f"ignored {kind} in {root}: {some(names)}" for kind, names in ignored.items()]
    return ClassTree(root, files, tuple(notes))


def _images_below(root: Path, folder: str, ignored: dict[str, list[str]]) -> Iterator[str]:
    """Yield the images below ``root / folder``, relative to ``root`` and with forward slashes."""
    pending, seen = [folder], set()
    while pending:
        current = pending.pop()
        real = os.path.realpath(root / current)
        if real in seen:  # a link that leads back
            continue
        seen.add(real)
        for entry in os.scandir(root / current):
            path = f"{current}/{entry.name}"
            if entry.name.startswith("."):
                ignored["hidden"].append(path)
            elif entry.is_dir():
                pending.append(path)
            elif is_image(entry.name):
                yield path
            else:
                ignored["without an image's extension"].append(path)


def is_image(name: str) -> bool:
    """Say whether a file name ends as those of images do."""
    return os.path.splitext(name)[1].lower() in EXTENSIONS


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


class ImageFiles:
    """The images of a class tree, as a source of encoded images."""

    def __init__(self, tree: ClassTree) -> None:
        self.root = tree.root
        counts = [len(files) for files in tree.files.values()]
        self._labels = np.repeat(np.arange(len(counts)), counts)
        self._names = Names(path for files in tree.files.values() for path in files)

    def __len__(self) -> int:
        return len(self._names)

    def read(self, index: int) -> tuple[Path, int]:
        """Return the path of an image and its label."""
        return self.root / self._names[index], int(self._labels[index])

    def name(self, index: int) -> str:
        """Return the path of an image."""
        return str(self.root / self._names[index])

    def labels(self) -> NDArray[np.int64]:
        """Return the label of every image."""
        return self._labels

    def identity(self) -> str:
        """Return a hash of the paths below the root, and of the labels."""
        return digest([self._names.digest(), array_digest(self._labels)])
