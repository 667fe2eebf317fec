"""What a run is going to do: its batches, its steps, and the lines that say so before it starts."""

from __future__ import annotations

import dataclasses
import math

from polyvision.errors import PolyvisionError, unknown
from polyvision.training.cost import Cost
from polyvision.training.hardware import Hardware
from polyvision.training.loader import TrainLoader
from polyvision.training.optimization import learning_rate
from polyvision.training.report import count, size
from polyvision.training.run import Run
from polyvision.training.schema import Config, ExperimentConfig, VisionRecipeConfig
from polyvision.training.task import Task

__all__ = ["Steps", "count_steps", "plan_rows", "train_batches"]


@dataclasses.dataclass(frozen=True)
class Steps:
    """How the recipe's batch is split, and how many optimizer steps follow from it."""

    batch_per_device: int
    epoch: int
    total: int


def train_batches(config: Config, hardware: Hardware, task: Task) -> TrainLoader:
    """Build the loader of training batches: the recipe's batch, split over devices and passes.

    Raises:
        ValueError: the batch cannot be split so, or there are too few samples for one.
    """
    recipe = config.recipe
    share = hardware.devices * recipe.accumulate
    if recipe.batch_size % share:
        raise PolyvisionError(
            f"recipe.batch_size={recipe.batch_size} is the batch of one optimizer step; it must be "
            f"divisible by devices x recipe.accumulate = {hardware.devices} x {recipe.accumulate}"
        )
    return TrainLoader(
        task.train,
        recipe.batch_size // share,
        seed=config.seed,
        workers=config.data.workers,
        collate=task.collate,
        world_size=hardware.devices,
        repeats=recipe.repeats if isinstance(recipe, VisionRecipeConfig) else 1,
    )


def count_steps(config: Config, loader: TrainLoader) -> Steps:
    """Count the optimizer steps of an epoch and of the whole run."""
    epoch = math.ceil(len(loader) / config.recipe.accumulate)
    total = epoch * config.trainer.max_epochs
    if config.trainer.max_steps is not None:
        total = min(total, config.trainer.max_steps)
    return Steps(loader.batch_size, epoch, total)


def plan_rows(
    config: Config, hardware: Hardware, task: Task, steps: Steps, cost: Cost, run: Run
) -> list[tuple[str, str]]:
    """Describe the run in labelled lines.

    Raises:
        ValueError: the experiment's target is a metric that the run does not have.
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
    last = (
        f"{steps.total:,} optimizer steps of {recipe.batch_size} samples, {steps.epoch:,} an epoch"
    )
    return [
        *_experiment_rows(config.experiment, task),
        *task.plan,
        (
            "recipe",
            f"{recipe.name}: {recipe.optimizer}, lr {rate} ({recipe.schedule}), "
            f"weight decay {recipe.weight_decay:g}, clip {clip}{average}",
        ),
        ("steps", last),
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


def _experiment_rows(experiment: ExperimentConfig | None, task: Task) -> list[tuple[str, str]]:
    if experiment is None:
        return []
    target = experiment.target
    if target is None:
        return [("experiment", experiment.name), ("target", "none stated")]
    if target.metric not in task.shown:
        raise unknown("experiment.target.metric", target.metric, task.shown)
    return [("experiment", experiment.name), ("target", str(target))]
