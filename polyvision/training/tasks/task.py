"""What a domain, images or text, contributes to a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from lightning.pytorch import Callback
from torch import Tensor, nn

from polyvision.data.images.skips import SkippedImages
from polyvision.errors import PolyvisionError
from polyvision.training.config.schema import RecipeConfig
from polyvision.training.loading.loader import MapDataset, OrderedSamples
from polyvision.training.loading.workers import Collate
from polyvision.training.loop.averaging import averaged_tag
from polyvision.training.loop.module import TaskModule

__all__ = ["Task", "follow_average"]


def _nothing() -> None:
    pass


@dataclasses.dataclass(frozen=True)
class Task:
    """What a domain contributes to a run.

    Attributes:
        model: the network.
        module: builds the Lightning module from (model, recipe, seed=, total_steps=, epoch_steps=).
        train: training samples.
        val: validation samples.
        plan: labelled lines about model, activation and data.
        monitor: the validation metric that decides which weights are best; its direction is in
            ``polyvision.analysis.metrics``.
        shown: the validation metrics printed, in order.
        make_input: makes the model's input for a number of samples.
        collate: joins samples to a batch; None for torch's default.
        tokens_per_sample: tokens of a sample; None for images.
        callbacks: further callbacks.
        files: text files for the run folder, by name.
        check: looks quickly at the files of validation, and raises an error if some are damaged.
        skipped: training files left out because they cannot be read; None where none can be.
        named_val: further validation sets; the metrics of one are ``val/<name>/...``.
    """

    model: nn.Module
    module: Callable[..., TaskModule]
    train: MapDataset | OrderedSamples
    val: MapDataset
    plan: list[tuple[str, str]]
    monitor: str
    shown: list[str]
    make_input: Callable[[int], Tensor]
    collate: Collate | None = None
    tokens_per_sample: int | None = None
    callbacks: list[Callback] = dataclasses.field(default_factory=list)
    files: dict[str, str] = dataclasses.field(default_factory=dict)
    check: Callable[[], None] = _nothing
    skipped: SkippedImages | None = None
    named_val: dict[str, MapDataset] = dataclasses.field(default_factory=dict)


def follow_average(task: Task, recipe: RecipeConfig) -> Task:
    """Let ``best`` follow the averaged weights, and show both, where the recipe averages.

    Raises:
        PolyvisionError: a warm-up of no average.
    """
    if recipe.ema_decay is None:
        if recipe.ema_warmup:
            raise PolyvisionError("recipe.ema_warmup=true needs recipe.ema_decay, and that is null")
        return task
    averaged = averaged_tag(task.monitor)
    return dataclasses.replace(task, monitor=averaged, shown=[*task.shown, averaged])
