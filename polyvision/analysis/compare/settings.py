"""Whether runs may be compared: everything but activation and seed must be the same."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from polyvision.analysis.compare.reading import Run
from polyvision.errors import PolyvisionError, unknown

__all__ = ["STEPS", "check_alike", "flatten"]

# What does not touch the result; a group stands for all its keys.
_FREE = frozenset(
    {
        "act",
        "analysis",
        "seed",
        "experiment.target",
        "run_root",
        "resume",
        "dry_run",
        "data.workers",
        "trainer.accelerator",
        "trainer.devices",
        "trainer.log_every_n_steps",
        "trainer.checkpoint_every_n_steps",
        "trainer.histograms",
    }
)
# Runs that differ in one of these are not of one comparison, and differ in dozens of keys.
_WHAT_IT_TRAINS = ("task", "data.name", "model.name")
# The planned number of optimizer steps; it follows from the configuration and the data.
STEPS = "steps"
_ABSENT = "(absent)"
# Of environment.json, what may explain a difference in speed or in the last digits.
_SURROUNDINGS = ("polyvision", "torch", "platform", "threads", "gpus", "git")


def check_alike(runs: Sequence[Run], allow: Sequence[str] = ()) -> list[str]:
    """Refuse runs whose settings differ, and say what differs although it was allowed.

    Args:
        runs: the runs of all activations.
        allow: keys that may differ; a group, such as ``recipe``, stands for all its keys.

    Returns:
        One sentence for each allowed difference and each difference in the surroundings.

    Raises:
        PolyvisionError: another key differs; the text names keys, values and runs, or the folders
            where model or data differ. Or ``allow`` names no key of these runs.
    """
    settings = [flatten(run.config) | {STEPS: run.total_steps} for run in runs]
    keys = list(dict.fromkeys(key for each in settings for key in each))
    for name in allow:
        if not any(_covers(name, key) for key in keys):
            groups = {key[:i] for key in keys for i, letter in enumerate(key) if letter == "."}
            raise unknown("setting in --allow", name, {*keys, *groups})
    relevant = [key for key in keys if not any(_covers(name, key) for name in _FREE)]
    differing = {key: text for key in relevant if (text := _difference(runs, settings, key))}
    refused = [key for key in differing if not any(_covers(name, key) for name in allow)]
    if not set(_WHAT_IT_TRAINS).isdisjoint(refused):
        raise _several_kinds(runs, refused)
    if refused:
        lines = "\n".join(f"  {key}: {differing[key]}" for key in refused)
        raise PolyvisionError(
            f"the settings of these runs differ in more than activation and seed:\n{lines}\n"
            f"Name only runs of one setting, or compare all the same with "
            f"--allow {','.join(refused)}"
        )
    notes = [f"Settings differ, as allowed: {key}: {text}." for key, text in differing.items()]
    surroundings = [_surroundings(run) for run in runs]
    for key in _SURROUNDINGS:
        text = _difference(runs, surroundings, key)
        if text:
            notes.append(f"Not all runs were made alike: {key}: {text}.")
    return notes


def _several_kinds(runs: Sequence[Run], refused: Sequence[str]) -> PolyvisionError:
    """Name the folders of runs that train different models or on different data."""
    folders: dict[str, list[str]] = {}
    for run in runs:
        node = flatten(run.config)
        what = ", ".join(str(node.get(key)) for key in _WHAT_IT_TRAINS)
        where = folders.setdefault(f"{what}: {run.folder.parent.parent}", [])
        where.append(run.name)
    lines = "\n".join(f"  {what} ({_some(names)})" for what, names in folders.items())
    groups = dict.fromkeys(key.partition(".")[0] for key in refused)
    return PolyvisionError(
        f"these runs differ in {' and '.join(k for k in _WHAT_IT_TRAINS if k in refused)}:\n"
        f"{lines}\n"
        f"Name the folder of one model on one data set, or compare all the same with "
        f"--allow {','.join(groups)}"
    )


def _surroundings(run: Run) -> dict[str, Any]:
    git = run.environment.get("git")
    state = git and git["commit"][:10] + (" with changes" if git["changed"] else "")
    return {**run.environment, "git": state}


def _covers(name: str, key: str) -> bool:
    return key == name or key.startswith(f"{name}.")


def _difference(runs: Sequence[Run], settings: Sequence[Mapping[str, Any]], key: str) -> str:
    """Say which runs have which value, or nothing if all have the same."""
    values: dict[str, list[str]] = {}
    for run, each in zip(runs, settings, strict=True):
        text = json.dumps(each[key]) if key in each else _ABSENT
        values.setdefault(text, []).append(run.name)
    if len(values) < 2:
        return ""
    return ", ".join(f"{value} in {_some(names)}" for value, names in values.items())


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def flatten(node: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings as dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in node.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
