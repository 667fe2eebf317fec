"""Runs on image files: which images a run resumes on, and those that cannot be read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from polyvision.data.images.registry import Augment, collate, load_image_data
from polyvision.errors import PolyvisionError
from polyvision.training.config.compose import compose
from polyvision.training.session import run_task
from polyvision.training.tasks.vision import VisionModule, build_task


def draw(root: Path, seed: int) -> Path:
    """Write noise: 8 training images and 2 for validation in each of two classes."""
    random = np.random.default_rng(seed)
    for part, count in (("train", 8), ("val", 2)):
        for name in ("ant", "bee"):
            folder = root / part / name
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = random.integers(0, 256, (32, 32, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{i}.png")
    return root


def test_a_run_resumes_on_its_own_images_only(tmp_path, break_at, capsys):
    def train(root, *more):
        overrides = [f"run_root={tmp_path}/runs", "data=folder", f"data.root={root}"]
        overrides += ["data.image_size=32", "data.workers=0", "model=timm"]
        overrides += ["model.name=test_resnet", "recipe.batch_size=5", "recipe.warmup_epochs=0"]
        overrides += ["trainer.accelerator=cpu", "trainer.max_epochs=2"]
        (config,) = compose("vision", [*overrides, *more])
        return run_task(config, build_task)

    first, other = draw(tmp_path / "first", 0), draw(tmp_path / "other", 1)
    for root in (first, other):
        (root / "train" / "ant" / "3.png").write_bytes(b"no image")
    restore = break_at(4)  # in the second epoch
    with pytest.raises(RuntimeError, match="killed"):
        train(first)
    restore()
    with pytest.raises(PolyvisionError) as caught:
        train(other, "resume=auto")
    assert f"(19 of 20 samples that were compared differ): data.root={first} then, " in str(
        caught.value
    )
    assert f"data.root={other} now" in str(caught.value)

    moved = first.rename(tmp_path / "moved")
    Image.new("RGB", (32, 32)).save(moved / "train" / "ant" / "3.png")  # repaired
    (moved / "train" / "bee" / "6.png").write_bytes(b"no image")
    summary = train(moved, "resume=auto", "data.options.max_unreadable=1")
    assert summary["unreadable"] == [f"{moved}/train/bee/6.png"]
    (file,) = tmp_path.glob("runs/*/*/*/*/*/unreadable.jsonl")
    (line,) = map(json.loads, file.read_text().splitlines())
    assert line["index"] == 14
    assert f"NOT read       1 training file: {moved}/train/bee/6.png" in capsys.readouterr().out


def test_a_batch_of_one_names_the_images_that_were_left_out(tmp_path):
    root = draw(tmp_path / "images", 0)
    broken = root / "train" / "ant" / "1.png"
    broken.write_bytes(b"")
    plain = {"image_size": 32, "mean": (0, 0, 0), "std": (1, 1, 1), "augment": Augment()}
    data = load_image_data("folder", root=str(root), **plain)
    (config,) = compose("vision", ["data=folder", f"data.root={root}"])
    network = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 4), nn.BatchNorm1d(4))
    steps = {"seed": 0, "total_steps": 1, "epoch_steps": 1}
    module = VisionModule(network, config.recipe, classes=2, skipped=data.skipped, **steps)
    one = collate([data.train[0]])
    with pytest.raises(ValueError, match="Expected more than 1 value") as caught:
        module.loss(one)  # nobody left anything out
    assert not isinstance(caught.value, PolyvisionError)
    one = collate([data.train[0], data.train[1]])
    with pytest.raises(PolyvisionError) as caught:
        module.loss(one)
    for text in ("the one that remained (Expected more than 1 value", f"so far: {broken}. Repair"):
        assert text in str(caught.value)
    assert torch.isfinite(module.loss(collate([data.train[i] for i in range(3)])))


@pytest.mark.slow
def test_two_ranks_count_unreadable_images_together(tmp_path):
    root = draw(tmp_path / "images", 0)
    broken = [root / "train" / name / f"{i}.png" for name in ("ant", "bee") for i in (0, 3, 6)]
    for path in broken:
        path.write_bytes(b"no image")

    def train(*more):
        command = [sys.executable, str(Path(__file__).parents[2] / "train_vision.py")]
        command += [f"run_root={tmp_path}/runs", "data=folder", f"data.root={root}"]
        command += ["data.image_size=32", "data.workers=0", "model=timm"]
        command += ["model.name=test_resnet", "recipe.batch_size=16", "recipe.warmup_epochs=0"]
        command += ["trainer.accelerator=cpu", "trainer.devices=2", "trainer.max_epochs=1"]
        return subprocess.run([*command, *more], capture_output=True, text=True, timeout=300)

    refused = train("data.options.max_unreadable=5")
    assert refused.returncode != 0
    assert "6 training images cannot be read, more than max_unreadable=5" in refused.stderr
    done = train("data.options.max_unreadable=6")
    assert done.returncode == 0, done.stderr
    (summary,) = tmp_path.glob("runs/*/*/*/*/*/summary.json")
    assert json.loads(summary.read_text())["unreadable"] == [str(path) for path in broken]
