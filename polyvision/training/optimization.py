"""Optimizer and schedule: timm's, with weight decay kept off everything that must not shrink."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from timm.optim import create_optimizer_v2, get_optimizer_class, list_optimizers
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from torch import nn

from polyvision.activations import activation_modules
from polyvision.errors import PolyvisionError, unknown
from polyvision.training.schema import RecipeConfig

__all__ = ["build_optimizer", "build_schedule", "parameter_groups"]


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Split the trainable parameters into decayed and not decayed ones.

    Not decayed: everything of at most one dimension (biases, norms), and every coefficient of an
    activation whatever its shape; decay would pull learned functions towards zero.
    """
    coefficients = {
        id(p) for module in activation_modules(model).values() for p in module.parameters()
    }
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            plain = parameter.ndim > 1 and id(parameter) not in coefficients
            (decayed if plain else kept).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": kept, "weight_decay": 0.0},
    ]
    return [g for g in groups if g["params"]]


def build_optimizer(
    model: nn.Module, recipe: RecipeConfig, *, loss_scaling: bool
) -> torch.optim.Optimizer:
    """Build the recipe's optimizer by its timm name.

    Torch's fused implementation is used where there is one, except under loss scaling, where it
    would unscale the gradients by itself and make clipping wrong.

    Raises:
        ValueError: unknown optimizer, or options that it does not take.
    """
    names = [str(name) for name in list_optimizers()]
    if recipe.optimizer not in names:
        raise unknown("recipe.optimizer", recipe.optimizer, names)
    options = dict(recipe.optimizer_options)
    constructor = inspect.signature(get_optimizer_class(recipe.optimizer))
    if "fused" in constructor.parameters and not loss_scaling:
        options.setdefault("fused", True)
    try:
        return create_optimizer_v2(
            parameter_groups(model, recipe.weight_decay),
            opt=recipe.optimizer,
            lr=recipe.lr,
            weight_decay=recipe.weight_decay,
            **options,
        )
    except (TypeError, ValueError) as error:
        raise PolyvisionError(
            f"recipe.optimizer={recipe.optimizer} does not take recipe.optimizer_options="
            f"{recipe.optimizer_options}: {error}"
        ) from error


def build_schedule(
    optimizer: torch.optim.Optimizer,
    recipe: RecipeConfig,
    *,
    total_steps: int,
    epoch_steps: int,
    warmup_steps: float | None = None,
) -> Scheduler:
    """Build the recipe's schedule over ``total_steps`` optimizer steps.

    It holds no state of its own: ``step_update(n)`` sets the rates of step n. Times in
    ``recipe.schedule_options`` (``decay_epochs``, ``decay_milestones``) are in epochs. With
    ``warmup_prefix`` among them, what follows the warm-up begins at its own start; without, where
    it would be by then.

    Args:
        optimizer: whose rates are set.
        recipe: the schedule.
        total_steps: its end.
        epoch_steps: optimizer steps of an epoch.
        warmup_steps: of the linear warm-up; None for ``recipe.warmup_epochs``.

    Raises:
        ValueError: options that the schedule does not take.
    """
    epochs = total_steps / epoch_steps
    warmup = recipe.warmup_epochs if warmup_steps is None else warmup_steps / epoch_steps
    warmup = min(warmup, epochs)
    prefix = bool(recipe.schedule_options.get("warmup_prefix"))
    after = max(epochs - warmup, 1 / epoch_steps) if prefix else epochs
    create: Callable[..., tuple[Scheduler, int]] = create_scheduler_v2  # takes parts of epochs too
    try:
        scheduler, _ = create(
            optimizer,
            sched=recipe.schedule,
            num_epochs=after,
            warmup_epochs=warmup,
            warmup_lr=recipe.lr * 1e-3,
            min_lr=recipe.min_lr,
            step_on_epochs=False,
            updates_per_epoch=epoch_steps,
            **recipe.schedule_options,
        )
    except (TypeError, ValueError) as error:
        raise PolyvisionError(
            f"recipe.schedule={recipe.schedule} does not take recipe.schedule_options="
            f"{recipe.schedule_options}: {error}"
        ) from error
    return scheduler
