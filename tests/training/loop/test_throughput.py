"""Rates, waiting for data and time left, on a clock that only the test moves."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from polyvision.training.loading import loader as loader_module
from polyvision.training.loading.loader import TrainLoader
from polyvision.training.logging.console import Console
from polyvision.training.loop import throughput as throughput_module
from polyvision.training.loop.steps import FinishedStep
from polyvision.training.loop.throughput import Throughput


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(seconds=100.0)
    for module in (loader_module, throughput_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now.seconds))
    return now


def test_only_the_making_of_batches_counts_as_waiting(clock):
    class Slow:
        def __len__(self):
            return 10

        def __getitem__(self, index):
            clock.seconds += 1
            return index

    loader = TrainLoader(Slow(), 4, seed=0)
    for _ in loader:
        clock.seconds += 100
    assert loader.waited == 8


MODULE = SimpleNamespace(device=torch.device("cpu"))


def steps(throughput, clock, seconds, trainer, *, every=2, passes=1):
    """Take optimizer steps of so many seconds; returns what is logged after each that is due."""
    logged = []
    for duration in seconds:
        for _ in range(passes):
            throughput.on_train_batch_start(trainer, MODULE, None, 0)
            clock.seconds += duration / passes
        trainer.global_step += 1
        sums = SimpleNamespace(passes=passes)
        done = FinishedStep(trainer.global_step, trainer.global_step % every == 0, sums)
        values = throughput.on_step_end(trainer, MODULE, done)
        assert bool(values) == done.due
        logged += [values] if values else []
    return logged


@pytest.mark.parametrize("tokens", [None, 16])
def test_rates_shares_and_estimates(clock, tokens):
    waited = SimpleNamespace(seconds=0.0)
    measure = Throughput(4, tokens, 1e9, torch.float32, 10, lambda: waited.seconds)
    trainer = SimpleNamespace(global_step=0, world_size=1)
    assert measure.medians() == {}
    assert measure.line() == ""
    measure.on_train_start(trainer, MODULE)
    logged = steps(measure, clock, [5, 5], trainer)  # warm-up
    waited.seconds += 1
    logged += steps(measure, clock, [2, 2], trainer)
    measure.on_validation_start(trainer, MODULE)
    clock.seconds += 50  # validation
    logged += steps(measure, clock, [1, 1], trainer)
    assert [row["perf/samples_per_s"] for row in logged] == [0.8, 2, 4]
    assert [row["perf/data_wait"] for row in logged] == [0, 0.25, 0]
    assert [row["perf/eta_s"] for row in logged] == [40, 6 * 14 / 4, 4 * 66 / 6]
    medians = measure.medians()
    assert medians["perf/samples_per_s"] == 3
    assert medians["perf/data_wait"] == 0.125
    assert "perf/eta_s" not in medians
    assert ("perf/tokens_per_s" in medians) == (tokens is not None)
    unit = "4 samples/s" if tokens is None else "64 tokens/s"
    assert measure.line().startswith(f"{unit}  data wait 0%")


def test_rates_go_on_over_interruptions_and_ends_of_epochs(clock):
    """Whatever stops the training in the middle of an interval costs neither time nor samples."""
    waited = SimpleNamespace(seconds=0.0)
    measure = Throughput(4, None, 1e9, torch.float32, 100, lambda: waited.seconds)
    trainer = SimpleNamespace(global_step=0, world_size=1)
    measure.on_train_start(trainer, MODULE)
    clock.seconds += 30  # until the first batch
    stops = [
        lambda: measure.on_validation_start(trainer, MODULE),
        lambda: measure.on_save_checkpoint(trainer, MODULE, {}),
        lambda: measure.pause(MODULE.device),
    ]
    for stop in stops:
        assert steps(measure, clock, [2, 2, 2], trainer, every=9) in ([], measure.measured)
        stop()
        clock.seconds += 20
        stop()  # a save within a validation
        clock.seconds += 20
        clock.seconds += 3  # the next batch
        waited.seconds += 3
        measure.on_train_epoch_start(trainer, MODULE)
    (row,) = measure.measured
    assert row["perf/samples_per_s"] == 9 * 4 / (9 * 2 + 2 * 3)
    assert row["perf/data_wait"] == 2 * 3 / (9 * 2 + 2 * 3)


def test_rates_count_all_passes_of_a_step(clock):
    measure = Throughput(4, None, 1e9, torch.float32, 100, lambda: 0.0)
    trainer = SimpleNamespace(global_step=0, world_size=1)
    measure.on_train_start(trainer, MODULE)
    (row,) = steps(measure, clock, [6, 6], trainer, passes=3)
    assert row["perf/samples_per_s"] == 2 * 3 * 4 / 12


def test_mfu_is_the_flops_of_all_samples_by_the_peak_of_all_devices(clock, monkeypatch):
    monkeypatch.setattr(throughput_module, "get_available_flops", lambda *_: 1e10)
    measure = Throughput(4, 16, 3e9, torch.float32, 10, lambda: 0.0)
    trainer = SimpleNamespace(global_step=0, world_size=2)
    measure.on_train_start(trainer, MODULE)
    (row,) = steps(measure, clock, [2.0], trainer, every=1)
    assert row["perf/mfu"] == pytest.approx(2 * 3e9 / (2 * 1e10))  # 2 samples a second


def test_a_long_epoch_does_not_pass_in_silence(clock, monkeypatch, capsys):
    monkeypatch.setattr("polyvision.training.logging.console._QUIET_SECONDS", 0.0)
    measure = Throughput(4, None, 1e9, torch.float32, 10, lambda: 0.0)
    console = Console(measure, ["train/loss"], interactive=False)
    trainer = SimpleNamespace(
        global_step=0,
        world_size=1,
        is_global_zero=True,
        current_epoch=0,
        callback_metrics={"train/loss": 0.5},
    )
    measure.on_train_start(trainer, MODULE)
    steps(measure, clock, [2.0], trainer, every=1)
    console.on_step_end(trainer, None, None)
    line = capsys.readouterr().out
    assert line.startswith("epoch 1  step 1/10  train/loss 0.5000  2 samples/s  data wait 0%")
    assert line.rstrip().endswith("left 18.0 s")
