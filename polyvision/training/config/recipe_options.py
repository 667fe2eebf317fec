"""Options of optimizers and schedules: those that nothing would read are refused."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from polyvision.errors import PolyvisionError, did_you_mean

__all__ = ["check_optimizer_options", "check_schedule_options"]

# The recipe has keys of its own for these.
_OWN = {"params", "lr", "weight_decay", "self"}
# A recipe has them for its own optimizer; timm leaves them out for one that does not.
_DROPPED = {"betas", "eps", "momentum"}

_ALL = {"warmup_prefix", "noise", "noise_pct", "noise_std", "noise_seed"}
_CYCLES = {"cycle_mul", "cycle_decay", "cycle_limit"}
# What timm's create_scheduler_v2 reads for each schedule; it takes the rest and ignores it.
_SCHEDULES = {
    "cosine": _ALL | _CYCLES | {"k_decay"},
    "poly": _ALL | _CYCLES | {"k_decay", "decay_rate"},
    "step": _ALL | {"decay_epochs", "decay_rate"},
    "multistep": _ALL | {"decay_milestones", "decay_rate"},
    "wsd": _ALL | {"decay_epochs", "decay_fn"},
    "constant": _ALL,
}


def check_optimizer_options(
    optimizer: str, options: Mapping[str, Any], constructor: inspect.Signature
) -> None:
    """Refuse ``recipe.optimizer_options`` that the optimizer's constructor does not have.

    Raises:
        PolyvisionError: the first such option, with those that there are.
    """
    parameters = constructor.parameters
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        given = [key for key in options if key not in _DROPPED]
        _check("optimizer", optimizer, given, set(parameters) - _OWN)


def check_schedule_options(schedule: str, options: Mapping[str, Any]) -> None:
    """Refuse ``recipe.schedule_options`` that the schedule does not read.

    Raises:
        PolyvisionError: the first such option, with those that there are.
    """
    _check("schedule", schedule, options, _SCHEDULES[schedule])


def _check(kind: str, choice: str, options: Iterable[str], valid: set[str]) -> None:
    for key in options:
        if key not in valid:
            place = f"recipe.{kind}_options.{key}"
            raise PolyvisionError(
                f"{place}: recipe.{kind}={choice} does not read it.{did_you_mean(key, valid)} "
                f"Valid: {', '.join(sorted(valid))}. Take it out with ~{place}"
            )
