"""A broken run goes on bitwise under loss scaling and torch.compile too."""

import functools
import json

import pytest
import torch
from torch import nn

SHORT = ["trainer.max_epochs=1", "trainer.checkpoint_every_n_steps=2", "trainer.histograms=false"]
SHORT += ["data.options.samples=40", "recipe.batch_size=8"]  # four steps
COMPILE = ["trainer.compile=true", "recipe.ema_decay=0.9", "act=relu"]


def broken_and_whole(train, tmp_path, break_at, *more):
    """Return the folders of a run that was killed and resumed, and of one that was not."""
    more = [*more, *SHORT]
    train("vision", *more, f"run_root={tmp_path}/whole")
    restore = break_at(3)
    with pytest.raises(RuntimeError, match="killed"):
        train("vision", *more, f"run_root={tmp_path}/broken")
    restore()
    train("vision", *more, f"run_root={tmp_path}/broken", "resume=auto")
    return [next(tmp_path.glob(f"{name}/*/*/*/*/seed0")) for name in ("broken", "whole")]


def series(folder, tag):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row[tag]) for row in rows if tag in row]


def check_equal(broken, whole, *tags):
    for tag in ("train/loss", "val/loss", "optim/grad_norm", *tags):
        assert series(whole, tag)
        assert series(whole, tag) == series(broken, tag), tag
    a, b = (torch.load(f / "checkpoints" / "last.ckpt", weights_only=True) for f in (broken, whole))
    assert a["state_dict"].keys() == b["state_dict"].keys()
    for key, value in a["state_dict"].items():
        assert torch.equal(value, b["state_dict"][key]), key
    return a


def test_the_loss_scale_goes_on(train, tmp_path, break_at, monkeypatch):
    growing = functools.partial(torch.amp.GradScaler, init_scale=256.0, growth_interval=1)
    monkeypatch.setattr(torch.amp, "GradScaler", growing)
    broken, whole = broken_and_whole(train, tmp_path, break_at, "precision=fp16")
    check_equal(broken, whole, "optim/loss_scale")
    assert [s for _, s in series(whole, "optim/loss_scale")] == [256.0, 512.0, 1024.0, 2048.0]


def test_a_compiled_run_goes_on_and_its_keys_are_clean(train, tmp_path, break_at, monkeypatch):
    torch._dynamo.reset()
    compiled, original = [], nn.Module.compile

    def compile_with(self):
        compiled.append(self)
        original(self, backend="eager")  # traced, but not built: that takes minutes

    monkeypatch.setattr(nn.Module, "compile", compile_with)
    broken, whole = broken_and_whole(train, tmp_path, break_at, *COMPILE)
    assert len(compiled) == 3
    state = check_equal(broken, whole, "val_ema/loss")
    assert torch._dynamo.utils.counters["frames"]["ok"] > 0
    names = [f"model.{name}" for name in compiled[0].state_dict()]
    assert list(state["state_dict"]) == names
    assert list(state["ema"]) == names
    assert not [name for name in names if "_orig_mod" in name]
