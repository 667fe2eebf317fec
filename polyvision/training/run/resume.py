"""Where a run goes on: its last checkpoint that can be read, and whether it fits what runs now."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyvision.errors import PolyvisionError
from polyvision.models.trained.network import network_from_plain
from polyvision.models.weights.files import read_checkpoint
from polyvision.training.loading.loader import TrainLoader
from polyvision.training.run.folder import Run

__all__ = ["Place", "check_files", "compare_data", "find_checkpoint"]


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a run goes on.

    Attributes:
        step: the last optimizer step that is done.
        logged: bytes of its metrics.jsonl until there; None where a checkpoint does not tell.
    """

    step: int = 0
    logged: int | None = None


def find_checkpoint(plan: Run, accumulate: int) -> tuple[Run, Place]:
    """Return the run with a checkpoint that is whole, and the place it goes on from.

    The last checkpoint may have been damaged since it was written: then it is the one before.

    Args:
        plan: the run.
        accumulate: passes of an optimizer step from now on.

    Raises:
        PolyvisionError: there are checkpoints, and a run can go on from none.
    """
    if plan.checkpoint is None:
        return plan, Place()
    try:
        checkpoint, state = _state(plan.checkpoint)
    except PolyvisionError as error:
        raise PolyvisionError(f"{error}. {_advice(plan)}") from error
    plan = dataclasses.replace(plan, checkpoint=checkpoint)
    then = state.get("accumulate", accumulate)
    if then != accumulate:
        _say(
            f"note: recipe.accumulate was {then} and is {accumulate}. A step has the same samples "
            "in other passes: sums are rounded differently, dropout and mixing draw other numbers, "
            "batch norms see other batches"
        )
    logged = state.get("callbacks", {}).get("Checkpoints", {}).get("logged")
    return plan, Place(int(state["global_step"]), logged)


def _say(text: str) -> None:
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(text, file=sys.stderr, flush=True)


def _state(path: Path) -> tuple[Path, dict[str, Any]]:
    checkpoint, state = read_checkpoint(path, what="a checkpoint")
    if not state.get("optimizer_states"):
        raise PolyvisionError(f"{checkpoint} holds weights only, which no run can go on from")
    return checkpoint, state


def _advice(plan: Run) -> str:
    if plan.checkpoint not in (plan.last, plan.previous):
        return f"resume={plan.folder} goes on from the run's last checkpoint"
    best = f", from its best weights with finetune={plan.best}" if plan.best.exists() else ""
    return f"Leave resume= out to start a new run{best}"


def check_files(plan: Run, files: Mapping[str, str]) -> None:
    """Refuse to go on with other classes, another tokenizer, or another validation set.

    Raises:
        PolyvisionError: a file of the run is not what the data gives now.
    """
    for name, text in files.items():
        path = plan.folder / name
        if (
            plan.checkpoint is not None
            and path.is_file()
            and not _same(name, path.read_text(encoding="utf-8"), text)
        ):
            raise PolyvisionError(
                f"cannot resume {plan.folder}: its {name} is not what the data gives now. Use the "
                f"same data, or leave resume= out to start a new run"
            )


def compare_data(checkpoint: Path, loader: TrainLoader) -> None:
    """Refuse other data than that of the checkpoint.

    Raises:
        PolyvisionError: the data changed, or the checkpoint cannot be read.
    """
    _, state = _state(checkpoint)
    states = state["loops"]["fit_loop"]["state_dict"]["combined_loader"]
    for state in states:
        loader.load_state_dict(state)


def _same(name: str, before: str, now: str) -> bool:
    if name != "network.json":
        return before == now
    # An earlier version may not have written every option.
    old, new = (network_from_plain(json.loads(text), name) for text in (before, now))
    return old == new
