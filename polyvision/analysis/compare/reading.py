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
from typing import Any, TypeVar

import yaml

from polyvision.errors import PolyvisionError

__all__ = ["Run", "Series", "find_runs", "read_metrics", "read_run"]

Series = dict[int, float]
_STATE_FILE = "state.json"
_T = TypeVar("_T")


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
    found: dict[Path, Path] = {}  # by the real path, however often and in whatever way it is named
    stateless: dict[Path, Path] = {}
    for place in places:
        paths = [Path(path) for path in _expand(place)]
        if not paths:
            what = f"nothing matches {place}" if glob.has_magic(place) else f"no folder {place!r}"
            raise PolyvisionError(f"{what}: give run folders, such as runs/vision")
        inside = [folder for path in paths for folder in _below(path, _STATE_FILE)]
        older = [folder for path in paths for folder in _below(path, "metrics.jsonl")]
        if not inside:
            raise PolyvisionError(
                f"no run in {place}: a run folder holds config.yaml and {_STATE_FILE}. Give run "
                f"folders or folders above them, such as runs/vision"
            )
        for known, folders in ((found, inside), (stateless, sorted(set(older) - set(inside)))):
            for folder in folders:
                known.setdefault(folder.resolve(), folder)
    return list(found.values()), list(stateless.values())


def _expand(place: str) -> list[str]:
    path = os.path.expanduser(place)
    if os.path.exists(path):
        return [path]
    found = glob.glob(path, recursive=True) if glob.has_magic(path) else []
    return sorted(found, key=_natural)


def _below(path: Path, name: str) -> list[Path]:
    """Return the folders in and under ``path`` that hold a configuration and the file ``name``.

    Links are followed, unlike by ``rglob``; each real folder is entered once.
    """
    holders, entered = [], set()
    for folder, inner, files in os.walk(path, followlinks=True):
        real = os.path.realpath(folder)
        if real in entered:
            inner.clear()
        elif name in files and "config.yaml" in files:
            holders.append(Path(folder))
        entered.add(real)
    return sorted(holders, key=_natural)


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
    for group in ("model", "data", "recipe"):
        if not isinstance(config.get(group), dict) or "name" not in config[group]:
            raise PolyvisionError(f"{folder / 'config.yaml'} is damaged: it has no {group}.name")
    try:
        settings = state["settings"]
        return Run(
            folder=folder,
            config=config,
            environment=_load(environment, json.loads) if environment.exists() else {},
            act=_typed(settings, "act", str),
            seed=_typed(settings, "seed", int),
            status=_status(state),
            error=state["error"],
            total_steps=_typed(state, "total_steps", int),
            resumed_at=tuple(state["resumed_at"]),
            monitor=_typed(state, "monitor", str),
            parameters=_typed(settings, "parameters", int),
            activation_bytes=_typed(state, "activation_bytes", int),
            series=series,
            unreadable_lines=unreadable,
        )
    except (KeyError, TypeError) as error:
        raise PolyvisionError(
            f"{folder / _STATE_FILE} is not the state of a run: {type(error).__name__} {error}"
        ) from error


def _typed(record: Mapping[str, Any], key: str, kind: type[_T]) -> _T:
    value = record[key]
    if not isinstance(value, kind):
        raise TypeError(f"{key} is {value!r}")
    return value


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
        os.kill(_typed(state, "process", int), 0)  # signal 0 only asks whether the process exists
    except ProcessLookupError:
        return "killed"
    except PermissionError:
        pass
    return status


def read_metrics(path: Path) -> tuple[dict[str, Series], int]:
    """Read JSON lines: tag -> step -> value, and the number of lines that hold none.

    A tag that comes back to an earlier step was resumed there: its later values are dropped. A
    last line that is torn is what a running or killed process leaves, and is passed over.

    Raises:
        PolyvisionError: the file is there and cannot be read.
    """
    series: dict[str, Series] = {}
    try:
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    except OSError as error:
        raise PolyvisionError(f"cannot read {path}: {error.strerror}") from error
    lines = text.splitlines()
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
    return values if 0 <= values.get("step", math.nan) < math.inf else None


def _append(values: Series, step: int, value: float) -> None:
    while values and (last := next(reversed(values))) >= step:
        del values[last]
    values[step] = value
