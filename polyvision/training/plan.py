"""What a run is going to do: its batches, its steps, and the lines that say so before it starts."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

from polyvision.analysis.cost.estimate import Cost
from polyvision.errors import PolyvisionError, unknown
from polyvision.output import count, plural, size
from polyvision.training.config.schema import (
    Config,
    LanguageRecipeConfig,
    VisionRecipeConfig,
)
from polyvision.training.loading.loader import TrainLoader
from polyvision.training.loading.workers import worker_count
from polyvision.training.loop.devices import Hardware
from polyvision.training.loop.optimization import learning_rate
from polyvision.training.run.folder import Run
from polyvision.training.tasks.task import Task

__all__ = ["Steps", "count_steps", "plan_rows", "target_text", "train_batches"]


@dataclasses.dataclass(frozen=True)
class Steps:
    """How the recipe's batch is split, and how many optimizer steps follow from it.

    Attributes:
        batch: samples of an optimizer step.
        batch_per_device: samples of one pass on one device.
        epoch: optimizer steps of an epoch.
        total: of the run.
        warmup: of the warm-up.
        schedule: of the schedule, warm-up included.
    """

    batch: int
    batch_per_device: int
    epoch: int
    total: int
    warmup: float
    schedule: int

    @property
    def epochs(self) -> int:
        """Epochs that the run begins."""
        return math.ceil(self.total / self.epoch)


def train_batches(config: Config, hardware: Hardware, task: Task) -> TrainLoader:
    """Build the loader of training batches: the recipe's batch, split over devices and passes.

    Raises:
        ValueError: the batch cannot be split so, or there are too few samples for one.
    """
    recipe = config.recipe
    key, path = config.data.location
    share = hardware.devices * recipe.accumulate
    batch = _step_samples(config, task)
    if batch % share:
        raise PolyvisionError(
            f"{_batch_text(config, task)} is the batch of one optimizer step; it must be "
            f"divisible by devices x recipe.accumulate = {hardware.devices} x {recipe.accumulate}"
        )
    return TrainLoader(
        task.train,
        batch // share,
        seed=config.seed,
        workers=worker_count(config.data.workers, hardware.devices),
        collate=task.collate,
        world_size=hardware.devices,
        repeats=recipe.repeats if isinstance(recipe, VisionRecipeConfig) else 1,
        accumulate=recipe.accumulate,
        place=f"{key}={Path(path).expanduser().absolute()}" if path else f"data={config.data.name}",
    )


def _step_samples(config: Config, task: Task) -> int:
    recipe, window = config.recipe, task.tokens_per_sample
    if not isinstance(recipe, LanguageRecipeConfig) or recipe.batch_tokens is None:
        return recipe.batch_size
    assert window is not None
    if recipe.lr_base_batch is not None:
        raise PolyvisionError(
            f"recipe.lr_base_batch={recipe.lr_base_batch} scales with recipe.batch_size, and "
            f"recipe.batch_tokens={recipe.batch_tokens} stands in its place: set one to null"
        )
    samples, rest = divmod(recipe.batch_tokens, window)
    if rest or not samples:
        near = window * max(1, round(recipe.batch_tokens / window))
        raise PolyvisionError(
            f"recipe.batch_tokens={recipe.batch_tokens} must be a multiple of the {window} tokens "
            f"of a window, for example {near}"
        )
    return samples


def _batch_text(config: Config, task: Task) -> str:
    recipe = config.recipe
    if isinstance(recipe, LanguageRecipeConfig) and recipe.batch_tokens is not None:
        return f"recipe.batch_tokens={recipe.batch_tokens} ({_step_samples(config, task)} samples)"
    return f"recipe.batch_size={recipe.batch_size}"


def count_steps(config: Config, loader: TrainLoader, task: Task) -> Steps:
    """Count the optimizer steps of an epoch, of the whole run, and of its schedule.

    Tokens are rounded up to whole steps; ``trainer.max_steps`` shortens the run, and the schedule
    with it unless that has a length of its own.
    """
    recipe = config.recipe
    batch = _step_samples(config, task)
    epoch = len(loader) // recipe.accumulate
    total = epoch * config.trainer.max_epochs
    warmup, schedule = recipe.warmup_epochs * epoch, None
    if isinstance(recipe, LanguageRecipeConfig):
        tokens = batch * (task.tokens_per_sample or 1)
        if recipe.total_tokens is not None:
            total = math.ceil(recipe.total_tokens / tokens)
        if recipe.warmup_tokens is not None:
            warmup = recipe.warmup_tokens / tokens
        if recipe.schedule_tokens is not None:
            schedule = math.ceil(recipe.schedule_tokens / tokens)
    if config.trainer.max_steps is not None:
        total = min(total, config.trainer.max_steps)
    return Steps(batch, loader.batch_size, epoch, total, warmup, schedule or total)


def plan_rows(
    config: Config, hardware: Hardware, task: Task, steps: Steps, cost: Cost, run: Run
) -> list[tuple[str, str]]:
    """Describe the run in labelled lines.

    Raises:
        PolyvisionError: the experiment's target is of a metric that the task does not have.
    """
    recipe = config.recipe
    batch = steps.batch_per_device
    weights = sum(p.numel() * p.element_size() for p in task.model.parameters())
    rate = f"{learning_rate(recipe):g}"
    if recipe.lr_base_batch is not None:
        rate += (
            f" = {recipe.lr:g} scaled ({recipe.lr_scaling}) from a batch of {recipe.lr_base_batch} "
            f"to {recipe.batch_size}"
        )
    average = f", average {recipe.ema_decay:g}" if recipe.ema_decay else ""
    clip = "none" if recipe.clip_grad is None else f"{recipe.clip_grad:g}"
    warmup = min(steps.warmup, steps.schedule)
    last = f"{plural(steps.total, 'optimizer step')} of {plural(steps.batch, 'sample')}, "
    last += f"{steps.epoch:,} an epoch"
    if task.tokens_per_sample is not None:
        tokens = steps.batch * task.tokens_per_sample
        last += f"; {count(tokens)} tokens a step, {count(tokens * steps.total)} in all"
    return [
        *_experiment_rows(config, task),
        *task.plan,
        (
            "recipe",
            f"{recipe.name}: {recipe.optimizer}, lr {rate} ({recipe.schedule} to "
            f"{recipe.min_lr:g} over {steps.schedule:,} steps, {warmup:,.0f} of warm-up), "
            f"weight decay {recipe.weight_decay:g}, clip {clip}{average}",
        ),
        ("steps", last),
        ("loading", _loading(worker_count(config.data.workers, hardware.devices))),
        ("device", hardware.device_text),
        ("precision", hardware.precision_text),
        (
            "cost",
            f"{count(3 * cost.flops / batch)}FLOP a sample forward and backward; memory about "
            f"{size(weights)} weights, {size(cost.saved_bytes)} activations a batch of {batch}",
        ),
        ("seed", str(config.seed)),
        (
            "run folder",
            f"{run.folder}" + (f" (goes on from {run.checkpoint})" if run.checkpoint else ""),
        ),
    ]


def _loading(workers: int) -> str:
    if not workers:
        return "by the training process itself"
    return f"{workers} worker process{'es' if workers > 1 else ''} a device"


def target_text(config: Config, task: Task) -> str | None:
    """Say what the experiment's source publishes for this activation; None where it states nothing.

    Raises:
        PolyvisionError: the metric is none of this task, on whatever validation set.
    """
    if config.experiment is None or config.experiment.target is None:
        return None
    target = config.experiment.target
    logged = [*task.shown, "train/loss"]
    name = target.metric.rpartition("/")[2]
    if name not in {tag.rpartition("/")[2] for tag in logged}:
        raise unknown("experiment.target.metric", target.metric, logged)
    return target.text(config.act.label, logged)


def _experiment_rows(config: Config, task: Task) -> list[tuple[str, str]]:
    if config.experiment is None:
        return []
    text = target_text(config, task) or "none stated"
    return [("experiment", config.experiment.name), ("target", text)]
