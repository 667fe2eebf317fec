"""``polyvision export``: a trained network as files for other programs."""

from __future__ import annotations

import argparse
from pathlib import Path

from polyvision.models.trained.export import FORMATS, export_saved
from polyvision.models.trained.saved import WEIGHTS, open_saved

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument(
        "run_or_checkpoint",
        type=Path,
        metavar="RUN_OR_CHECKPOINT",
        help="a run folder, or a checkpoint in one",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="a folder that does not exist yet (default: export/ in the run folder)",
    )
    parser.add_argument(
        "--format",
        nargs="+",
        choices=tuple(FORMATS),
        default=["safetensors"],
        help="one or more (default: safetensors); programs are checked against the network",
    )
    parser.add_argument(
        "--weights",
        choices=WEIGHTS,
        help="best: of the best validation; last: of the last checkpoint; ema: its averaged "
        "weights (default: best, or last where there is no best)",
    )


def run(arguments: argparse.Namespace) -> str:
    """Export, and return what was written and how it is read.

    Raises:
        PolyvisionError: no such run or weights, a package is missing, or the output exists.
    """
    saved = open_saved(arguments.run_or_checkpoint, weights=arguments.weights)
    done = export_saved(saved, arguments.output or saved.folder / "export", arguments.format)
    shown = "  ".join(f"{name} {value:.4f}" for name, value in saved.metrics.items())
    width = max(map(len, done.files))
    return "\n".join(
        [
            f"{saved.source}: {saved.weights} weights of step {saved.step:,}  {shown}".rstrip(),
            f"written to {done.folder}",
            *(f"  {name:<{width}}  {text}" for name, text in done.files.items()),
            *(f"read with  {line.replace('<folder>', str(done.folder))}" for line in done.reading),
        ]
    )
