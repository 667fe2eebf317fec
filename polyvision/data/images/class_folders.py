"""Data sets that are class folders of image files: anyone's own, and ImageNet."""

from __future__ import annotations

import re
from pathlib import Path

from polyvision.data.images.folder import ClassTree, ImageFiles, scan_class_tree, split_class_tree
from polyvision.data.images.sets import ImageData, Request
from polyvision.data.images.strict_dataset import strict_data
from polyvision.errors import PolyvisionError, looked_for, some

__all__ = ["existing_folder", "folder_data", "load_folder", "load_imagenet"]

_TRAIN, _VAL = ("train",), ("val", "validation")
_WORDNET_ID = re.compile(r"n\d{8}")


def load_folder(request: Request, root: str | None = None, max_unreadable: int = 20) -> ImageData:
    """Image files in ``root/train/<class>`` and ``root/val/<class>``, or in ``root/<class>``.

    Raises:
        PolyvisionError: the folders do not hold what training needs.
    """
    layout = "<root>/train/<class> and <root>/val/<class>, or <root>/<class>"
    folder = existing_folder("folder", root, layout)
    found = _find_parts(folder)
    if found is None:
        trees = split_class_tree(scan_class_tree(folder), request.share())
    else:
        trees = scan_class_tree(found[0]), scan_class_tree(found[1])
    return folder_data(request, *trees, f"images of {root}", max_unreadable)


def load_imagenet(request: Request, root: str | None = None, max_unreadable: int = 20) -> ImageData:
    """ImageNet-1k as class folders: ``root/train/n01440764/...`` and ``root/val/n01440764/...``.

    Source: Russakovsky et al. 2015, https://arxiv.org/abs/1409.0575. The class folders bear WordNet
    ids, whose order gives the labels; ``val`` may be called ``validation``. Fewer than 1,000
    classes are a subset, which is noted.

    Raises:
        PolyvisionError: the folders are not those of ImageNet.
    """
    layout = "<root>/train/<WordNet id> and <root>/val/<WordNet id>"
    folder = existing_folder("imagenet", root, layout)
    found = _find_parts(folder)
    if found is None:
        raise PolyvisionError(f"{root} has no train/ and val/; data=imagenet needs {layout}")
    train, val = (scan_class_tree(part) for part in found)
    strange = [name for name in train.classes if not _WORDNET_ID.fullmatch(name)]
    if strange:
        raise PolyvisionError(
            f"{train.root} has classes that are no WordNet ids such as n01440764: {some(strange)}. "
            "For other data take data=folder"
        )
    data = folder_data(request, train, val, f"ImageNet of {root}", max_unreadable)
    if len(train.classes) != 1000:
        data.notes.append(f"ImageNet has 1,000 classes; {root} has {len(train.classes):,}")
    return data


def folder_data(
    request: Request, train: ClassTree, val: ClassTree, what: str, max_unreadable: int
) -> ImageData:
    """Make a data set of two class trees; ``what`` begins its description.

    Raises:
        PolyvisionError: they hold different classes.
    """
    if train.classes != val.classes:
        only = set(train.classes) ^ set(val.classes)
        raise PolyvisionError(
            f"{train.root} and {val.root} must hold the same classes; only one of them has: "
            f"{some(only)}"
        )
    return strict_data(
        request,
        ImageFiles(train),
        ImageFiles(val),
        train.classes,
        what,
        max_unreadable=max_unreadable,
        notes=[*train.notes, *val.notes],
    )


def existing_folder(name: str, root: str | None, layout: str) -> Path:
    """Return the folder ``root``; ``layout`` says what it should hold.

    Raises:
        PolyvisionError: there is none.
    """
    if root is None:
        raise PolyvisionError(f"image data {name!r} needs data.root: the folder with {layout}")
    folder = Path(root).expanduser()
    if not folder.is_dir():
        state = "is a file" if folder.exists() else "does not exist"
        raise PolyvisionError(
            f"the image folder {root} {state}{looked_for(root)}; data.root is the folder with "
            f"{layout}"
        )
    return folder


def _find_parts(root: Path) -> tuple[Path, Path] | None:
    """Return the folders of training and validation; None when ``root`` holds the classes."""
    train = next((root / name for name in _TRAIN if (root / name).is_dir()), None)
    val = next((root / name for name in _VAL if (root / name).is_dir()), None)
    if train and val:
        return train, val
    for part, other in ((train, "val"), (val, "train")):
        if part and any(entry.is_dir() for entry in part.iterdir()):
            raise PolyvisionError(
                f"{root} has {part.name}/ with class folders but no {other}/. Add it, or give "
                f"{part} as data.root to data=folder, which splits it by val_fraction."
            )
    return None
