"""Where metrics go besides TensorBoard: JSON lines that a resumed run continues."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from polyvision.files import write_whole

__all__ = ["JsonLinesLogger", "truncate_metrics"]


class JsonLinesLogger(Logger):
    """Append ``{"step": ..., "<tag>": ...}`` to a file, flushed at once."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    @property
    def name(self) -> str:
        """Name that Lightning asks for."""
        return "jsonl"

    @property
    def version(self) -> str:
        """Version that Lightning asks for."""
        return ""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Append one line."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": int(step or 0), **metrics}) + "\n")

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kw: Any) -> None:
        """Do nothing: the run folder holds the configuration."""


def truncate_metrics(path: Path, step: int, size: int | None = None) -> None:
    """Drop what a resumed run writes again.

    Args:
        path: the file.
        step: the step that the run goes on from: later ones are dropped.
        size: bytes of the file when the checkpoint was written. A validation that came after it
            belongs to the same step.
    """
    if path.exists():
        # What a disk lost is replaced by anything, also by no text.
        lines = path.read_bytes()[:size].decode("utf-8", errors="replace").splitlines()
        kept = [line for line in lines if _step_of(line) <= step]
        write_whole(path, "".join(f"{line}\n" for line in kept))


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):  # a kill can leave half a line at the end
        return math.inf
