"""Where a run goes on: its last checkpoint that can be read, and whether it fits what runs now."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from polyvision.errors import PolyvisionError
from polyvision.training.checkpoint import AtomicCheckpointIO
from polyvision.training.run import Run
from polyvision.training.task import Task

__all__ = ["check_files", "place_in"]


def place_in(plan: Run) -> tuple[Run, int]:
    """Return the run with a checkpoint that is whole, and the step it goes on from; 0 for none.

    The last checkpoint may have been damaged since it was written: then it is the one before.

    Raises:
        PolyvisionError: there are checkpoints, and a run can go on from none.
    """
    if plan.checkpoint is None:
        return plan, 0
    try:
        return plan, _step_of(plan.checkpoint, plan)
    except PolyvisionError as error:
        if plan.checkpoint != plan.last or not plan.previous.exists():
            raise PolyvisionError(f"{error}. {_advice(plan)}") from error
        older = dataclasses.replace(plan, checkpoint=plan.previous)
        step = _step_of(plan.previous, plan)
        print(f"warning: {error}: going on from {plan.previous}, step {step}", file=sys.stderr)
        return older, step


def _step_of(checkpoint: Path, plan: Run) -> int:
    state = AtomicCheckpointIO().load_checkpoint(checkpoint)
    if not isinstance(state, dict) or "global_step" not in state:
        raise PolyvisionError(f"{checkpoint} is not the checkpoint of a run")
    if not state.get("optimizer_states"):
        raise PolyvisionError(f"{checkpoint} holds weights only, which no run can go on from")
    return int(state["global_step"])


def _advice(plan: Run) -> str:
    others = (plan.last, plan.previous)
    other = next((p for p in others if p.exists() and p != plan.checkpoint), None)
    if other is not None:
        return f"Try resume={other}"
    best = f", from its best weights with finetune={plan.best}" if plan.best.exists() else ""
    return f"Leave resume= out to start a new run{best}"


def check_files(plan: Run, task: Task) -> None:
    """Refuse to go on with other classes, or another tokenizer, than the weights have learned.

    Raises:
        PolyvisionError: a file of the run is not what the data gives now.
    """
    for name, text in task.files.items():
        path = plan.folder / name
        if plan.checkpoint is not None and path.is_file() and path.read_text() != text:
            raise PolyvisionError(
                f"cannot resume {plan.folder}: its {name} is not what the data gives now. Use the "
                f"same data, or leave resume= out to start a new run"
            )
