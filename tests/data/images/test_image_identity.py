"""What tells image sets apart, and unreadable images that several processes count together."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from polyvision.data.images.arrays import ArrayImages, array_data
from polyvision.data.images.augment import Augment
from polyvision.data.images.registry import load_image_data
from polyvision.data.images.sets import Request
from polyvision.data.images.skips import SkippedImages
from polyvision.data.images.strict_dataset import StrictImages
from polyvision.errors import PolyvisionError

PLAIN: dict[str, Any] = {"image_size": 8, "mean": (0, 0, 0), "std": (1, 1, 1)}


def draw(root: Path, level: int = 0) -> Path:
    """Write three training images and two for validation in each of two classes."""
    for part, count in (("train", 3), ("val", 2)):
        for name in ("ant", "bee"):
            folder = root / part / name
            folder.mkdir(parents=True, exist_ok=True)
            for i in range(count):
                Image.new("RGB", (8, 8), (level, i, 0)).save(folder / f"{i}.png")
    return root


def load(root: Path, **options: Any) -> StrictImages:
    data = load_image_data("folder", root=str(root), augment=Augment(), **PLAIN, **options)
    assert isinstance(data.train, StrictImages)
    return data.train


def test_a_folder_is_the_same_wherever_it_lies(tmp_path: Path) -> None:
    first = draw(tmp_path / "first")
    shutil.copytree(first, tmp_path / "second")
    a, b = load(first), load(tmp_path / "second")
    assert a.fingerprint() == b.fingerprint()
    assert a.contents() == b.contents()
    assert len(set(a.contents())) == 3
    assert len(a.contents()) == 10  # of validation too


@pytest.mark.parametrize("part", ["train", "val"])
def test_other_names_labels_and_contents_are_told_apart(tmp_path: Path, part: str) -> None:
    known = load(draw(tmp_path / "known"))
    bee = draw(tmp_path / "renamed") / part / "bee"
    (bee / "0.png").rename(bee / "9.png")
    moved = draw(tmp_path / "moved") / part
    (moved / "bee" / "0.png").rename(moved / "ant" / "9.png")
    for name in ("renamed", "moved"):
        assert load(tmp_path / name).fingerprint() != known.fingerprint()
    redrawn = draw(tmp_path / "redrawn")
    Image.new("RGB", (8, 8), "red").save(redrawn / part / "ant" / "1.png")
    other = load(redrawn)
    assert other.fingerprint() == known.fingerprint()
    assert sum(a != b for a, b in zip(other.contents(), known.contents(), strict=True)) == 1


def test_an_unreadable_image_has_no_content_to_compare(tmp_path: Path) -> None:
    root = draw(tmp_path / "images")
    (root / "train" / "ant" / "1.png").write_bytes(b"")
    (root / "val" / "bee" / "1.png").unlink()
    samples = load(root)
    (root / "val" / "bee" / "0.png").unlink()
    assert [i for i, found in enumerate(samples.contents()) if found is None] == [1, 8]


def test_few_of_many_images_are_compared() -> None:
    read = []

    class Many:
        def __len__(self) -> int:
            return 1_000_000

        def read(self, index: int) -> Any:
            read.append(index)
            raise OSError

        def labels(self) -> Any:
            return np.zeros(3)

    many: Any = Many()
    StrictImages(many, lambda _: _, classes=2).contents()
    assert len(set(read)) == 64
    assert (min(read), max(read)) == (0, 999_999)


def test_pixels_in_memory_are_compared_whole() -> None:
    request = Request(augment=Augment(), val_fraction=None, **PLAIN)
    pixels, labels = np.zeros((6, 8, 8), np.uint8), np.arange(6) % 2
    other, turned = pixels.copy(), labels[::-1].copy()
    other[5, 7, 7] = 1
    found = []
    for train, val in (
        ((pixels, labels), (pixels, labels)),
        ((other, labels), (pixels, labels)),
        ((pixels, turned), (pixels, labels)),
        ((pixels, labels), (other, labels)),
        ((pixels, labels), (pixels, turned)),
    ):
        images = array_data(request, train, val, ["a", "b"], "").train
        assert isinstance(images, ArrayImages)
        found.append(images.fingerprint())
    assert len(set(found)) == 5


def damage(root: Path, *numbers: int) -> None:
    for number in numbers:
        path = root / "train" / ("ant", "bee")[number // 3] / f"{number % 3}.png"
        path.write_bytes(b"no image")


def sharing(root: Path, file: Path, limit: int = 20) -> StrictImages:
    """Open the set as a further training process does."""
    samples = load(root, max_unreadable=limit)
    skipped_by(samples).keep_in(file)
    return samples


def skipped_by(samples: StrictImages) -> SkippedImages:
    assert samples.skipped is not None
    return samples.skipped


def test_processes_list_each_image_once_together(tmp_path: Path) -> None:
    root, file = draw(tmp_path / "images"), tmp_path / "unreadable.jsonl"
    damage(root, 1, 3, 4)
    one, two = sharing(root, file), sharing(root, file)
    assert [one[i] for i in (1, 3, 1)] == [None, None, None]
    assert [two[i] for i in (4, 3)] == [None, None]
    names = [str(root / "train" / name) for name in ("ant/1.png", "bee/0.png", "bee/1.png")]
    assert skipped_by(one).names() == skipped_by(two).names() == names
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["index"] for line in lines] == [1, 3, 4]
    assert lines[0]["image"] == names[0]
    assert "cannot identify" in lines[0]["reason"]


def test_the_limit_is_one_for_all_processes(tmp_path: Path) -> None:
    root, file = draw(tmp_path / "images"), tmp_path / "unreadable.jsonl"
    damage(root, 0, 1, 2)
    one, two = sharing(root, file, limit=2), sharing(root, file, limit=2)
    assert [one[0], two[1]] == [None, None]
    text = rf"3 training images cannot be read, more than max_unreadable=2 \({file} lists them\)"
    with pytest.raises(PolyvisionError, match=text):
        one[2]


def test_a_resumed_run_knows_them_but_for_those_repaired(tmp_path: Path) -> None:
    root, file = draw(tmp_path / "images"), tmp_path / "unreadable.jsonl"
    damage(root, 1, 4)
    first = sharing(root, file)
    assert [first[i] for i in (1, 4)] == [None, None]
    with file.open("a") as cut_off:
        cut_off.write('{"index": 5')
    Image.new("RGB", (8, 8)).save(root / "train" / "bee" / "1.png")
    again = sharing(root, file)
    skipped_by(again).forget_repaired()
    assert skipped_by(again).names() == [str(root / "train" / "ant" / "1.png")]


def test_a_file_that_cannot_be_written_changes_nothing(tmp_path: Path) -> None:
    root = draw(tmp_path / "images")
    damage(root, 1, 4)
    samples = sharing(root, tmp_path / "gone" / "unreadable.jsonl", limit=1)
    assert samples[1] is None
    with pytest.raises(PolyvisionError, match="2 training images cannot be read"):
        samples[4]
