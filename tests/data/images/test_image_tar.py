"""Tar archives and WebDataset shards: every layout, every damage."""

from __future__ import annotations

import io
import json
import re
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from timm.data.readers.reader_image_in_tar import ReaderImageInTar

from polyvision.data.images.augment import Augment
from polyvision.data.images.registry import ImageData, load_image_data


def load(name: str, root: Path, **options: Any) -> ImageData:
    augment = Augment(crop_scale=(1, 1), hflip=0, crop_pct=1.0)
    settings = {"image_size": 6, "augment": augment, "mean": (0, 0, 0), "std": (1, 1, 1)}
    return load_image_data(name, root=str(root), val_fraction=None, **settings | options)


def png(level: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (6, 6), (level, 0, 0)).save(file, "PNG")
    return file.getvalue()


def pack(files: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return file.getvalue()


def write(root: Path, archives: dict[str, dict[str, bytes]]) -> Path:
    for name, files in archives.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(pack(files))
    return root


def seen(part: Any) -> dict[str, tuple[int, int]]:
    """Map the name of each image to its red level and label."""
    found = {}
    for index in range(len(part)):
        image, label = part[index]
        level = round(float(image[0, 0, 0]) * 255)
        found[part.source.name(index).rpartition("/")[2]] = (level, label)
    return found


LONG = "x" * 120 + ".png"  # needs an extended header
TRAIN = {"ant/1.png": png(1), "bee/2.png": png(2), f"ant/{LONG}": png(3), "bee/notes.txt": b"!"}
VAL = {"./ant/4.png": png(4), "./bee/deep/bee/5.png": png(5), "./bee/.6.png": png(6)}
LAYOUTS = {
    "one archive for each side": {"train.tar": TRAIN, "val.tar": VAL},
    "one archive for each class": {
        "train/ant.tar": {"1.png": png(1), LONG: png(3)},
        "train/bee.tar": {"2.png": png(2)},
        "validation/ant.tar": {"4.png": png(4)},
        "validation/bee.tar": {"5.png": png(5)},
    },
    "an archive of archives": {
        "train.tar": {
            "ant.tar": pack({"1.png": png(1), LONG: png(3)}),
            "bee.tar": pack({"2.png": png(2)}),
        },
        "val.tar": VAL,
    },
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tar(tmp_path: Path, layout: str) -> None:
    data = load("tar", write(tmp_path, LAYOUTS[layout]))
    assert data.classes == ["ant", "bee"]
    train, val = seen(data.train), seen(data.val)
    assert list(train.values()) == [(1, 0), (3, 0), (2, 1)]
    assert list(val.values()) == [(4, 0), (5, 1)]
    if layout.startswith("one archive for each side"):
        assert data.train.source.name(2) == f"{tmp_path}/train.tar:bee/2.png"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tar_labels_are_those_of_timm(tmp_path: Path, layout: str) -> None:
    write(tmp_path, LAYOUTS[layout])
    whole = tmp_path / "train.tar"
    theirs = ReaderImageInTar(str(whole if whole.exists() else tmp_path / "train"))
    ours = load("tar", tmp_path)
    names = {name.rpartition("/")[2]: i for i, name in enumerate(theirs.filenames())}
    for name, (_, label) in seen(ours.train).items():
        content, target = theirs[names[name.rpartition(":")[2]]]
        assert target == label
        assert (
            content.read() == ours.train.source.read(list(seen(ours.train)).index(name))[0].read()
        )


def shard(*numbers: int, label: str = "cls") -> dict[str, bytes]:
    files: dict[str, bytes] = {"__notes__.json": b"{}"}
    for number in numbers:
        key = f"part/{number:04}"
        files[f"{key}.seg.png"] = png(99)
        files[f"{key}.PNG"] = png(number)
        text = f"{number % 3}\n" if label == "cls" else json.dumps({"target": number % 3})
        files[f"{key}.{label}"] = text.encode()
    return files


@pytest.mark.parametrize("label", ["cls", "json"])
def test_wds(tmp_path: Path, label: str) -> None:
    shards = {
        "tiny-train-0000.tar": shard(0, 1, label=label),
        "tiny-train-0001.tar": shard(2, 3, label=label),
        "tiny-validation-0000.tar": shard(4, 5, label=label),
    }
    write(tmp_path, shards)
    data = load("wds", tmp_path, label_key="target" if label == "json" else None)
    assert data.classes == ["0", "1", "2"]
    assert list(seen(data.train).values()) == [(0, 0), (1, 1), (2, 2), (3, 0)]
    assert list(seen(data.val).values()) == [(4, 1), (5, 2)]
    assert data.val.source.name(0) == f"{tmp_path}/tiny-validation-0000.tar:part/0004.PNG"


def test_a_damaged_image_of_an_archive_is_named(tmp_path: Path) -> None:
    train = TRAIN | {"ant/bad.jpg": png(9)[:40]}
    data = load("tar", write(tmp_path, {"train.tar": train, "val.tar": VAL}), max_unreadable=1)
    samples = [data.train[i] for i in range(4)]
    assert samples.count(None) == 1
    assert data.unreadable() == [f"{tmp_path}/train.tar:ant/bad.jpg"]
    (tmp_path / "val.tar").write_bytes(pack(VAL | {"./bee/bad.png": b""}))
    data = load("tar", tmp_path)
    with pytest.raises(ValueError, match=rf"validation image {tmp_path}/val.tar:bee/bad.png: cann"):
        data.val[2]


def test_only_arrays_grow_with_the_number_of_images(tmp_path: Path) -> None:
    data = load("tar", write(tmp_path, {"train.tar": TRAIN, "val.tar": VAL}))
    state = vars(data.train.source)
    assert all(not isinstance(value, dict) for value in state.values())
    assert [len(value) for value in state.values() if isinstance(value, list)] == [1]


TAR_MISTAKES = [
    ({"train.tar": TRAIN}, "no image in val.tar or val/*.tar"),
    ({"train.tar": {}, "val.tar": VAL}, "no image in train.tar"),
    ({"train.tar": TRAIN | {"cat/1.png": b""}, "val.tar": VAL}, "only one of them has: cat"),
    ({"train.tar": {"1.png": png(1)}, "val.tar": VAL}, "train.tar holds images outside any folder"),
    ({"train.tar": {"ant/1.png": b""}, "val.tar": {"ant/1.png": b""}}, "at least two classes"),
]


@pytest.mark.parametrize(("archives", "text"), TAR_MISTAKES)
def test_tar_mistakes(tmp_path: Path, archives: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        load("tar", write(tmp_path, archives))


@pytest.mark.parametrize("content", [b"", b"no tar", pack(TRAIN)[:1800], b"\x1f\x8b" + bytes(600)])
def test_a_damaged_archive_is_named(tmp_path: Path, content: bytes) -> None:
    write(tmp_path, {"val.tar": VAL})
    (tmp_path / "train.tar").write_bytes(content)
    with pytest.raises(ValueError, match=rf"cannot list the archive {tmp_path}/train.tar: "):
        load("tar", tmp_path)


WDS_MISTAKES = [
    (
        {"other.tar": shard(1)},
        {},
        "no shard in .* matches \\*train\\*.tar; give data.options.train",
    ),
    ({"train.tar": {"1.cls": b"0"}}, {}, "sample 1 of .*train.tar has no image: cls"),
    ({"train.tar": {"1.png": png(1)}}, {}, "sample 1 of .*train.tar has no label: .*it has png"),
    ({"train.tar": {"1.png": png(1), "1.cls": b"ant"}}, {}, "has no label: a number in .cls"),
    ({"train.tar": {"1.png": png(1), "1.json": b"[]"}}, {"label_key": "y"}, "'y' in .json"),
    ({"train.tar": shard(0, 1, 2)}, {"classes": 2}, "0002.PNG has the label 2; 2 classes have"),
    ({"train.tar": shard(0, 1)}, {}, "val.tar:part/0002.PNG has the label 2; 2 classes"),
    ({"train.tar": shard(0, 1)}, {"classes": 3}, "validation has images of 2, of which training"),
    ({"train.tar": {"1.png": png(1), "1.cls": b"-1"}}, {"classes": 9}, "has the label -1; 9 class"),
    ({"train.tar": shard(0, 1, 2)}, {"max_unreadable": -1}, "max_unreadable must be at least 0"),
]


@pytest.mark.parametrize(("archives", "options", "text"), WDS_MISTAKES)
def test_wds_mistakes(
    tmp_path: Path, archives: dict[str, Any], options: dict[str, Any], text: str
) -> None:
    write(tmp_path, {"val.tar": shard(2)} | archives)
    with pytest.raises(ValueError, match=text):
        load("wds", tmp_path, **options)


def test_classes_without_any_image_are_noted(tmp_path: Path) -> None:
    write(tmp_path, {"train.tar": shard(0, 1, 2), "val.tar": shard(2)})
    data = load("wds", tmp_path, classes=5)
    assert len(data.classes) == 5
    assert data.notes == ["no image at all of 3, 4"]
    assert torch.equal(data.train[0][0], data.train[0][0])
