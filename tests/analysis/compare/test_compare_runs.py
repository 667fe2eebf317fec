"""Runs that the trainers really made: finished, failed, resumed."""

import pytest

from polyvision.cli import main
from polyvision.data.text.file import load_book
from polyvision.training.config.compose import compose
from polyvision.training.loop.module import TaskModule
from polyvision.training.session import run_task
from polyvision.training.tasks.language import build_task


@pytest.fixture
def train(tmp_path):
    text = tmp_path / "book.txt"
    text.write_text(load_book()[:12000])
    overrides = [
        f"run_root={tmp_path}/runs",
        "trainer.accelerator=cpu",
        "data=text",
        f"data.path={text}",
        "data.tokenizer=bytes",
        "model.width=32",
        "model.layers=1",
        "model.heads=2",
        "model.ffn_hidden=96",
        "model.context=32",
        "recipe.batch_size=16",
        "trainer.max_steps=6",
        "trainer.val_every_n_steps=2",
        "trainer.checkpoint_every_n_steps=1",
        "trainer.log_every_n_steps=1",
        "trainer.histograms=false",
    ]

    def run(act, seed, *more):
        (config,) = compose("language", [*overrides, f"act={act}", f"seed={seed}", *more])
        return run_task(config, build_task)

    return run


@pytest.fixture
def report(tmp_path, capsys):
    def make():
        capsys.readouterr()
        assert main(["compare", str(tmp_path / "runs"), "--output", str(tmp_path / "out")]) == 0
        return capsys.readouterr().out

    return make


def test_runs_of_the_trainers_compare(train, report, monkeypatch):
    ends = {}
    for act in ("polynorm", "relu"):
        for seed in (0, 1):
            if (act, seed) != ("polynorm", 1):
                ends[act, seed] = train(act, seed)["last"]["val/loss"]

    original = TaskModule.training_step

    def failing(self, batch, batch_idx):
        if self.global_step == 3:
            raise RuntimeError("broken")
        return original(self, batch, batch_idx)

    monkeypatch.setattr(TaskModule, "training_step", failing)
    with pytest.raises(RuntimeError, match="broken"):
        train("polynorm", 1)
    printed = report()
    assert "polynorm/seed1 is failed at step 3 of 6 (RuntimeError: broken)." in printed
    difference = ends["polynorm", 0] - ends["relu", 0]
    assert f"| {difference:+.4f}" in printed
    assert "one pair: no interval" in printed

    monkeypatch.setattr(TaskModule, "training_step", original)
    ends["polynorm", 1] = train("polynorm", 1, "resume=auto")["last"]["val/loss"]
    printed = report()
    assert "All runs finished, and all seeds pair." in printed
    difference = sum(ends["polynorm", s] - ends["relu", s] for s in (0, 1)) / 2
    assert f"| {difference:+.4f}" in printed
    assert "| tokens per second" in printed
    assert "| polynorm   | 1    | finished | 6 of 6 | 3 " in printed
