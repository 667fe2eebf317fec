"""``state.json``: what a run is and how it stands, also for one that never came to an end."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from polyvision.training.run.folder import write_json

__all__ = ["track"]

_STATE_FILE = "state.json"


@contextmanager
def track(
    folder: Path, facts: Mapping[str, Any], first_step: int, step: Callable[[], int]
) -> Iterator[Callable[[BaseException], None]]:
    """Record a run as running while the block runs, and how it ended.

    A process that is killed records nothing: its state stays ``running``, and ``process`` and
    ``host`` tell whether that can be true.

    Args:
        folder: the run folder.
        facts: plain values to record beside the state.
        first_step: the step that the run goes on from; 0 for a new run.
        step: tells the current optimizer step.

    Yields:
        A function that records the run as failed, for one that cannot leave the block.
    """
    path = folder / _STATE_FILE
    resumed = [*_resumed(path), first_step] if first_step else []
    record: dict[str, Any] = {
        "state": "running",
        "error": None,
        "step": first_step,
        "resumed_at": resumed,
        "process": os.getpid(),
        "host": socket.gethostname(),
        **facts,
    }
    write_json(path, record)

    def failed(error: BaseException) -> None:
        kind = getattr(error, "kind", type(error).__name__)  # of another rank's error: its own
        text = " ".join((f"{kind}: {error}" if kind else str(error)).split())
        _record(path, record | {"state": "failed", "step": step(), "error": text})

    try:
        yield failed
    except (SystemExit, KeyboardInterrupt):
        _record(path, record | {"state": "interrupted", "step": step()})
        raise
    except BaseException as error:
        failed(error)
        raise
    write_json(path, record | {"state": "finished", "step": step()})


def _record(path: Path, record: Mapping[str, Any]) -> None:
    """Write the state unless the disk refuses: what ended the run is more than how it is recorded.

    Such a run looks killed.
    """
    with suppress(OSError):
        write_json(path, record)


def _resumed(path: Path) -> list[int]:
    """Return the steps that the run went on from before; none when the file is gone or damaged."""
    try:
        steps = list(map(int, json.loads(path.read_text(encoding="utf-8"))["resumed_at"]))
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return steps
