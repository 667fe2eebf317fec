"""Ten odd images through the data set itself, ImageNet's layout, and names without objects."""

from __future__ import annotations

import gc
import re
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from polyvision.data.images.augment import Augment
from polyvision.data.images.folder import ClassTree, ImageFiles
from polyvision.data.images.names import Names
from polyvision.data.images.registry import ImageData, load_image_data


def load(name: str, root: Path, **options: Any) -> ImageData:
    augment = Augment(crop_scale=(1, 1), hflip=0, crop_pct=1.0, interpolation="nearest")
    settings = {"image_size": 8, "augment": augment, "mean": (0, 0, 0), "std": (1, 1, 1)}
    return load_image_data(name, root=str(root), **settings | options)


def halves(left: Any, right: Any, mode: str) -> Image.Image:
    image = Image.new(mode, (8, 8), left)
    image.paste(right, (4, 0, 8, 8))
    return image


def write_odd_images(folder: Path) -> None:
    """Write ten images; those that can be read are dark on the left and light on the right."""
    folder.mkdir(parents=True)
    halves((0, 0, 0, 255), (0, 0, 0, 0), "CMYK").save(folder / "0-cmyk.jpg", quality=100)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise by 90 degrees
    turned = halves(0, 255, "L").transpose(Image.Transpose.ROTATE_90)
    turned.save(folder / "1-exif.jpg", exif=exif, quality=100)
    Image.fromarray(np.repeat([[900] * 4 + [65000] * 4], 8, 0).astype(np.uint16)).save(
        folder / "2-16-bit.png"
    )
    palette = halves(0, 1, "P")
    palette.putpalette([0, 0, 0, 0, 255, 0])
    palette.save(folder / "3-palette.png", transparency=bytes([255, 0]))
    halves(0, 1, "1").save(folder / "4-1-bit.png")
    frames = [halves(0, 255, "L"), halves(255, 0, "L")]
    frames[0].save(folder / "5-animated.gif", save_all=True, append_images=frames[1:])
    whole = (folder / "2-16-bit.png").read_bytes()
    (folder / "6-truncated.png").write_bytes(whole[: len(whole) // 2])
    (folder / "7-empty.jpg").write_bytes(b"")
    (folder / "8-text.jpg").write_text("I am no picture.")
    bomb = whole[:16] + struct.pack(">II", 60_000, 60_000) + whole[24:29]  # another size
    bomb += struct.pack(">I", zlib.crc32(bomb[12:])) + whole[33:]
    (folder / "9-bomb.png").write_bytes(bomb)


READABLE = range(6)
REASONS = ["", "cannot identify", "cannot identify", "exceeds limit"]


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    for part in ("train", "val"):
        write_odd_images(tmp_path / part / "odd")
        (tmp_path / part / "plain").mkdir()
        halves(0, 255, "L").save(tmp_path / part / "plain" / "0.png")
    return tmp_path


def test_ten_odd_images(odd: Path) -> None:
    data = load("folder", odd)
    assert len(data.train) == 11
    for index in READABLE:
        for part in (data.train, data.val):
            image, label = part[index]
            assert label == 0
            assert image.shape == (3, 8, 8)
            assert image[:, :, :3].max() < 0.1
            assert image[:, :, 5:].min() > 0.9
    assert [data.train[index] for index in range(6, 10)] == [None] * 4
    names = ["6-truncated.png", "7-empty.jpg", "8-text.jpg", "9-bomb.png"]
    assert data.unreadable() == [f"{odd}/train/odd/{name}" for name in names]
    for index, name, reason in zip(range(6, 10), names, REASONS, strict=True):
        text = rf"cannot read the validation image {odd}/val/odd/{name}: .*{reason}"
        with pytest.raises(ValueError, match=text):
            data.val[index]


def test_the_limit_counts_files_not_visits(odd: Path) -> None:
    data = load("folder", odd, max_unreadable=3)
    for index in (6, 7, 8, 8, 7, 6):
        assert data.train[index] is None
    with pytest.raises(ValueError, match="4 training images cannot be read, more than max_unread"):
        data.train[9]
    with pytest.raises(ValueError, match="max_unreadable must be at least 0, got -1"):
        load("folder", odd, max_unreadable=-1)


def write_classes(root: Path, *classes: str) -> Path:
    for name in classes:
        (root / name).mkdir(parents=True)
        halves(0, 255, "L").save(root / name / "0.png")
    return root


IDS = ("n01440764", "n01443537", "n01484850")


@pytest.mark.parametrize("val", ["val", "validation"])
def test_imagenet(tmp_path: Path, val: str) -> None:
    write_classes(tmp_path / "train", *IDS)
    write_classes(tmp_path / val, *IDS)
    data = load("imagenet", tmp_path, val_fraction=None)
    assert data.classes == list(IDS)
    assert data.notes == [f"ImageNet has 1,000 classes; {tmp_path} has 3"]
    assert [data.val[i][1] for i in range(3)] == [0, 1, 2]


def test_imagenet_of_1000_classes_needs_no_note(tmp_path: Path) -> None:
    names = [f"n{number:08}" for number in range(1000)]
    for part in ("train", "val"):
        for name in names:
            (tmp_path / part / name).mkdir(parents=True)
            (tmp_path / part / name / "0.jpg").touch()
    data = load("imagenet", tmp_path, val_fraction=None)
    assert data.notes == []
    assert data.description.endswith("1,000 training and 1,000 validation images in 1,000 classes")


def test_mistakes_with_imagenet(tmp_path: Path) -> None:
    def refused(text: str) -> None:
        with pytest.raises(ValueError, match=re.escape(text)):
            load("imagenet", tmp_path, val_fraction=None)

    refused("has no train/ and val/; data=imagenet needs <root>/train/<WordNet id>")
    write_classes(tmp_path / "train", *IDS)
    refused("has train/ with class folders but no val/. Add it")
    (tmp_path / "val").mkdir()
    (tmp_path / "val" / "ILSVRC2012_val_00000001.JPEG").touch()
    refused("found none, and 1 images outside any class folder")
    write_classes(tmp_path / "val", *IDS[:2])
    refused("must hold the same classes; only one of them has: n01484850")
    write_classes(tmp_path / "val", IDS[2])
    write_classes(tmp_path / "train", "dogs")
    refused("has classes that are no WordNet ids such as n01440764: dogs. For other data take")


def test_names() -> None:
    texts = ["a/1.png", "", "b/\u00e9t\u00e9.png", "c/\udcff.png", "x" * 5000]
    names = Names(texts)
    assert [names[i] for i in range(len(names))] == texts
    for index in (-1, 5):
        with pytest.raises(IndexError):
            names[index]
    assert len(Names([])) == 0


def objects(root: Any) -> int:
    """Count what the garbage collector can reach from ``root``, apart from modules and classes."""
    seen, pending = set(), [root]
    while pending:
        current = pending.pop()
        if id(current) in seen or isinstance(current, type) or callable(current):
            continue
        seen.add(id(current))
        pending.extend(gc.get_referents(current))
    return len(seen)


def test_only_arrays_grow_with_the_number_of_files() -> None:
    """Each further Python object would be copied by every worker that reads it."""
    counts = []
    for length in (10, 10_000):
        files = {name: [f"{name}/{i}.png" for i in range(length)] for name in ("ant", "bee")}
        counts.append(objects(ImageFiles(ClassTree(Path("root"), files))))
    assert counts[0] == counts[1]
    assert counts[0] < 60
