"""Find run folders and read them, whether the run has ended, broke, or is still going on."""

from __future__ import annotations

import dataclasses
import glob
import json
import math
import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from polyvision.errors import PolyvisionError

__all__ = ["Run", "Series", "find_runs", "read_metrics", "read_run"]

Series = dict[int, float]
_STATE_FILE = "state.json"


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run folder tells.

    Attributes:
        folder: where it lies.
        config: the resolved configuration, nested.
        environment: command, versions and hardware of the last process that wrote to it.
        act: the activation with its options, the name of its group.
        seed: the seed that pairs it with runs of other activations.
        status: ``finished``, ``running``, ``failed``, ``interrupted`` or ``killed``.
        error: what ended a failed run, or None.
        total_steps: optimizer steps of the whole run.
        resumed_at: steps from which it was resumed.
        monitor: the validation metric that decides which weights are best.
        parameters: number of parameters.
        activation_bytes: bytes kept for the backward pass of one batch, estimated.
        series: tag -> optimizer step -> value, steps ascending.
        unreadable_lines: lines of ``metrics.jsonl`` that hold no metrics, a torn last one aside.
    """

    folder: Path
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    act: str
    seed: int
    status: str
    error: str | None
    total_steps: int
    resumed_at: tuple[int, ...]
    monitor: str
    parameters: int
    activation_bytes: int
    series: Mapping[str, Series]
    unreadable_lines: int

    @property
    def name(self) -> str:
        """Activation and folder: what tells the runs of a comparison apart."""
        return f"{self.act}/{self.folder.name}"

    @property
    def step(self) -> int:
        """The last optimizer step of which anything is known."""
        return max((step for values in self.series.values() for step in values), default=0)

    @property
    def finished(self) -> bool:
        """Whether the run came to its planned end."""
        return self.status == "finished"


def find_runs(places: Sequence[str]) -> tuple[list[Path], list[Path]]:
    """Return the run folders that ``places`` name, and those that an older version left.

    Args:
        places: run folders, folders above them, or globs (``**`` for any depth).

    Returns:
        The run folders, and the folders with metrics but without a state.

    Raises:
        PolyvisionError: a place does not exist or holds no run.
    """
    found: dict[Path, None] = {}
    stateless: dict[Path, None] = {}
    for place in places:
        paths = [Path(path) for path in _expand(place)]
        if not paths:
            raise PolyvisionError(f"{place} does not exist: give run folders, such as runs/vision")
        inside = [folder for path in paths for folder in _below(path, _STATE_FILE)]
        older = [folder for path in paths for folder in _below(path, "metrics.jsonl")]
        if not inside:
            raise PolyvisionError(
                f"no run in {place}: a run folder holds config.yaml and {_STATE_FILE}. Give run "
                f"folders or folders above them, such as runs/vision"
            )
        found |= dict.fromkeys(inside)
        stateless |= dict.fromkeys(set(older) - set(inside))
    return list(found), sorted(stateless)


def _expand(place: str) -> list[str]:
    path = os.path.expanduser(place)
    if os.path.exists(path):
        return [path]
    found = glob.glob(path, recursive=True) if glob.has_magic(path) else []
    return sorted(found, key=_natural)


def _below(path: Path, name: str) -> list[Path]:
    """Return the folders in and under ``path`` that hold a configuration and the file ``name``."""
    files = sorted(path.rglob(name), key=_natural) if path.is_dir() else []
    return [file.parent for file in files if (file.parent / "config.yaml").is_file()]


def _natural(path: str | Path) -> list[str | int]:
    """Sort seed10 after seed9."""
    parts = re.split(r"(\d+)", str(path))
    return [int(part) if i % 2 else part for i, part in enumerate(parts)]


def read_run(folder: Path) -> Run:
    """Read one run folder.

    Raises:
        PolyvisionError: one of its files is damaged.
    """
    config = _load(folder / "config.yaml", yaml.safe_load)
    state = _load(folder / _STATE_FILE, json.loads)
    environment = folder / "environment.json"
    series, unreadable = read_metrics(folder / "metrics.jsonl")
    try:
        return Run(
            folder=folder,
            config=config,
            environment=_load(environment, json.loads) if environment.exists() else {},
            act=state["settings"]["act"],
            seed=state["settings"]["seed"],
            status=_status(state),
            error=state["error"],
            total_steps=state["total_steps"],
            resumed_at=tuple(state["resumed_at"]),
            monitor=state["monitor"],
            parameters=state["settings"]["parameters"],
            activation_bytes=state["activation_bytes"],
            series=series,
            unreadable_lines=unreadable,
        )
    except (KeyError, TypeError) as error:
        raise PolyvisionError(
            f"{folder / _STATE_FILE} is not the state of a run: {type(error).__name__} {error}"
        ) from error


def _load(path: Path, parse: Any) -> dict[str, Any]:
    try:
        content = parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise PolyvisionError(f"cannot read {path}: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise PolyvisionError(f"{path} is damaged: it holds no keys")
    return content


def _status(state: Mapping[str, Any]) -> str:
    """Return the recorded state, or ``killed`` where the process of a running one is gone."""
    status = str(state["state"])
    if status != "running" or state["host"] != socket.gethostname() or sys.platform == "win32":
        return status
    try:
        os.kill(int(state["process"]), 0)  # signal 0 only asks whether the process exists
    except ProcessLookupError:
        return "killed"
    except PermissionError:
        pass
    return status


def read_metrics(path: Path) -> tuple[dict[str, Series], int]:
    """Read JSON lines: tag -> step -> value, and the number of lines that hold none.

    A tag that comes back to an earlier step was resumed there: its later values are dropped. A
    last line that is torn is what a running or killed process leaves, and is passed over.
    """
    series: dict[str, Series] = {}
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    unreadable = 0
    for number, line in enumerate(lines, start=1):
        row = _row(line)
        if row is None:
            unreadable += number < len(lines)
            continue
        step = row.pop("step")
        for tag, value in row.items():
            _append(series.setdefault(tag, {}), int(step), value)
    return series, unreadable


def _row(line: str) -> dict[str, float] | None:
    try:
        row = json.loads(line)
        values = {str(tag): float(value) for tag, value in row.items()}
    except (ValueError, TypeError, AttributeError):
        return None
    return values if math.isfinite(values.get("step", math.nan)) else None


def _append(values: Series, step: int, value: float) -> None:
    while values and (last := next(reversed(values))) >= step:
        del values[last]
    values[step] = value
