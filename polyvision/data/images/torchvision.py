"""The small public sets that torchvision knows: files in place, or its download when allowed.

The test set that each comes with validates.
"""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torchvision import datasets

from polyvision.data.images.arrays import array_data
from polyvision.data.images.class_folders import folder_data
from polyvision.data.images.folder import scan_class_tree
from polyvision.data.images.sets import ImageData, Request
from polyvision.errors import PolyvisionError, looked_for, unknown

__all__ = ["load_cifar10", "load_cifar100", "load_fashion_mnist", "load_imagenette"]

_FASHION = "the four files train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz, t10k-..."
_DEBIAN = "Debian's package dataset-fashion-mnist puts them into /usr/share/datasets/fashion-mnist"


def load_fashion_mnist(
    request: Request, root: str | None = None, download: bool = False
) -> ImageData:
    """70,000 articles of Zalando in 10 classes: 28x28, gray; 10,000 of them validate.

    Source: Xiao et al. 2017, https://arxiv.org/abs/1708.07747. The four IDX files are read where
    they lie: in ``root`` or in torchvision's ``root/FashionMNIST/raw``, compressed or not.

    Raises:
        PolyvisionError: the files are missing or damaged.
    """
    base = _root("fashion_mnist", root)
    places = [base, base / "FashionMNIST" / "raw"]
    folder = next((p for p in places if all(_idx_file(p, name) for name in _IDX)), None)
    if folder is None:
        if not download:
            raise _absent("fashion_mnist", root, f"no Fashion-MNIST: {_FASHION}; {_DEBIAN}")
        _download("fashion_mnist", lambda: datasets.FashionMNIST(str(base), download=True))
        folder = places[1]
    train, val = (
        (_read_idx(folder, f"{part}-images-idx3-ubyte"), _idx_labels(folder, part))
        for part in ("train", "t10k")
    )
    for images, labels in (train, val):
        if images.ndim != 3 or len(images) != len(labels) or not len(labels):
            raise PolyvisionError(
                f"the files of Fashion-MNIST in {folder} do not belong together: images of shape "
                f"{images.shape} and {len(labels)} labels"
            )
    return array_data(request, train, val, datasets.FashionMNIST.classes, "Fashion-MNIST")


_IDX = [
    f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")
]


def _idx_file(folder: Path, name: str) -> Path | None:
    return next((p for p in (folder / f"{name}.gz", folder / name) if p.is_file()), None)


def _idx_labels(folder: Path, part: str) -> NDArray[np.int64]:
    labels = _read_idx(folder, f"{part}-labels-idx1-ubyte").astype(np.int64)
    if labels.ndim != 1 or labels.max(initial=0) > 9:
        raise PolyvisionError(
            f"{folder}/{part}-labels-idx1-ubyte holds labels of shape {labels.shape} up to "
            f"{labels.max(initial=0)}; Fashion-MNIST has one from 0 to 9 for each image"
        )
    return labels


def _read_idx(folder: Path, name: str) -> NDArray[np.uint8]:
    """Read an IDX file of uint8.

    The format: two zero bytes, the type (8), the number of dimensions, each dimension as 32 bits
    with the high byte first, then the values. Source: LeCun, http://yann.lecun.com/exdb/mnist/.
    """
    path = _idx_file(folder, name)
    assert path is not None
    try:
        content = path.read_bytes()
        content = gzip.decompress(content) if path.suffix == ".gz" else content
    except (OSError, EOFError, zlib.error) as error:
        raise PolyvisionError(f"cannot read {path}: {error}") from error
    if content[:3] != b"\0\0\x08" or len(content) < 4 + 4 * content[3]:
        raise PolyvisionError(f"{path} is not an IDX file of bytes; fetch it again")
    count = content[3]
    shape = tuple(np.frombuffer(content, ">u4", count=count, offset=4).tolist())
    values = np.frombuffer(content, np.uint8, offset=4 + 4 * count)
    if len(values) != math.prod(shape):
        raise PolyvisionError(
            f"{path} promises {math.prod(shape):,} values of shape {shape} and holds "
            f"{len(values):,}; fetch it again"
        )
    return values.reshape(shape)


def load_cifar10(request: Request, root: str | None = None, download: bool = False) -> ImageData:
    """60,000 photos in 10 classes: 32x32, RGB; 10,000 of them validate.

    Source: Krizhevsky 2009, https://www.cs.toronto.edu/~kriz/cifar.html. ``root`` holds
    ``cifar-10-batches-py``, whose checksums torchvision verifies.
    """
    return _load_cifar(request, "cifar10", datasets.CIFAR10, root, download)


def load_cifar100(request: Request, root: str | None = None, download: bool = False) -> ImageData:
    """60,000 photos in 100 classes: 32x32, RGB; 10,000 of them validate.

    Source: Krizhevsky 2009, https://www.cs.toronto.edu/~kriz/cifar.html. ``root`` holds
    ``cifar-100-python``, whose checksums torchvision verifies.
    """
    return _load_cifar(request, "cifar100", datasets.CIFAR100, root, download)


def _load_cifar(
    request: Request, name: str, cls: type[Any], root: str | None, download: bool
) -> ImageData:
    base = _root(name, root)
    if download:
        _download(name, lambda: cls(str(base), download=True))
    try:
        train, val = (cls(str(base), train=training) for training in (True, False))
    except RuntimeError as error:  # torchvision: not found, or a wrong checksum
        missing = f"no whole {cls.__name__}: the folder {cls.base_folder} with the batches"
        raise _absent(name, root, missing) from error
    parts = [(part.data, np.array(part.targets, np.int64)) for part in (train, val)]
    return array_data(request, parts[0], parts[1], list(train.classes), cls.__name__)


_IMAGENETTE = {"full": "imagenette2", "320px": "imagenette2-320", "160px": "imagenette2-160"}
_IMAGENETTE_IMAGES = (9469, 3925)


def load_imagenette(
    request: Request,
    root: str | None = None,
    size: str = "320px",
    download: bool = False,
    max_unreadable: int = 20,
) -> ImageData:
    """13,394 photos of 10 easy classes of ImageNet; 3,925 of them validate.

    Source: Howard 2019, https://github.com/fastai/imagenette. ``root`` holds ``imagenette2-320``
    (``size=320px``), ``imagenette2-160`` (``160px``) or ``imagenette2`` (``full``).
    """
    base = _root("imagenette", root)
    if size not in _IMAGENETTE:
        raise unknown("imagenette size", size, _IMAGENETTE)
    folder = base / _IMAGENETTE[size]
    if not folder.is_dir():
        if not download:
            raise _absent(
                "imagenette", root, f"no Imagenette: the folder {folder.name} with train/ and val/"
            )
        _download("imagenette", lambda: datasets.Imagenette(str(base), size=size, download=True))
    train, val = (scan_class_tree(folder / part) for part in ("train", "val"))
    if train.classes != val.classes or not set(train.classes) <= set(_wnids()):
        raise PolyvisionError(
            f"{folder} is not whole: train/ has the classes {', '.join(train.classes)} and val/ "
            f"{', '.join(val.classes)}; Imagenette has {', '.join(_wnids())} in both"
        )
    data = folder_data(request, train, val, f"Imagenette, {size}", max_unreadable)
    if (len(train), len(val)) != _IMAGENETTE_IMAGES:  # as after a download that was broken off
        whole = " + ".join(f"{count:,}" for count in _IMAGENETTE_IMAGES)
        data.notes.append(f"Imagenette has {whole} images; {folder} has {len(train)} + {len(val)}")
    return data


def _wnids() -> list[str]:
    return [
        "n01440764",
        "n02102040",
        "n02979186",
        "n03000684",
        "n03028079",
        "n03394916",
        "n03417042",
        "n03425413",
        "n03445777",
        "n03888257",
    ]


def _root(name: str, root: str | None) -> Path:
    if root is None:
        raise PolyvisionError(f"image data {name!r} needs data.root: the folder of its files")
    return Path(root).expanduser()


def _absent(name: str, root: str | None, missing: str) -> PolyvisionError:
    where = "" if root is None else looked_for(root)
    return PolyvisionError(
        f"data.root={root}{where} holds {missing}. Give data.root=<folder with them>, or let "
        f"torchvision fetch them: data={name} data.root=<folder> data.options.download=true"
    )


def _download(name: str, fetch: Callable[[], object]) -> None:
    try:
        fetch()
    except (OSError, RuntimeError) as error:  # no network, no space, a wrong checksum
        reason = " ".join(str(error).split())
        raise PolyvisionError(
            f"torchvision cannot download {name}: {reason}. Fetch it by other means and give "
            "data.root=<folder>"
        ) from error
