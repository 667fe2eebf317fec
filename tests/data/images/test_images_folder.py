"""Class folders: listing, splitting, damaged files, and every error a user can meet."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from polyvision.data.images.folder import ClassTree, scan_class_tree, split_class_tree
from polyvision.data.images.registry import Augment, ImageData, collate, load_image_data
from polyvision.data.images.strict_dataset import StrictImages
from polyvision.errors import PolyvisionError

COLOURS = {"ant": (200, 0, 0), "bee": (0, 200, 0), "cat": (0, 0, 200)}


def draw(folder: Path, count: int, colour: tuple[int, int, int] = (9, 9, 9)) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        Image.new("RGB", (12, 12), colour).save(folder / f"{i:03}.png")


def load(root: Path | str | None, **options: Any) -> ImageData:
    settings = {
        "image_size": 8,
        "augment": Augment(crop_scale=(1, 1), crop_pct=1.0),
        "mean": (0, 0, 0),
        "std": (1, 1, 1),
    }
    return load_image_data("folder", root=None if root is None else str(root), **settings | options)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """One folder per class with 10, 20 and 30 images."""
    for count, (name, colour) in zip((10, 20, 30), COLOURS.items(), strict=True):
        draw(tmp_path / name, count, colour)
    return tmp_path


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    """Folders train and val with 4 and 2 images per class."""
    for name, colour in COLOURS.items():
        draw(tmp_path / "train" / name, 4, colour)
        draw(tmp_path / "val" / name, 2, colour)
    return tmp_path


def test_given_parts_are_taken_as_they_are(parts: Path) -> None:
    data = load(parts)
    assert data.classes == ["ant", "bee", "cat"]
    assert (len(data.train), len(data.val)) == (12, 6)
    assert data.description == (
        f"images of {parts}: 12 training and 6 validation images in 3 classes"
    )
    for subset in (data.train, data.val):
        for image, label in (subset[i] for i in range(len(subset))):
            assert image.shape == (3, 8, 8)
            assert image.dtype == torch.float32
            expected = torch.tensor(COLOURS[data.classes[label]]) / 255
            torch.testing.assert_close(image.mean((1, 2)), expected)


def test_one_tree_is_split_alike_in_every_class(tree: Path) -> None:
    data = load(tree, val_fraction=0.2)
    labels = {
        part: [s[1] for s in map(getattr(data, part).__getitem__, range(n))]
        for part, n in (("train", 48), ("val", 12))
    }
    assert np.bincount(labels["train"]).tolist() == [8, 16, 24]
    assert np.bincount(labels["val"]).tolist() == [2, 4, 6]


def test_the_split_is_fixed_and_disjoint(tree: Path) -> None:
    whole = scan_class_tree(tree)
    train, val = split_class_tree(whole, 0.25)
    torch.manual_seed(1)
    again = split_class_tree(scan_class_tree(tree), 0.25)
    assert (train.files, val.files) == (again[0].files, again[1].files)
    for name, files in whole.files.items():
        assert sorted(train.files[name] + val.files[name]) == files
    # Nothing but the paths decides: these are pinned.
    assert val.files["ant"] == ["ant/003.png", "ant/006.png"]


@pytest.mark.parametrize(("fraction", "counts"), [(0.01, (1, 1)), (0.99, (9, 1)), (0.5, (5, 1))])
def test_both_sides_of_a_split_keep_every_class(fraction: float, counts: tuple[int, int]) -> None:
    files = {"a": [f"a/{i}.png" for i in range(10)], "b": ["b/0.png", "b/1.png"]}
    _, val = split_class_tree(ClassTree(Path("root"), files), fraction)
    assert tuple(map(len, val.files.values())) == counts


def test_nested_folders_links_and_odd_names(tree: Path) -> None:
    draw(tree / "ant" / "deep" / "er", 1)
    (tree / "ant" / "loop").symlink_to(tree / "ant")
    (tree / "dog").symlink_to(tree / "bee")
    Image.new("RGB", (4, 4)).save(tree / "cat" / "\u00e9t\u00e9 = #1.PNG")
    scanned = scan_class_tree(tree)
    assert {name: len(files) for name, files in scanned.files.items()} == {
        "ant": 11,
        "bee": 20,
        "cat": 31,
        "dog": 20,
    }
    assert scanned.files["ant"][-1] == "ant/deep/er/000.png"
    data = load(tree)
    paths = {data.train.source.name(i) for i in range(len(data.train))}
    paths |= {data.val.source.name(i) for i in range(len(data.val))}
    assert paths == {str(tree / file) for files in scanned.files.values() for file in files}


def test_what_is_ignored_is_reported(tree: Path) -> None:
    draw(tree / ".ipynb_checkpoints", 2)
    draw(tree / "ant" / ".thumbs", 2)
    (tree / "bee" / ".DS_Store").touch()
    (tree / "bee" / "labels.txt").touch()
    (tree / "readme.md").touch()
    data = load(tree)
    assert data.classes == ["ant", "bee", "cat"]
    assert sorted(data.notes) == [
        f"ignored hidden in {tree}: .ipynb_checkpoints, ant/.thumbs, bee/.DS_Store",
        f"ignored outside any class folder in {tree}: readme.md",
        f"ignored without an image's extension in {tree}: bee/labels.txt",
    ]


def test_a_missing_root_names_the_layout() -> None:
    with pytest.raises(
        PolyvisionError, match=r"needs data.root: .*<root>/train/<class> and <root>/val"
    ):
        load(None)


def test_a_root_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(
        PolyvisionError, match=f"{tmp_path}/none does not exist; data.root is the fold"
    ):
        load(tmp_path / "none")
    (tmp_path / "file").touch()
    with pytest.raises(
        PolyvisionError, match=f"{tmp_path}/file is a file; data.root is the folder"
    ):
        load(tmp_path / "file")


def test_fewer_than_two_classes(tmp_path: Path) -> None:
    with pytest.raises(PolyvisionError, match="one folder per class, at least two; found none"):
        load(tmp_path)
    draw(tmp_path / "ant", 2)
    with pytest.raises(PolyvisionError, match="at least two; found only 'ant'"):
        load(tmp_path)


def test_an_empty_class_folder_is_named(parts: Path) -> None:
    (parts / "train" / "dog").mkdir()
    (parts / "train" / "dog" / "notes.txt").touch()
    with pytest.raises(PolyvisionError, match=f"no image in class folder dog of {parts}/train"):
        load(parts)


def test_classes_of_training_and_validation_must_agree(parts: Path) -> None:
    draw(parts / "train" / "dog", 1)
    draw(parts / "val" / "eel", 1)
    with pytest.raises(PolyvisionError, match=r"same classes; only one of them has: dog, eel$"):
        load(parts)


@pytest.mark.parametrize(("name", "other"), [("train", "val"), ("val", "train")])
def test_one_part_alone_is_refused(tmp_path: Path, name: str, other: str) -> None:
    draw(tmp_path / name / "ant", 2)
    with pytest.raises(PolyvisionError, match=f"{name}/ with class folders but no {other}/. Add"):
        load(tmp_path)


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    draw(tmp_path / "train", 3)
    draw(tmp_path / "plane", 3)
    assert load(tmp_path).classes == ["plane", "train"]


def test_a_class_of_one_image_cannot_be_split(tree: Path) -> None:
    draw(tree / "dog", 1)
    with pytest.raises(PolyvisionError, match=r"class 'dog' .* has one image"):
        load(tree)


@pytest.fixture
def damaged(parts: Path) -> Path:
    """Training images of bee: 001 has no byte, 002 is text, 003 is cut off."""
    bee = parts / "train" / "bee"
    (bee / "001.png").write_bytes(b"")
    (bee / "002.png").write_text("I am no picture.")
    (bee / "003.png").write_bytes((bee / "000.png").read_bytes()[:45])
    return parts


def test_unreadable_training_images_are_skipped_counted_and_named(
    damaged: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = load(damaged)
    assert data.unreadable() == []
    with caplog.at_level(logging.WARNING):
        samples = [data.train[i] for i in range(12)] + [data.train[5]]
    missing = [i for i, sample in enumerate(samples) if sample is None]
    assert missing == [5, 6, 7, 12]
    expected = [str(damaged / "train" / "bee" / f"00{i}.png") for i in (1, 2, 3)]
    assert data.unreadable() == expected
    assert len(caplog.messages) == 3  # once each
    for path, message in zip(expected, caplog.messages, strict=True):
        assert path in message
    images, labels = collate(samples[4:8])
    assert images.shape == (1, 3, 8, 8)  # no neighbour steps in
    assert labels.tolist() == [1]


@pytest.mark.parametrize("workers", [0, 2])
def test_worker_processes_share_the_count(damaged: Path, workers: int) -> None:
    data = load(damaged, max_unreadable=3)
    loader = DataLoader(data.train, batch_size=4, num_workers=workers, collate_fn=collate)
    for _ in range(2):  # a second epoch counts no file twice
        labels = torch.cat([batch[1] for batch in loader])
        assert labels.tolist() == [0] * 4 + [1] + [2] * 4
    assert len(data.unreadable()) == 3


def test_too_many_unreadable_images_stop_training(damaged: Path) -> None:
    data = load(damaged, max_unreadable=2)
    assert [data.train[i] for i in (5, 6)] == [None, None]
    text = rf"3 training images cannot be read, more than max_unreadable=2.*{damaged}/train/bee/003"
    with pytest.raises(PolyvisionError, match=text):
        data.train[7]


def test_a_batch_of_nothing_is_an_error() -> None:
    with pytest.raises(PolyvisionError, match="none of the 2 images of a batch can be read"):
        collate([None, None])


def test_an_unreadable_validation_image_is_an_error(parts: Path) -> None:
    path = parts / "val" / "cat" / "001.png"
    path.write_bytes(b"")
    data = load(parts)
    text = re.escape(f"cannot read the validation image {path}: cannot identify image file")
    with pytest.raises(PolyvisionError, match=text):
        data.val[5]
    assert data.val[4][1] == 2


def test_headers_of_validation_images_are_checked_before_training(parts: Path) -> None:
    data = load(parts)
    data.check()
    for name in ("ant/000.png", "cat/001.png"):
        (parts / "val" / name).write_bytes(b"")
    (parts / "train" / "bee" / "001.png").write_bytes(b"")  # training skips it
    text = f"cannot read the validation image {parts}/val/ant/000.png: cannot identify image file"
    with pytest.raises(PolyvisionError, match=f"{text}, and 1 more. Repair or remove them."):
        data.check()
    samples = data.val
    assert isinstance(samples, StrictImages)
    (parts / "val" / "ant" / "000.png").unlink()
    with pytest.raises(PolyvisionError, match="No such file or directory"):
        samples.check_headers()


def test_the_check_of_headers_ends_in_time(parts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = load(parts).val
    assert isinstance(data, StrictImages)
    read = []
    monkeypatch.setattr(data.source, "read", lambda i: (read.append(i), (parts / "no", 0))[1])
    with pytest.raises(PolyvisionError, match="cannot read the validation image"):
        data.check_headers(seconds=0)
    assert len(read) == 1
