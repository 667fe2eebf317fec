"""Images inside tar archives, read in place: by the folder they lie in, or as WebDataset shards.

timm's readers of the same archives do not serve here. ``ReaderImageInTar`` holds a Python object
for each image, which every worker copies, and file handles that forked workers would share.
``ReaderWds`` gives samples in a stream whose order depends on the number of workers, decodes
them itself and drops what it cannot decode. An archive is listed once instead, and each image is
then read by its place in it: any order, exact resume, and the strict rules of all other data.
"""

from __future__ import annotations

import dataclasses
import io
import json
import re
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, BinaryIO

import numpy as np
from numpy.typing import NDArray

from polyvision.data.images.class_folders import existing_folder
from polyvision.data.images.decode import EXTENSIONS
from polyvision.data.images.folder import is_image
from polyvision.data.images.identity import array_digest, digest
from polyvision.data.images.names import Names
from polyvision.data.images.sets import ImageData, Request
from polyvision.data.images.strict_dataset import strict_data
from polyvision.errors import PolyvisionError, some

__all__ = ["TarImages", "load_tar", "load_wds"]


@dataclasses.dataclass(frozen=True, slots=True)
class _Member:
    """A file in an archive: ``offset`` bytes from its beginning lie ``size`` bytes of content."""

    archive: Path
    name: str
    offset: int
    size: int

    def content(self) -> bytes:
        with self.archive.open("rb") as file:
            file.seek(self.offset)
            return file.read(self.size)


class TarImages:
    """Images in archives, as a source of encoded images.

    Args:
        images: the members that are images.
        labels: the label of each.
    """

    def __init__(self, images: Sequence[_Member], labels: Sequence[int]) -> None:
        archives = list(dict.fromkeys(member.archive for member in images))
        number = {archive: i for i, archive in enumerate(archives)}
        self.archives = archives
        self._archive = np.array([number[member.archive] for member in images], np.int32)
        self._offset = np.array([member.offset for member in images], np.int64)
        self._size = np.array([member.size for member in images], np.int64)
        self._names = Names(member.name for member in images)
        self._labels = np.array(labels, np.int64)

    def __len__(self) -> int:
        return len(self._names)

    def read(self, index: int) -> tuple[BinaryIO, int]:
        """Return the content of an image and its label."""
        archive = self.archives[self._archive[index]]
        member = _Member(archive, "", int(self._offset[index]), int(self._size[index]))
        return io.BytesIO(member.content()), int(self._labels[index])

    def name(self, index: int) -> str:
        """Return ``archive:member``."""
        return f"{self.archives[self._archive[index]]}:{self._names[index]}"

    def labels(self) -> NDArray[np.int64]:
        """Return the label of every image."""
        return self._labels

    def identity(self) -> str:
        """Return a hash of the names inside the archives, and of the labels."""
        return digest([self._names.digest(), array_digest(self._labels)])


def _members(archive: Path) -> Iterator[_Member]:
    """List the files of an archive and of the archives in it.

    Raises:
        PolyvisionError: the archive is damaged or compressed.
    """
    try:
        with archive.open("rb") as file:
            yield from _walk(archive, file, 0, "")
    except (tarfile.TarError, OSError, EOFError) as error:
        raise PolyvisionError(
            f"cannot list the archive {archive}: {error}. It must be a whole tar, not compressed"
        ) from error


def _walk(archive: Path, file: IO[bytes], base: int, prefix: str) -> Iterator[_Member]:
    with tarfile.open(fileobj=file, mode="r:") as tar:
        while (member := tar.next()) is not None:
            tar.members = []  # type: ignore[attr-defined]  # or all are kept
            if not member.isreg() or member.sparse is not None:
                continue
            name, start = prefix + member.name.removeprefix("./"), base + member.offset_data
            inner = tar.extractfile(member) if name.endswith(".tar") else None
            if inner is None:
                yield _Member(archive, name, start, member.size)
            else:
                yield from _walk(archive, inner, start, name.removesuffix(".tar") + "/")


def load_tar(request: Request, root: str | None = None, max_unreadable: int = 20) -> ImageData:
    """Images in tar archives: ``root/train.tar`` and ``root/val.tar``, or ``root/train/*.tar`` ...

    The class of an image is the folder that it lies in. An archive counts as a folder, unless it is
    ``train.tar`` or ``val.tar``: one archive for each class, or an archive of such archives, as
    ImageNet's training images come, are read as they are. ``val`` may be called ``validation``.

    Raises:
        PolyvisionError: an archive is missing or damaged, or the classes of both sides differ.
    """
    layout = "train.tar and val.tar, or train/ and val/ with tar archives"
    folder = existing_folder("tar", root, layout)
    train, val = (_by_class(folder, names, layout) for names in (("train",), ("val", "validation")))
    if set(train) != set(val):
        raise PolyvisionError(
            f"the archives of training and validation in {root} must hold the same classes; only "
            f"one of them has: {some(set(train) ^ set(val))}"
        )
    classes = sorted(train)
    sides = [
        TarImages(
            [member for name in classes for member in side[name]],
            [label for label, name in enumerate(classes) for _ in side[name]],
        )
        for side in (train, val)
    ]
    what = f"tar archives of {root}"
    return strict_data(request, sides[0], sides[1], classes, what, max_unreadable=max_unreadable)


def _by_class(root: Path, names: Sequence[str], layout: str) -> dict[str, list[_Member]]:
    found: dict[str, list[_Member]] = {}
    for name in names:
        whole, parts = root / f"{name}.tar", sorted((root / name).glob("*.tar"))
        for archive in [whole] if whole.is_file() else parts:
            for member in _members(archive):
                *above, leaf = member.name.split("/")
                if not is_image(leaf) or leaf.startswith("."):
                    continue
                above = above if archive == whole else [archive.stem, *above]
                if not above:
                    raise PolyvisionError(
                        f"{archive} holds images outside any folder, such as {leaf}: nothing says "
                        "which class they belong to"
                    )
                found.setdefault(above[-1], []).append(member)
        if found:
            return found
    raise PolyvisionError(
        f"no image in {names[0]}.tar or {names[0]}/*.tar of {root.absolute()}: {layout}"
    )


_KEY = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)")  # WebDataset: the key ends at the first dot


def load_wds(
    request: Request,
    root: str | None = None,
    train: str = "*train*.tar",
    val: str = "*val*.tar",
    label_key: str | None = None,
    classes: int | None = None,
    max_unreadable: int = 20,
) -> ImageData:
    """WebDataset shards on disk: tars of ``<key>.jpg`` with ``<key>.cls`` or ``<key>.json``.

    The format: https://github.com/webdataset/webdataset. ``train`` and ``val`` match the shards of
    each side; the label is the number in ``.cls``, or ``label_key`` of ``.json``. Without
    ``classes`` there are as many as the largest training label needs; they are named by number.

    Raises:
        PolyvisionError: no shard, a damaged one, a sample without an image or a label, or a label
            out of range.
    """
    folder = existing_folder("wds", root, f"shards that match {train} and {val}")
    sides = [
        _shards(folder, side, pattern, label_key)
        for side, pattern in (("train", train), ("val", val))
    ]
    count = int(sides[0].labels().max(initial=-1)) + 1 if classes is None else classes
    names = [str(label) for label in range(count)]
    what = f"WebDataset shards of {root}"
    return strict_data(request, sides[0], sides[1], names, what, max_unreadable=max_unreadable)


def _shards(root: Path, side: str, pattern: str, label_key: str | None) -> TarImages:
    shards = sorted(root.glob(pattern))
    if not shards:
        raise PolyvisionError(
            f"no shard in {root.absolute()} matches {pattern}; give data.options.{side}=<pattern>"
        )
    images: list[_Member] = []
    labels: list[int] = []
    for shard in shards:
        for key, files in _samples(shard):
            image = next((member for end, member in files.items() if f".{end}" in EXTENSIONS), None)
            if image is None:
                raise PolyvisionError(f"sample {key} of {shard} has no image: {some(files)}")
            images.append(image)
            labels.append(_label(shard, key, files, label_key))
    return TarImages(images, labels)


def _samples(shard: Path) -> Iterator[tuple[str, dict[str, _Member]]]:
    """Yield the files of each key, by what follows the key; they lie one after the other."""
    last, files = "", dict[str, _Member]()
    for member in _members(shard):
        match = _KEY.fullmatch(member.name)
        if match is None or match[1].rpartition("/")[2].startswith("__"):  # notes on the shard
            continue
        if match[1] != last and files:
            yield last, files
            files = {}
        last = match[1]
        files[match[2].lower()] = member
    if files:
        yield last, files


def _label(shard: Path, key: str, files: dict[str, _Member], label_key: str | None) -> int:
    end = "cls" if label_key is None else "json"
    try:
        content = files[end].content()
        return int(content) if label_key is None else int(json.loads(content)[label_key])
    except (KeyError, ValueError, TypeError) as error:
        wanted = "a number in .cls" if label_key is None else f"the number {label_key!r} in .json"
        raise PolyvisionError(
            f"sample {key} of {shard} has no label: {wanted} is needed, it has {some(files)}. "
            "data.options.label_key=<name> takes it from .json"
        ) from error
