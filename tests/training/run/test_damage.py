"""Checkpoints that were damaged after they were written."""

import json
import os
from pathlib import Path

import pytest
import torch

from polyvision.errors import PolyvisionError
from polyvision.models.trained.saved import open_saved
from polyvision.training.loop.saving import Checkpoints
from polyvision.training.loop.stopping import Stopping
from polyvision.training.restore import load_model
from polyvision.training.run.checkpoint import AtomicCheckpointIO
from polyvision.training.run.folder import Run

SHORT = ["recipe.batch_size=128", "trainer.max_epochs=2", "trainer.histograms=false"]
SHORT += ["trainer.checkpoint_every_n_steps=2"]


@pytest.fixture
def broken(train, tmp_path, break_at):
    """Return the folder of a run that was killed at step 7 of 10, and its settings."""
    restore = break_at(7)
    with pytest.raises(RuntimeError, match="killed"):
        train("language", *SHORT)
    restore()
    (folder,) = tmp_path.glob("runs/*/*/*/*/seed0")
    return folder


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path):
    os.truncate(path, path.stat().st_size // 2)


def empty(path):
    os.truncate(path, 0)


def steps_of(folder):
    files = [folder / "checkpoints" / f"{name}.ckpt" for name in ("previous", "last")]
    return [torch.load(file, weights_only=True)["global_step"] for file in files]


def test_a_run_goes_on_from_the_one_before_a_damaged_one(broken, train, tmp_path, capsys):
    expected = train("language", *SHORT, f"run_root={tmp_path}/whole")
    assert steps_of(broken) == [5, 6]  # of the validation, and every second
    flip_a_bit(broken / "checkpoints/last.ckpt")
    metrics = broken / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes() + b'[1]\n3\n{"a": 1}\n{"st\xff\0')
    (broken / "state.json").write_text("[]")
    summary = train("language", *SHORT, "resume=auto")
    errors = capsys.readouterr().err
    assert "last.ckpt cannot be read as a checkpoint: archive/data/" in errors
    assert "going on from" in errors
    assert summary["last"]["val/loss"] == expected["last"]["val/loss"]
    assert steps_of(broken) == [8, 10]
    assert json.loads((broken / "state.json").read_text())["resumed_at"] == [5]


@pytest.mark.parametrize("damage", [flip_a_bit, Path.unlink])
def test_every_reader_takes_the_one_before_a_damaged_one(damage, broken, capsys):
    """Export, generate, evaluate, validate and finetune use ``open_saved``; analyse the other."""
    last = broken / "checkpoints/last.ckpt"
    damage(last)
    assert open_saved(broken, weights="last").step == 5
    assert load_model(broken).step == 5
    warned = capsys.readouterr().err.count("previous.ckpt")
    assert warned == (2 if last.exists() else 0)
    if last.exists():
        assert open_saved(last).step == 5
        cut(last.with_name("previous.ckpt"))
        for read in (open_saved, load_model):
            with pytest.raises(
                PolyvisionError, match=r"(?s)last\.ckpt cannot.*previous\.ckpt cannot"
            ):
                read(last)


@pytest.mark.parametrize("damage", [flip_a_bit, cut, empty])
def test_damage_is_seen(damage, tmp_path):
    path = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint({"weights": torch.randn(4000)}, path)
    AtomicCheckpointIO().load_checkpoint(path)
    damage(path)
    with pytest.raises(PolyvisionError, match=r"last\.ckpt cannot be read as a checkpoint"):
        AtomicCheckpointIO().load_checkpoint(path)


def test_nothing_is_touched_where_no_checkpoint_is_whole(broken, train):
    empty(broken / "checkpoints/last.ckpt")
    cut(broken / "checkpoints/previous.ckpt")
    before = {p: p.read_bytes() for p in broken.rglob("*") if p.is_file()}
    with pytest.raises(PolyvisionError) as caught:
        train("language", *SHORT, "resume=auto")
    lines = str(caught.value).splitlines()
    assert ["last.ckpt" in lines[0], "previous.ckpt" in lines[1]] == [True, True]
    assert f"finetune={broken}/checkpoints/best.ckpt" in lines[1]
    assert {p: p.read_bytes() for p in broken.rglob("*") if p.is_file()} == before
    (broken / "checkpoints/previous.ckpt").unlink()
    with pytest.raises(PolyvisionError, match="Leave resume= out to start a new run"):
        train("language", *SHORT, "resume=auto")


def test_a_damaged_last_never_takes_the_place_of_the_one_before(tmp_path):
    run = Run(tmp_path)
    run.checkpoints.mkdir()
    run.last.write_text("damaged")
    run.previous.write_text("whole")

    class Trainer:
        is_global_zero = True

        def __init__(self, step):
            self.global_step = step

        def save_checkpoint(self, path, weights_only):
            path.with_suffix(".new").write_text("new")
            path.with_suffix(".new").replace(path)

    def files():
        return [path.read_text() for path in (run.previous, run.last)]

    resumed = Run(tmp_path, checkpoint=run.previous)
    saving = Checkpoints(resumed, "val/loss", None, Stopping(), [1])
    saving._save(Trainer(3))
    assert files() == ["whole", "new"]
    saving._save(Trainer(4))
    assert files() == ["new", "new"]

    run.last.write_text("of step 4")
    saving._save(Trainer(4))  # of the same step, as after a validation
    assert files() == ["new", "new"]


@pytest.mark.parametrize("links", [True, False])
def test_the_checkpoint_before_is_kept_without_hard_links_too(links, tmp_path, monkeypatch):
    run = Run(tmp_path)
    run.checkpoints.mkdir()
    written = []

    class Trainer:
        is_global_zero = True

        def save_checkpoint(self, path, weights_only):
            if self.global_step == 9:
                raise OSError("the disk is full")
            # Both are there until the new one is whole.
            written.append(sorted(each.name for each in run.checkpoints.iterdir()))
            path.write_text(str(self.global_step))

    def refuse(*_):
        raise OSError("no hard links here")

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    saving, trainer = Checkpoints(run, "val/loss", None, Stopping(), [1]), Trainer()
    for step in (1, 2, 3):
        trainer.global_step = step
        saving._save(trainer)
    trainer.global_step = 9
    with pytest.raises(OSError, match="full"):
        saving._save(trainer)
    assert written == [[], ["last.ckpt"], ["last.ckpt", "previous.ckpt"]]
    assert [path.read_text() for path in (run.previous, run.last)] == ["2", "3"]
