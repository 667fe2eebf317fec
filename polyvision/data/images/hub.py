"""Images of Hugging Face datasets and of TensorFlow Datasets, by index and undecoded.

Both libraries would decode images themselves; here they hand over the bytes, and the strict rules
of all other data apply. timm's reader for TensorFlow Datasets is a stream, whose order depends on
the number of workers; the random access of the library itself is used instead.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from timm.data.readers import create_reader

from polyvision.data.images.identity import array_digest, digest
from polyvision.data.images.sets import ImageData, Request
from polyvision.data.images.strict_dataset import strict_data
from polyvision.errors import PolyvisionError

__all__ = ["HubImages", "TensorFlowImages", "load_hfds", "load_tfds"]


class HubImages:
    """One split of a Hugging Face dataset, read through timm, as a source of encoded images.

    Args:
        reader: timm's ``ReaderHfds``.
        what: name and split, for people.
    """

    def __init__(self, reader: Any, what: str) -> None:
        self.reader = reader
        self.what = what
        column = reader.dataset.with_format("numpy", columns=[reader.label_key])
        self._labels = np.asarray(column[:][reader.label_key])
        if self._labels.ndim != 1 or self._labels.dtype.kind not in "iu":
            raise PolyvisionError(
                f"{what}: the column {reader.label_key!r} holds no class numbers but "
                f"{self._labels.dtype}; give data.options.label_key"
            )

    def __len__(self) -> int:
        return len(self._labels)

    def read(self, index: int) -> tuple[BinaryIO, int]:
        """Return the content of an image and its label."""
        try:
            file, label = self.reader[index]
        except (AssertionError, TypeError) as error:  # timm: neither bytes nor a path
            raise OSError("the dataset holds no image here") from error
        with file:
            return io.BytesIO(file.read()), int(label)

    def name(self, index: int) -> str:
        """Return dataset, split and position."""
        return f"{self.what}, image {index}"

    def labels(self) -> NDArray[np.int64]:
        """Return the label of every image."""
        return self._labels

    def identity(self) -> str:
        """Return a hash of the labels; images have no names here."""
        return array_digest(self._labels)


def load_hfds(
    request: Request,
    root: str | None = None,
    dataset: str | None = None,
    train: str = "train",
    val: str = "validation",
    image_key: str = "image",
    label_key: str = "label",
    max_unreadable: int = 20,
) -> ImageData:
    """A Hugging Face dataset ``dataset``, or a local folder of that layout, through timm's reader.

    Source: https://huggingface.co/docs/datasets. ``root`` is the cache folder. The library
    downloads what is missing, unless ``HF_HUB_OFFLINE=1`` is set.

    Raises:
        PolyvisionError: the package or the dataset is missing, or its columns do not fit.
    """
    _need("hfds", "datasets")
    if dataset is None:
        raise PolyvisionError("data=hfds needs data.options.dataset: a name on the hub or a folder")
    readers = [_hub_reader(dataset, root, split, image_key, label_key) for split in (train, val)]
    names = [{int(i): str(n) for n, i in reader.class_to_idx.items()} for reader in readers]
    if not names[0] or sorted(names[0]) != list(range(len(names[0]))):
        raise PolyvisionError(
            f"data=hfds: the column {label_key!r} of {dataset} has no class names (a ClassLabel)"
        )
    if names[0] != names[1]:
        raise PolyvisionError(f"data=hfds: {train} and {val} of {dataset} have other classes")
    sources = [HubImages(r, f"{dataset}[{s}]") for r, s in zip(readers, (train, val), strict=True)]
    classes = [names[0][label] for label in range(len(names[0]))]
    return strict_data(
        request, sources[0], sources[1], classes, dataset, max_unreadable=max_unreadable
    )


def _hub_reader(name: str, root: str | None, split: str, image_key: str, label_key: str) -> Any:
    try:
        return create_reader(
            f"hfds/{name}", root=root, split=split, input_key=image_key, target_key=label_key
        )
    except Exception as error:  # of the hub, of the files, of the columns: all kinds
        reason = " ".join(str(error).split()) or type(error).__name__
        raise PolyvisionError(
            f"data=hfds cannot open {split!r} of {name!r} with the columns {image_key!r} and "
            f"{label_key!r}: {reason}"
        ) from error


class TensorFlowImages:
    """One split of a dataset of TensorFlow Datasets, as a source of encoded images.

    Args:
        open_records: opens the split. Readers of its files do not survive a fork: each process
            opens its own.
        what: name and split, for people.
        image_key: feature of the image.
        label_key: feature of the label.
        version: name and version of the dataset, in the words of the library.
    """

    def __init__(
        self,
        open_records: Callable[[], Any],
        what: str,
        image_key: str,
        label_key: str,
        version: str = "",
    ) -> None:
        self.open_records = open_records
        self._records = open_records()
        self._process = os.getpid()
        self._length = len(self._records)
        self.what = what
        self.image_key = image_key
        self.label_key = label_key
        self.version = version

    def __len__(self) -> int:
        return self._length

    def read(self, index: int) -> tuple[BinaryIO, int]:
        """Return the content of an image and its label."""
        if self._process != os.getpid():
            self._records, self._process = self.open_records(), os.getpid()
        record = self._records[index]
        return io.BytesIO(record[self.image_key]), int(record[self.label_key])

    def name(self, index: int) -> str:
        """Return dataset, split and position."""
        return f"{self.what}, image {index}"

    def labels(self) -> None:
        """Return None: labels lie in the same records as the images."""
        return None

    def identity(self) -> str:
        """Return a hash of the name, version and length of the split; nothing is read."""
        return digest([self.what, self.version, str(self._length)])


def load_tfds(
    request: Request,
    root: str | None = None,
    dataset: str | None = None,
    train: str = "train",
    val: str = "validation",
    image_key: str = "image",
    label_key: str = "label",
    max_unreadable: int = 20,
) -> ImageData:
    """A dataset of TensorFlow Datasets that has been prepared as ``array_record`` files.

    Source: https://www.tensorflow.org/datasets/data_source. Only these files give access by index.
    ``root`` is the data folder; nothing is downloaded.

    Raises:
        PolyvisionError: a package or the prepared files are missing, or the features do not fit.
    """
    _need("tfds", "tensorflow_datasets", "array_record", "tensorflow")
    if dataset is None:
        raise PolyvisionError("data=tfds needs data.options.dataset, such as imagenet2012")
    tfds = importlib.import_module("tensorflow_datasets")
    folder = None if root is None else str(Path(root).expanduser())
    try:
        builder = tfds.builder(dataset, data_dir=folder)
        features = builder.info.features
        classes = [str(n) for n in features[label_key].names]
        decoders = {image_key: tfds.decode.SkipDecoding()}
        sources = [
            TensorFlowImages(
                functools.partial(builder.as_data_source, split=split, decoders=decoders),
                f"{dataset}[{split}]",
                image_key,
                label_key,
                str(getattr(builder.info, "full_name", "")),
            )
            for split in (train, val)
        ]
    except Exception as error:  # of the library, of the files, of the features: all kinds
        reason = " ".join(str(error).split()) or type(error).__name__
        raise PolyvisionError(
            f"data=tfds cannot open {train!r} and {val!r} of {dataset!r} with the features "
            f"{image_key!r} and {label_key!r}: {reason[:300]}. It must have been prepared with "
            f"`tfds build {dataset} --file_format=array_record`"
        ) from error
    return strict_data(
        request, sources[0], sources[1], classes, dataset, max_unreadable=max_unreadable
    )


def _need(name: str, *packages: str) -> None:
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise PolyvisionError(
            f"data={name} needs the package {missing[0]}: pip install 'polyvision[{name}]'"
        )
