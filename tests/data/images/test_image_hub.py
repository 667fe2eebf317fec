"""Hugging Face and TensorFlow Datasets: stand-ins for the parts of these libraries in use."""

from __future__ import annotations

import importlib
import importlib.util
import io
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from polyvision.data.images import hub as image_hub
from polyvision.data.images.augment import Augment
from polyvision.data.images.registry import ImageData, load_image_data


def load(name: str, **options: Any) -> ImageData:
    augment = Augment(crop_scale=(1, 1), hflip=0, crop_pct=1.0)
    settings = {"image_size": 6, "augment": augment, "mean": (0, 0, 0), "std": (1, 1, 1)}
    return load_image_data(name, val_fraction=None, **settings | options)


def png(level: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (6, 6), (level, 0, 0)).save(file, "PNG")
    return file.getvalue()


SPLITS = {
    "train": [(png(1), 1), (b"bad", 0), (png(3), 0)],
    "validation": [(png(4), 0), (png(5), 1)],
}


class Columns(dict[str, Any]):
    """A table whose rows are all asked for at once."""

    def __getitem__(self, key: Any) -> Any:
        return self if key == slice(None) else super().__getitem__(key)


class Reader:
    """Stands in for timm's ReaderHfds."""

    def __init__(self, rows: list[tuple[bytes | None, Any]], names: list[str], key: str) -> None:
        self.rows = rows
        self.class_to_idx = {name: i for i, name in enumerate(names)}
        self.label_key = key
        self.dataset = self

    def with_format(self, kind: str, columns: list[str]) -> Any:
        assert kind == "numpy"
        assert columns == [self.label_key]
        return Columns(**{self.label_key: np.array([label for _, label in self.rows])})

    def __getitem__(self, index: int) -> tuple[io.BytesIO, Any]:
        content, label = self.rows[index]
        assert content is not None
        return io.BytesIO(content), label


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Splits and class names of the stand-in, which a test may change."""
    content: dict[str, Any] = {split: (rows, ["ant", "bee"]) for split, rows in SPLITS.items()}
    content["asked"] = []

    def create_reader(name: str, split: str, input_key: str, target_key: str, **more: Any) -> Any:
        content["asked"].append((name, split, input_key, more))
        if split not in content:
            raise ValueError(f"Unknown split\n{split}")
        return Reader(*content[split], target_key)

    monkeypatch.setattr(image_hub, "create_reader", create_reader)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    return content


def levels(part: Any, *indices: int) -> list[tuple[int, int]]:
    found = [part[index] for index in indices]
    return [(round(float(image[0, 0, 0]) * 255), label) for image, label in found]


def test_hfds(hub: dict[str, Any]) -> None:
    data = load("hfds", dataset="some/set", root="cache")
    assert hub["asked"][0] == ("hfds/some/set", "train", "image", {"root": "cache"})
    assert data.classes == ["ant", "bee"]
    assert levels(data.train, 0, 2) == [(1, 1), (3, 0)]
    assert levels(data.val, 0, 1) == [(4, 0), (5, 1)]
    assert data.train[1] is None
    assert data.unreadable() == ["some/set[train], image 1"]


def test_a_row_of_hfds_without_an_image_is_named(hub: dict[str, Any]) -> None:
    hub["validation"] = ([(png(1), 0), (None, 1)], ["ant", "bee"])
    data = load("hfds", dataset="some/set")
    text = r"validation image some/set\[validation\], image 1: the dataset holds no image here"
    with pytest.raises(ValueError, match=text):
        data.val[1]


@pytest.mark.parametrize(
    ("change", "options", "text"),
    [
        ({}, {}, "data=hfds needs data.options.dataset"),
        ({}, {"dataset": "x", "val": "test"}, "cannot open 'test' of 'x' .*: Unknown split test"),
        ({"train": ([(b"", 0)], [])}, {"dataset": "x"}, "'label' of x has no class names"),
        ({"train": ([(b"", 0)], ["a", "c"])}, {"dataset": "x"}, "have other classes"),
        ({"train": ([(b"", 0.5)], ["ant", "bee"])}, {"dataset": "x"}, "no class numbers but float"),
        ({"train": ([(b"", -1)], ["ant", "bee"])}, {"dataset": "x"}, "image 0 has the label -1; 2"),
        ({"train": ([(b"", 1)], ["ant", "bee"])}, {"dataset": "x"}, "validation has images of ant"),
    ],
)
def test_mistakes_with_hfds(
    hub: dict[str, Any], change: dict[str, Any], options: dict[str, Any], text: str
) -> None:
    hub.update(change)
    with pytest.raises(ValueError, match=text) as caught:
        load("hfds", **options)
    assert "\n" not in str(caught.value)


@pytest.fixture
def tfds(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Splits of a stand-in for tensorflow_datasets, which a test may change."""
    content: dict[str, Any] = {
        split: [{"image": image, "label": label} for image, label in rows]
        for split, rows in SPLITS.items()
    }

    class Builder:
        info = SimpleNamespace(features={"label": SimpleNamespace(names=["ant", "bee"])})

        def __init__(self, name: str, data_dir: str | None) -> None:
            content["asked"] = (name, data_dir)

        def as_data_source(self, split: str, decoders: dict[str, str]) -> Any:
            assert decoders == {"image": "skip"}
            return content[split]

    module = ModuleType("tensorflow_datasets")
    module.builder = Builder  # type: ignore[attr-defined]
    module.decode = SimpleNamespace(SkipDecoding=lambda: "skip")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", module)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    return content


def test_tfds(tfds: dict[str, Any]) -> None:
    data = load("tfds", dataset="tiny", root="folder")
    assert tfds["asked"] == ("tiny", "folder")
    assert data.classes == ["ant", "bee"]
    assert levels(data.train, 0, 2) == [(1, 1), (3, 0)]
    assert levels(data.val, 0, 1) == [(4, 0), (5, 1)]
    assert data.train[1] is None
    assert data.unreadable() == ["tiny[train], image 1"]


def test_mistakes_with_tfds(tfds: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"data=tfds needs data\.options\.dataset"):
        load("tfds")
    with pytest.raises(ValueError, match=r"cannot open 'train' and 'test' .*file_format=array_rec"):
        load("tfds", dataset="tiny", val="test")
    tfds["train"][0]["label"] = 2  # such labels are only seen when the image is
    with pytest.raises(ValueError, match=r"tiny\[train\], image 0 has the label 2; 2 classes"):
        load("tfds", dataset="tiny").train[0]


@pytest.mark.parametrize(("name", "package"), [("hfds", "datasets"), ("tfds", "array_record")])
def test_a_missing_package_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, name: str, package: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == package else n)
    text = rf"data={name} needs the package {package}: pip install 'polyvision\[{name}\]'"
    with pytest.raises(ValueError, match=text):
        load(name, dataset="x")
