"""Where metrics go: TensorBoard, and JSON lines that a resumed run continues."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

__all__ = ["Board", "JsonLinesLogger", "truncate_metrics"]


class Board(TensorBoardLogger):
    """TensorBoard events straight in the run folder.

    Args:
        folder: the run folder.
        purge_step: hide events from this step on, which an earlier, killed process wrote.
    """

    def __init__(self, folder: Path, purge_step: int | None) -> None:
        super().__init__(
            folder.parent,
            name="",
            version=folder.name,
            default_hp_metric=False,
            purge_step=purge_step,
        )

    def save(self) -> None:
        """Flush; Lightning's own copy of the settings is not written: config.yaml has them."""
        self.experiment.flush()


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
        with self.path.open("a") as file:
            file.write(json.dumps({"step": int(step or 0), **metrics}) + "\n")

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kw: Any) -> None:
        """Do nothing: the run folder holds the configuration."""


def truncate_metrics(path: Path, step: int) -> None:
    """Drop the lines after ``step``, which a resumed run writes again."""
    if path.exists():
        lines = path.read_text().splitlines()
        kept = [line for line in lines if _step_of(line) <= step]
        path.write_text("".join(f"{line}\n" for line in kept))


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except ValueError:  # a kill can leave half a line at the end
        return math.inf
