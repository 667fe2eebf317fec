"""An optimizer step is told once, whatever its passes: its loss, its row, what listens to it."""

from __future__ import annotations

import json
import math
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from polyvision.training.config.compose import compose
from polyvision.training.logging.activation_monitor import ActivationMonitor
from polyvision.training.loop.steps import FinishedStep, StepSums
from polyvision.training.session import run_task
from polyvision.training.tasks.language import LanguageModule
from polyvision.training.tasks.language import build_task as build_language_task
from polyvision.training.tasks.vision import VisionModule

ALONE = SimpleNamespace(world_size=1, strategy=SimpleNamespace(root_device=torch.device("cpu")))


def folder_of(tmp_path, name="seed0"):
    (found,) = tmp_path.glob(f"runs/*/*/*/*/{name}")
    return found


def rows_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def series(folder, tag):
    return [(row["step"], row[tag]) for row in rows_of(folder) if tag in row]


def totals(module, batches):
    """The sums of a step whose passes are these batches."""
    sums = StepSums()
    for batch in batches:
        sums.add(module.losses(batch)[1])
    assert sums.passes == len(batches)
    return FinishedStep(1, True, sums).totals(ALONE)


def two_ranks(tensor, reduce_op):
    assert reduce_op == "sum"
    return 2 * tensor


def test_sums_are_those_of_all_passes_and_ranks():
    sums = StepSums()
    sums.add({"a": torch.tensor([1.0, 2.0]), "n": 3})
    sums.add({"a": torch.tensor([10.0, 20.0]), "n": 4})
    strategy = SimpleNamespace(root_device=torch.device("cpu"), reduce=two_ranks)
    found = FinishedStep(1, True, sums).totals(SimpleNamespace(world_size=2, strategy=strategy))
    assert {name: value.tolist() for name, value in found.items()} == {"a": [22.0, 44.0], "n": 14.0}


def test_loss_of_images_is_the_mean_over_images_not_over_passes():
    (config,) = compose("vision", [])
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 4))
    module = VisionModule(model, config.recipe, classes=4, seed=0, total_steps=1, epoch_steps=1)
    images, labels = torch.randn(7, 3, 2, 2), torch.tensor([0, 1, 2, 3, 0, 1, 2])
    batches = [(images[part], labels[part]) for part in (slice(0, 5), slice(5, 7))]
    found = module.training_metrics(totals(module, batches), 1)
    expected = F.cross_entropy(model(images).double(), labels).item()
    assert found == {"train/loss": pytest.approx(expected, rel=1e-6)}


def mixture(overrides, *more):
    model = ["model=moe_tiny", "model.width=32", "model.layers=2", "model.heads=2"]
    model += ["model.ffn_hidden=32", "model.context=32", "model.moe.experts=8"]
    given = [o for o in overrides["language"] if not o.startswith("model")]
    (config,) = compose("language", [*given, *model, *more])
    task = build_language_task(config)
    module = task.module(task.model, config.recipe, seed=0, total_steps=1, epoch_steps=1)
    assert isinstance(module, LanguageModule)
    return module


def test_auxiliary_losses_have_tags_of_their_own(overrides):
    module = mixture(overrides, "recipe.z_loss=0.01", "model.moe.load_balance=0.5")
    tokens = torch.randint(256, (4, 33), generator=torch.Generator().manual_seed(0))
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    targets[0, :20] = -100  # the passes count different numbers of tokens
    batches = [(inputs[:2], targets[:2]), (inputs[2:], targets[2:])]
    with torch.no_grad():
        logits = module.model(inputs).double()
        minimised = module.loss((inputs, targets)).item()
        records = [module.model(*batch).routing for batch in batches]
    kept = targets != -100
    nats = F.cross_entropy(logits[kept], targets[kept]).item()
    z = logits[kept].logsumexp(-1).square().mean().item()
    found = totals(module, batches)
    metrics = module.training_metrics(found, step=3)
    assert metrics["train/loss"] == pytest.approx(nats, rel=1e-5)
    assert metrics["train/ppl"] == pytest.approx(math.exp(nats), rel=1e-5)
    assert metrics["train/bpb"] == pytest.approx(nats / math.log(2), rel=1e-5)
    assert metrics["train/z_loss"] == pytest.approx(z, rel=1e-3)
    assert metrics["train/tokens"] == 3 * tokens[:, 1:].numel()
    held_out = module.count((inputs, targets))
    assert module.metrics({n: float(v) for n, v in held_out.items()})["val/bpb"] == pytest.approx(
        metrics["train/bpb"], rel=1e-5
    )
    assert minimised > nats + 0.01 * z + 0.5  # a load balance of at least 1, times its weight
    for name in records[0]._fields:
        mean = sum(getattr(record, name) for record in records) / 2
        torch.testing.assert_close(
            found[f"routing/{name}"] / found["positions"], mean.double(), rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("more", [[], ["model=moe_tiny", "model.moe.experts=4"]])
def test_curves_do_not_depend_on_the_passes(more, train, tmp_path):
    steps = ["trainer.max_steps=4", "recipe.optimizer=sgd", "recipe.optimizer_options={}"]
    steps += ["recipe.z_loss=1e-4", *more, *(["model.moe.load_balance=0"] if more else [])]
    train("language", *steps)
    train("language", *steps, "recipe.accumulate=8")
    one, eight = folder_of(tmp_path), folder_of(tmp_path, "seed0-2")
    tags = ["train/loss", "train/ppl", "train/bpb", "train/tokens", "train/z_loss"]
    tags += ["optim/grad_norm", "optim/lr"]
    tags += ["train/router_z", "router/blocks.0/busiest", "router/blocks.0/idle"] if more else []
    for tag in tags:
        (steps, values), (expected_steps, expected) = (
            zip(*series(folder, tag), strict=True) for folder in (eight, one)
        )
        assert steps == expected_steps == (1, 2, 3, 4)
        assert values == pytest.approx(expected, rel=2e-4), tag


def test_a_row_comes_once_a_step_that_is_due_and_after_the_last(train, tmp_path):
    """Epochs of 9 steps: the interval of 12 goes on over their ends, and every row has rates."""
    more = ["trainer.max_steps=26", "trainer.max_epochs=3", "trainer.log_every_n_steps=12"]
    summary = train("vision", *more)
    rows = [row for row in rows_of(folder_of(tmp_path)) if "train/loss" in row]
    assert [row["step"] for row in rows] == [12, 24, 26]
    for tag in ("optim/lr", "optim/grad_norm", "perf/samples_per_s", "perf/data_wait"):
        assert all(tag in row for row in rows), tag
    assert summary["samples_per_s"] > 0
    assert summary["last"]["train/loss"] == pytest.approx(rows[-1]["train/loss"])


def test_a_run_shorter_than_the_interval_has_its_metrics_and_no_hint(overrides, tmp_path, capsys):
    (config,) = compose(
        "language", [*overrides["language"], "trainer.max_steps=3", "trainer.log_every_n_steps=100"]
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        summary = run_task(config, build_language_task)
    assert summary["samples_per_s"] > 0
    assert [step for step, _ in series(folder_of(tmp_path), "train/loss")] == [3]
    assert [str(w.message) for w in caught if "lightning" in w.filename] == []
    assert capsys.readouterr().err == ""


def test_an_analysis_is_not_repeated_by_a_resume(train, tmp_path, break_at):
    more = ["trainer.max_steps=4", "trainer.checkpoint_every_n_steps=2", "recipe.accumulate=2"]
    more += ["analysis.every_n_steps=2", "analysis.samples=4", "analysis.kinds=[health]"]
    more += ["trainer.histograms=false"]
    restore = break_at(3)
    with pytest.raises(RuntimeError, match="killed"):
        train("language", *more)
    restore()
    path = folder_of(tmp_path) / "analysis" / "health-step000002.json"
    before = path.stat().st_mtime_ns
    train("language", *more, "resume=auto")
    assert path.stat().st_mtime_ns == before
    tag = "analysis/health/blocks.0/grad_norm"
    assert [step for step, _ in series(folder_of(tmp_path), tag)] == [2, 4]


def test_histograms_are_those_of_the_main_validation_set():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    from polyvision.activations import create_activation

    model.append(create_activation("polynorm"))
    monitor = ActivationMonitor(histograms=True, total_steps=1, shown=[])
    module, trainer = SimpleNamespace(model=model), SimpleNamespace(is_global_zero=True)
    for number, value in ((0, 1.0), (1, 5.0)):  # two sets
        for batch_idx in range(2):
            monitor.on_validation_batch_start(trainer, module, None, batch_idx, number)
            model(torch.full((3, 2), value * (1 + batch_idx)))
            monitor.on_validation_batch_end(trainer)
    expected = model[0](torch.ones(3, 2))
    assert torch.equal(monitor._inputs["1"], expected.detach())
