"""Recipes in tokens: Table 7 of the paper, steps and rates that follow, accumulation, resume."""

from __future__ import annotations

import dataclasses
import json
import math
from types import SimpleNamespace

import pytest
import torch

from polyvision.cli import main
from polyvision.data.text.file import load_book
from polyvision.errors import PolyvisionError
from polyvision.training.config.compose import compose
from polyvision.training.loop.module import TaskModule
from polyvision.training.loop.optimization import build_optimizer, build_schedule
from polyvision.training.plan import count_steps
from polyvision.training.session import run_task
from polyvision.training.tasks.language import build_task

# Zhuo et al. 2024, https://arxiv.org/abs/2411.03884, Table 7, and text where it is named.
BOTH = {
    "optimizer": "adamw",
    "weight_decay": 0.1,
    "clip_grad": 1.0,
    "schedule": "cosine",
    "z_loss": 0.0,
    "schedule_tokens": None,
}
DENSE = BOTH | {"lr": 3e-4, "min_lr": 3e-5, "warmup_tokens": 620_000_000, "batch_tokens": 64 * 4096}
MOE = BOTH | {
    "lr": 4e-4,
    "min_lr": 5e-5,
    "batch_tokens": 1024 * 4096,
    "warmup_tokens": 2000 * 1024 * 4096,  # 2,000 steps
    "total_tokens": 200_000_000_000,
}
PAPER = {
    "polycom_1b": ("lm_1b3", DENSE | {"total_tokens": 250_000_000_000}),
    "polycom_502m": ("lm_502m", DENSE | {"total_tokens": 200_000_000_000}),
    "polycom_226m": ("lm_226m", DENSE | {"total_tokens": 200_000_000_000}),
    "polycom_110m": ("lm_110m", DENSE | {"total_tokens": 200_000_000_000}),
    "polycom_moe": ("lm_moe_1b7b", MOE),
}


# Table 1, whose loss is that of training, and Table 2, of C4: neither is val/loss.
PUBLISHED = {
    "polycom_1b": (
        "train/loss",
        {"polynorm": 2.17, "polyrelu": 2.17, "swiglu": 2.19, "gelu": 2.20, "relu": 2.21},
    ),
    "polycom_moe": ("val/c4/loss", {"polynorm": 2.71, "swiglu": 2.72}),
}


@pytest.mark.parametrize("name", PAPER)
def test_recipes_of_the_paper_key_by_key(name):
    (config,) = compose("language", [f"experiment={name}"])
    model, expected = PAPER[name]
    assert config.model.name == model
    assert {key: getattr(config.recipe, key) for key in expected} == expected
    assert config.recipe.optimizer_options["betas"] == [0.9, 0.95]
    assert (config.precision, config.data.name) == ("bf16", "shards")
    assert (config.model.init_std, config.model.tie_embeddings) == (None, False)
    if config.model.moe is not None:
        assert config.model.init_cutoff == 3.0
        assert (config.model.moe.load_balance, config.model.moe.router_z) == (0.01, 0.001)
    target = config.experiment.target
    assert (None if target is None else (target.metric, target.value)) == PUBLISHED.get(name)
    if target is not None:
        assert target.source.startswith({"polycom_1b": "Table 1", "polycom_moe": "Table 2"}[name])


def steps_of(*overrides, samples=1000, window=64):
    """Count the steps of a run on ``samples`` windows."""
    (config,) = compose("language", list(overrides))
    task = SimpleNamespace(tokens_per_sample=window)
    batch = 8
    if config.recipe.batch_tokens:
        batch = config.recipe.batch_tokens // window
    passes = range(samples // batch * config.recipe.accumulate)
    loader = SimpleNamespace(batch_size=batch // config.recipe.accumulate)
    loader = type("Loader", (), {"__len__": lambda _: len(passes), **vars(loader)})()
    return count_steps(config, loader, task)


def test_tokens_become_steps():
    steps = steps_of(
        "recipe.batch_tokens=1024",
        "recipe.accumulate=4",
        "recipe.total_tokens=100_000",
        "recipe.warmup_tokens=5_120",
        "recipe.schedule_tokens=200_000",
    )
    assert (steps.batch, steps.batch_per_device) == (16, 4)
    assert steps.total == 98  # 97.7 rounded up
    assert steps.warmup == 5
    assert steps.schedule == 196
    assert steps.epoch == 62  # whole batches of 16
    assert steps.epochs == 2


def test_tokens_may_be_written_as_powers_of_ten():
    (config,) = compose("language", ["recipe.total_tokens=2.5e9"])
    assert config.recipe.total_tokens == 2_500_000_000
    assert isinstance(config.recipe.total_tokens, int)
    with pytest.raises(PolyvisionError, match=r"warmup_tokens must be .*, got 1\.5"):
        compose("language", ["recipe.warmup_tokens=1.5"])


def test_without_tokens_epochs_count():
    steps = steps_of("recipe.epochs=3", "recipe.batch_size=8", "recipe.warmup_epochs=0.5")
    assert (steps.epoch, steps.total, steps.schedule, steps.epochs) == (125, 375, 375, 3)
    assert steps.warmup == 62.5
    shorter = steps_of("recipe.total_tokens=51_200", "trainer.max_steps=7", "recipe.batch_size=8")
    assert (shorter.total, shorter.schedule, shorter.epochs) == (7, 7, 1)


@pytest.fixture(scope="module")
def recipe():
    """The default recipe from 1 to 0.1."""
    (config,) = compose("language", [])
    return dataclasses.replace(config.recipe, lr=1.0, min_lr=0.1)


def rates(recipe, total, warmup, **changes):
    chosen = dataclasses.replace(recipe, **changes)
    optimizer = build_optimizer(torch.nn.Linear(2, 2), chosen, loss_scaling=False)
    schedule = build_schedule(
        optimizer, chosen, total_steps=total, epoch_steps=7, warmup_steps=warmup
    )

    def rate(step):
        schedule.step_update(step)
        return optimizer.param_groups[0]["lr"]

    return rate


def test_the_cosine_begins_after_the_warmup_and_ends_at_the_minimum(recipe):
    rate = rates(recipe, 100, 20.0, schedule_options={"warmup_prefix": True})
    for step in (0, 7, 20, 21, 60, 99, 100, 150):
        if step < 20:
            expected = 0.001 + 0.999 * step / 20
        else:
            expected = 0.55 + 0.45 * math.cos(math.pi * min(step - 20, 80) / 80)
        assert rate(step) == pytest.approx(expected), step
    assert rate(7) == pytest.approx(0.001 + 0.999 * 7 / 20)  # in any order: no state


def test_wsd_is_flat_until_its_last_part(recipe):
    rate = rates(
        recipe,
        100,
        10.0,
        schedule="wsd",
        schedule_options={"decay_epochs": 0.2, "decay_fn": "linear"},
    )
    assert rate(5) == pytest.approx(0.001 + 0.999 / 2)
    assert [rate(step) for step in (10, 50, 82)] == [1.0] * 3
    assert rate(91) == pytest.approx(0.55)  # half of the last 18 steps of 90
    assert rate(100) == pytest.approx(0.1)


def test_a_warmup_as_long_as_the_run(recipe):
    rate = rates(recipe, 10, 10.0, schedule_options={"warmup_prefix": True})
    assert rate(9) == pytest.approx(0.001 + 0.999 * 0.9)
    with pytest.raises(PolyvisionError, match=r"recipe\.schedule=wsd does not take"):
        rates(recipe, 10, 10.0, schedule="wsd", schedule_options={})


def test_a_batch_of_tokens_must_hold_whole_windows(train):
    with pytest.raises(PolyvisionError, match=r"batch_tokens=100 must be a multiple .* example 96"):
        train("language", "recipe.batch_tokens=100")
    with pytest.raises(PolyvisionError, match=r"batch_tokens=96 \(3 samples\) is the batch of one"):
        train("language", "recipe.batch_tokens=96", "recipe.accumulate=2")


def final_weights(folder):
    (path,) = folder.glob("**/last.ckpt")
    return torch.load(path, weights_only=True)["state_dict"]


def rows_of(folder):
    (path,) = folder.glob("**/metrics.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_one_pass_of_eight_equals_eight_of_one(train, tmp_path, capsys):
    common = [
        "recipe.batch_tokens=256",
        "recipe.total_tokens=700",
        "recipe.warmup_tokens=256",
        "data.val_fraction=0.02",
        "trainer.histograms=false",
    ]
    one = train("language", *common, f"run_root={tmp_path}/one")
    eight = train("language", *common, "recipe.accumulate=8", f"run_root={tmp_path}/eight")
    assert one["steps"] == eight["steps"] == 3
    assert one["last"]["val/loss"] == pytest.approx(eight["last"]["val/loss"], rel=1e-5)
    first, second = (final_weights(tmp_path / name) for name in ("one", "eight"))
    for key, value in first.items():
        torch.testing.assert_close(value, second[key], rtol=1e-4, atol=2e-5)
    assert "256 tokens a step, 768 in all" in capsys.readouterr().out
    rows = {row["step"]: row for row in rows_of(tmp_path / "one") if "train/loss" in row}
    assert [row["train/tokens"] for row in rows.values()] == [256, 512, 768]
    for row in rows.values():  # tokens are bytes here
        assert row["train/ppl"] == pytest.approx(math.exp(row["train/loss"]), rel=1e-5)
        assert row["train/bpb"] == pytest.approx(row["train/loss"] / math.log(2), rel=1e-5)
    accumulated = [
        row["train/tokens"] for row in rows_of(tmp_path / "eight") if "train/loss" in row
    ]
    assert accumulated[-1] == 768


def test_resume_is_bitwise_with_experts_a_mixture_and_accumulation(tmp_path, monkeypatch):
    """Killed in the middle of a step's passes, between two checkpoints, inside an epoch."""
    text = load_book()
    for name, start in (("a", 0), ("b", 6000)):
        (tmp_path / f"{name}.txt").write_text(text[start : start + 6000])
        command = ["prepare-text", str(tmp_path / f"{name}.txt"), "--tokenizer", "bytes"]
        options = ["--separator", "\n", "--workers", "1", "--out", str(tmp_path / "corpora" / name)]
        assert main([*command, *options]) == 0
    overrides = [
        "data=shards",
        f"data.path={tmp_path}/corpora",
        "data.mix.a=0.7",
        "data.mix.b=0.3",
        "data.workers=0",
        "model=moe_tiny",
        "model.context=16",
        "model.width=16",
        "model.layers=1",
        "model.heads=2",
        "model.ffn_hidden=24",
        "recipe.batch_tokens=128",
        "recipe.accumulate=4",
        "recipe.total_tokens=630",
        "recipe.warmup_tokens=256",
        "+recipe.schedule_options.warmup_prefix=true",
        "trainer.accelerator=cpu",
        "trainer.log_every_n_steps=1",
        "trainer.checkpoint_every_n_steps=2",
        "trainer.histograms=false",
    ]

    def train(*more):
        (config,) = compose("language", [*overrides, *more])
        return run_task(config, build_task)

    train(f"run_root={tmp_path}/whole")
    original, passes = TaskModule.training_step, []

    def failing(self, batch, batch_idx):
        passes.append(batch_idx)
        if len(passes) == 15:  # in step 3, from 0
            raise RuntimeError("killed")
        return original(self, batch, batch_idx)

    monkeypatch.setattr(TaskModule, "training_step", failing)
    with pytest.raises(RuntimeError, match="killed"):
        train(f"run_root={tmp_path}/broken")
    monkeypatch.setattr(TaskModule, "training_step", original)
    summary = train(f"run_root={tmp_path}/broken", "resume=auto")
    assert summary["steps"] == 5
    whole, broken = (final_weights(tmp_path / name) for name in ("whole", "broken"))
    assert all(torch.equal(value, broken[key]) for key, value in whole.items())
    tags = ("train/loss", "train/tokens", "optim/lr", "optim/grad_norm", "val/loss")
    for tag in tags:
        series = [
            [(r["step"], r[tag]) for r in rows_of(tmp_path / name) if tag in r]
            for name in ("whole", "broken")
        ]
        assert series[0] == series[1], tag
        assert series[0]
