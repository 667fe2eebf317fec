"""Optimizer and schedule: timm's, with weight decay kept off everything that must not shrink."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from timm.models import group_parameters
from timm.optim import create_optimizer_v2, get_optimizer_class, list_optimizers
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from torch import nn

from polyvision.activations import activation_modules
from polyvision.errors import PolyvisionError, unknown
from polyvision.training.config.recipe_options import check_optimizer_options
from polyvision.training.config.schema import RecipeConfig

__all__ = ["build_optimizer", "build_schedule", "learning_rate", "parameter_groups"]


def learning_rate(recipe: RecipeConfig) -> float:
    """Return the peak rate of the batch: lr, or lr f or lr sqrt(f) where f = batch / base batch.

    Sources: linear, Goyal et al. 2017, https://arxiv.org/abs/1706.02677; the square root is usual
    for adaptive optimizers such as LAMB, You et al. 2019, https://arxiv.org/abs/1904.00962.

    Raises:
        PolyvisionError: the square root of nothing is asked for.
    """
    if recipe.lr_base_batch is None:
        if recipe.lr_scaling != "linear":
            raise PolyvisionError(
                f"recipe.lr_scaling={recipe.lr_scaling} needs recipe.lr_base_batch, the batch that "
                f"recipe.lr is meant for, and that is null"
            )
        return recipe.lr
    factor = recipe.batch_size / recipe.lr_base_batch
    return recipe.lr * (math.sqrt(factor) if recipe.lr_scaling == "sqrt" else factor)


def parameter_groups(
    model: nn.Module,
    weight_decay: float,
    *,
    decay_norm_and_bias: bool = False,
    layer_decay: float = 1.0,
) -> list[dict[str, Any]]:
    """Split the trainable parameters into decayed and not decayed ones, and by rate.

    Not decayed: every coefficient of an activation whatever its shape, since decay would pull
    learned functions towards zero; and everything of at most one dimension (biases, norms), unless
    ``decay_norm_and_bias``. With ``layer_decay`` d < 1 a group's ``lr_scale`` is d^k, k layers
    below the head (Clark et al. 2020, https://arxiv.org/abs/2003.10555).

    Raises:
        ValueError: ``layer_decay`` for a network without layers that timm knows of.
    """
    coefficients = _coefficients(model)
    scales = _layer_scales(model, layer_decay, coefficients)
    groups: dict[tuple[bool, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            may = decay_norm_and_bias or parameter.ndim > 1
            decayed = may and id(parameter) not in coefficients
            groups.setdefault((decayed, scales.get(name, 1.0)), []).append(parameter)
    return [
        {"params": groups[key], "weight_decay": weight_decay if key[0] else 0.0}
        | ({"lr_scale": key[1]} if scales else {})
        for key in sorted(groups, reverse=True)
    ]


def _coefficients(model: nn.Module) -> set[int]:
    modules = activation_modules(model).values()
    return {id(parameter) for module in modules for parameter in module.parameters()}


def _layer_scales(model: nn.Module, decay: float, coefficients: set[int]) -> dict[str, float]:
    """Map each parameter to its share of the rate; coefficients have that of the one before."""
    if decay == 1:
        return {}
    matcher: Any = getattr(model, "group_matcher", None)
    if matcher is None:
        raise PolyvisionError(
            f"recipe.layer_decay={decay:g} needs to know the layers of {type(model).__name__}, and "
            f"it has no group_matcher, as most networks of timm have: use 1.0"
        )
    layers = group_parameters(model, matcher(coarse=False), reverse=True)
    last = max(layers.values())
    scales: dict[str, float] = {}
    before = 0
    for name, parameter in model.named_parameters():
        before = before if id(parameter) in coefficients else layers.get(name, last)
        scales[name] = decay ** (last - before)
    return scales


def build_optimizer(
    model: nn.Module, recipe: RecipeConfig, *, loss_scaling: bool
) -> torch.optim.Optimizer:
    """Build the recipe's optimizer by its timm name.

    Torch's fused implementation is used where there is one, except under loss scaling, where it
    would unscale the gradients by itself and make clipping wrong.

    Raises:
        ValueError: unknown optimizer, options that it does not take, or a schedule that would rise.
    """
    names = [str(name) for name in list_optimizers()]
    if recipe.optimizer not in names:
        raise unknown("recipe.optimizer", recipe.optimizer, names)
    rate = learning_rate(recipe)
    if recipe.schedule != "constant" and recipe.min_lr > rate:
        raise PolyvisionError(
            f"recipe.min_lr={recipe.min_lr:g} is above the rate, {rate:g}, so the schedule would "
            f"rise: lower recipe.min_lr with recipe.lr"
        )
    options = dict(recipe.optimizer_options)
    constructor = inspect.signature(get_optimizer_class(recipe.optimizer))
    check_optimizer_options(recipe.optimizer, recipe.optimizer_options, constructor)
    if "fused" in constructor.parameters and not loss_scaling:
        options.setdefault("fused", True)
    groups = parameter_groups(
        model,
        recipe.weight_decay,
        decay_norm_and_bias=recipe.decay_norm_and_bias,
        layer_decay=recipe.layer_decay,
    )
    try:
        return create_optimizer_v2(
            groups,
            opt=recipe.optimizer,
            lr=rate,
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
    """
    epochs = total_steps / epoch_steps
    warmup = recipe.warmup_epochs if warmup_steps is None else warmup_steps / epoch_steps
    warmup = min(warmup, epochs)
    prefix = bool(recipe.schedule_options.get("warmup_prefix"))
    after = max(epochs - warmup, 1 / epoch_steps) if prefix else epochs
    start = learning_rate(recipe) * 1e-3 if recipe.warmup_lr is None else recipe.warmup_lr
    create: Callable[..., tuple[Scheduler, int]] = create_scheduler_v2  # takes parts of epochs too
    try:
        scheduler, _ = create(
            optimizer,
            sched=recipe.schedule,
            num_epochs=after,
            warmup_epochs=warmup,
            warmup_lr=start,
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
