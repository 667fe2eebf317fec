"""What a person reads before and after a run."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from polyvision.training.config.overrides import given_keys
from polyvision.training.run.folder import Run

__all__ = ["count", "format_summary", "format_table", "size"]


def format_table(title: str, rows: Iterable[tuple[str, str]]) -> str:
    """Align labelled lines under a title."""
    rows = list(rows)
    width = max(len(label) for label, _ in rows)
    lines = [f"  {label:<{width}}  {text}" for label, text in rows]
    return "\n".join([title, *lines])


def count(number: float) -> str:
    """Shorten a large number: 23.5M."""
    for limit, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= limit:
            return f"{number / limit:.3g}{unit}"
    return f"{number:.3g}"


def size(number: float) -> str:
    """Bytes in binary units: 89.9 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(number) < 1024 or unit == "GiB":
            break
        number /= 1024
    return f"{number:.1f} {unit}"


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
    rate = "" if summary["samples_per_s"] is None else f", {summary['samples_per_s']:g} samples/s"
    rows = [
        (f"best {summary['monitor']}", best),
        ("last", shown),
        ("time", f"{summary['seconds']:g} s{rate}"),
        ("checkpoints", f"{run.best} (best weights), {run.last} (to go on)"),
        ("tensorboard", f"tensorboard --logdir {group}"),
        ("compare", f"{command}; polyvision compare {group}"),
    ]
    if summary.get("target"):
        rows.insert(1, ("target", summary["target"]))
    skipped = summary["unreadable"]
    if skipped:
        names = ", ".join(skipped[:3]) + (", ..." if skipped[3:] else "")
        rows.insert(-4, ("NOT read", f"{len(skipped)} training files: {names}"))
    return format_table("Summary", rows)


def _rival(settings: Mapping[str, Any]) -> str:
    """Name the usual activation of the task, or PolyNorm where the run has that one."""
    usual = "relu" if settings["task"] == "vision" else "swiglu"
    return "polynorm" if settings["act"] == usual else usual
