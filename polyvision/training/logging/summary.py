"""What a person reads before and after a run."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from polyvision.output import count, duration, plural
from polyvision.training.config.overrides import given_keys
from polyvision.training.run.folder import Run

__all__ = ["format_summary", "format_table"]

_UNITS = ("tokens", "samples")  # of a rate: the first one that the task has


def format_table(title: str, rows: Iterable[tuple[str, str]]) -> str:
    """Align labelled lines under a title."""
    rows = list(rows)
    width = max(len(label) for label, _ in rows)
    lines = [f"  {label:<{width}}  {text}" for label, text in rows]
    return "\n".join([title, *lines])


def format_summary(run: Run, summary: Mapping[str, Any], overrides: Sequence[str]) -> str:
    """Say how a run ended and what can be done with it.

    Args:
        run: the run.
        summary: what ``summary.json`` holds.
        overrides: those of the command that made the run.
    """
    settings = summary["settings"]
    script = "train_vision.py" if settings["task"] == "vision" else "train_lm.py"
    group = shlex.quote(str(run.folder.parent.parent))
    kept = [
        text
        for text in overrides
        if all(key.partition(".")[0] not in {"act", "resume"} for key in given_keys([text]))
    ]
    command = shlex.join(["python", script, *kept, f"act={_rival(settings)}"])
    shown = "  ".join(f"{k} {v:.4f}" for k, v in summary["shown"].items())
    best = "none" if summary["best"] is None else f"{summary['best']:.4f}"
    speed = summary.get("speed") or {}
    rates = (f", {count(speed[f'{u}_per_s'])} {u}/s" for u in _UNITS if f"{u}_per_s" in speed)
    rows = [
        (f"best {summary['monitor']}", best),
        ("last", shown),
        ("time", duration(summary["seconds"]) + next(rates, "")),
        ("checkpoints", f"{run.best} (best weights), {run.last} (to go on)"),
        ("tensorboard", f"tensorboard --logdir {group}"),
        ("compare", f"{command}; polyvision compare {group}"),
    ]
    if summary.get("target"):
        rows.insert(1, ("target", summary["target"]))
    skipped = summary["unreadable"]
    if skipped:
        names = ", ".join(skipped[:3]) + (", ..." if skipped[3:] else "")
        rows.insert(-4, ("NOT read", f"{plural(len(skipped), 'training file')}: {names}"))
    return format_table("Summary", rows)


def _rival(settings: Mapping[str, Any]) -> str:
    """Name the usual activation of the task, or PolyNorm where the run has that one."""
    usual = "relu" if settings["task"] == "vision" else "swiglu"
    return "polynorm" if settings["act"] == usual else usual
