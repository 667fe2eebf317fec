"""A run folder under bad conditions: a full disk, a second writer, an end between two files."""

import errno
import json
import os

import pytest
import torch

from polyvision.errors import PolyvisionError
from polyvision.files import write_whole
from polyvision.training.logging.loggers import JsonLinesLogger, truncate_metrics
from polyvision.training.loop.module import TaskModule
from polyvision.training.run.state import track
from polyvision.training.run.storage import explained


def full(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_failed_write_keeps_the_old_text(tmp_path, monkeypatch):
    path = tmp_path / "config.yaml"
    write_whole(path, "old")
    monkeypatch.setattr(os, "fsync", full)  # what was written so far is half of it
    with pytest.raises(OSError, match="No space"):
        write_whole(path, "new text")
    assert path.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["config.yaml"]


def test_a_text_is_on_the_disk_before_it_takes_its_name(tmp_path, monkeypatch):
    path, seen = tmp_path / "state.json", []
    original = os.fsync

    def noted(descriptor):
        seen.append((os.path.getsize(descriptor), path.exists()))
        original(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    write_whole(path, "whole")
    assert seen == [(5, False)]
    assert path.read_text() == "whole"


def test_metrics_survive_a_disk_that_is_full_at_the_resume(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n')
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        truncate_metrics(path, 1)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def contents(folder):
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


def test_a_second_resume_leaves_the_run_alone(train, tmp_path, hold):
    train("language", "trainer.max_steps=2")
    (folder,) = tmp_path.glob("runs/*/*/*/*/seed0")
    (folder / "summary.json").unlink()
    before = contents(folder)
    hold(folder)
    with pytest.raises(PolyvisionError, match="leave resume= out to start a run beside it"):
        train("language", "trainer.max_steps=2", "resume=auto")
    assert contents(folder) == before


@pytest.mark.parametrize("name", ["data.txt", None])
def test_what_the_disk_refuses_is_one_line(tmp_path, name):
    checkpoint = tmp_path / "last.ckpt"
    checkpoint.touch()
    with pytest.raises(PolyvisionError) as caught, explained(tmp_path, checkpoint):
        raise OSError(errno.ENOSPC, "No space left on device", name)
    place = name or f"cannot write in {tmp_path}"
    assert str(caught.value).startswith(f"{place}: No space left on device. What was saved")
    assert str(caught.value).endswith(f"resume={tmp_path}")


@pytest.mark.parametrize("error", [OSError("cannot identify image"), OSError(errno.EPIPE, "pipe")])
def test_errors_that_are_not_of_files_keep_their_traceback(tmp_path, error):
    with pytest.raises(OSError, match=str(error.args[-1])), explained(tmp_path, tmp_path / "none"):
        raise error


def test_a_full_disk_does_not_hide_what_ended_the_run(tmp_path, monkeypatch):
    def work():
        with track(tmp_path, {}, 0, lambda: 1):
            monkeypatch.setattr(os, "fsync", full)
            raise ValueError("the first error")

    with pytest.raises(ValueError, match="the first error"):
        work()


def test_a_run_on_a_full_disk_goes_on_when_there_is_room(train, tmp_path, monkeypatch):
    more = ["trainer.max_steps=6", "trainer.checkpoint_every_n_steps=2"]
    train("language", *more, f"run_root={tmp_path}/whole")
    calls = 0

    def save(checkpoint, file, original=torch.save):
        nonlocal calls
        calls += 1
        if calls < 2:
            return original(checkpoint, file)
        try:
            full()
        except OSError:
            raise RuntimeError("unexpected pos 39744 vs 39696") from None  # as torch does

    def log(self, metrics, step=None, original=JsonLinesLogger.log_metrics):
        return full() if step == 4 else original(self, metrics, step)

    (whole,) = tmp_path.glob("whole/*/*/*/*/seed0")
    expected = torch.load(whole / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
    for owner, name, broken in ((torch, "save", save), (JsonLinesLogger, "log_metrics", log)):
        root = f"run_root={tmp_path}/{name}"
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, broken)
            with pytest.raises(PolyvisionError, match="No space left"):
                train("language", *more, root)
        (folder,) = tmp_path.glob(f"{name}/*/*/*/*/seed0")
        assert json.loads((folder / "state.json").read_text())["state"] == "failed"
        train("language", *more, root, "resume=auto")
        found = torch.load(folder / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
        assert all(torch.equal(value, found[key]) for key, value in expected.items())


def test_a_run_stopped_between_last_step_and_validation_is_validated(train, tmp_path, monkeypatch):
    more = ["trainer.max_steps=3", "trainer.checkpoint_every_n_steps=3"]
    expected = train("language", *more, f"run_root={tmp_path}/whole")

    def stop(self):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TaskModule, "on_validation_epoch_start", stop)
        with pytest.raises(SystemExit):
            train("language", *more)
    summary = train("language", *more, "resume=auto")
    assert summary["steps"] == 3
    assert summary["shown"] == expected["shown"]
    assert summary["best"] == expected["best"]
