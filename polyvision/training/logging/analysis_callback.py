"""Analyses of a model in training or after it; what they compute is in ``polyvision.analysis``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import default_collate

from polyvision.analysis.compare.reading import read_metrics
from polyvision.analysis.cost.report import analyse_cost
from polyvision.analysis.health.measure import gradient_norms, measure_health
from polyvision.analysis.health.report import health_result
from polyvision.analysis.rank import analyse_rank
from polyvision.analysis.result import Result
from polyvision.analysis.similarity import analyse_similarity
from polyvision.training.loading.loader import MapDataset
from polyvision.training.loading.workers import Collate
from polyvision.training.logging.console import tensorboard
from polyvision.training.logging.loggers import JsonLinesLogger
from polyvision.training.loop.module import TaskModule
from polyvision.training.loop.steps import FinishedStep, StepListener
from polyvision.training.loop.throughput import Throughput

__all__ = ["KINDS", "Analyses", "Probe", "analyse", "probe", "rank_history"]

KINDS = ("rank", "similarity", "cost", "health")
_RANK_TAG = re.compile(r"analysis/rank/(?!mean/)(.+)")

# Inputs and targets.
Probe = tuple[Tensor, Tensor]


def probe(samples: MapDataset, number: int, collate: Collate | None) -> Probe:
    """Return a batch of ``number`` samples, evenly spread over the data set.

    Evenly, since image folders are sorted by class.
    """
    number = min(number, len(samples))
    chosen = [samples[i * len(samples) // number] for i in range(number)]
    inputs, targets = (collate or default_collate)(chosen)
    return inputs, targets


def analyse(
    kind: str,
    module: TaskModule,
    batch: Probe,
    *,
    step: int,
    history: Mapping[int, Mapping[str, float]] | None = None,
    gradients: Mapping[str, float] | None = None,
    timed: bool = False,
) -> Result:
    """Run one analysis on the network of ``module``.

    Args:
        kind: one of ``KINDS``.
        module: the network and its loss.
        batch: inputs and targets, on the network's device.
        step: optimizer steps so far.
        history: earlier ranks, for their curves over training.
        gradients: norms by layer, for ``health``.
        timed: measure the times of ``cost``.
    """

    def evaluate() -> float:
        totals = {name: float(value) for name, value in module.count(batch).items()}
        return module.metrics(totals)["val/loss"]

    if kind == "rank":
        return analyse_rank(module.model, history, step)
    if kind == "similarity":
        return analyse_similarity(module.model, batch[0])
    if kind == "cost":
        return analyse_cost(module.model, batch[0], timed=timed)
    assert kind == "health", kind
    return health_result(measure_health(module.model, batch[0], evaluate, gradients))


def rank_history(metrics: Path) -> dict[int, dict[str, float]]:
    """Read the effective ranks that a run logged into its metrics.jsonl, by step."""
    history: dict[int, dict[str, float]] = {}
    series, _ = read_metrics(metrics)
    for tag, values in series.items():
        if found := _RANK_TAG.fullmatch(tag):
            for step, value in values.items():
                history.setdefault(step, {})[found[1]] = value
    return dict(sorted(history.items()))


class Analyses(StepListener):
    """Run analyses before training and after every ``every_n_steps`` optimizer steps.

    Each goes to TensorBoard, to metrics.jsonl, and as PNG and JSON into ``analysis/`` of the run
    folder. Gradient norms are those of the training step, before clipping. The training itself is
    not changed: the network runs in eval mode, without gradients, on validation samples.

    Args:
        folder: the run folder.
        batch: what the network is run on, the same each time.
        kinds: which analyses.
        every_n_steps: how often.
    """

    def __init__(
        self, folder: Path, batch: Probe, kinds: Sequence[str], every_n_steps: int
    ) -> None:
        self.folder = folder
        self.batch = batch
        self.kinds = list(dict.fromkeys(kinds))
        self.every_n_steps = every_n_steps
        self._gradients: dict[str, float] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look at the network before the first step."""
        if trainer.global_step == 0:
            self._run(trainer, pl_module)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Keep the gradient norms of a step that is followed by an analysis."""
        if (trainer.global_step + 1) % self.every_n_steps == 0 and "health" in self.kinds:
            assert isinstance(pl_module, TaskModule)
            self._gradients = gradient_norms(pl_module.model)

    def on_step_end(
        self, trainer: Trainer, pl_module: LightningModule, done: FinishedStep
    ) -> dict[str, float]:
        """Look at the network at every n-th step."""
        if done.step % self.every_n_steps == 0:
            self._run(trainer, pl_module)
        return {}

    def _run(self, trainer: Trainer, pl_module: LightningModule) -> None:
        step = trainer.global_step
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, Throughput):  # like validation, this is no training time
                callback.pause(pl_module.device)
        writer = tensorboard(trainer)
        if writer is None:
            return
        assert isinstance(pl_module, TaskModule)
        inputs, targets = (part.to(pl_module.device) for part in self.batch)
        for kind in self.kinds:
            with trainer.precision_plugin.forward_context():
                result = analyse(
                    kind,
                    pl_module,
                    (inputs, targets),
                    step=step,
                    history=rank_history(self.folder / "metrics.jsonl"),
                    gradients=self._gradients,
                )
            result.log(writer, step)
            result.save(self.folder / "analysis", f"{kind}-step{step:06}")
            for logger in trainer.loggers:
                if isinstance(logger, JsonLinesLogger):
                    logger.log_metrics(result.tags(), step)
