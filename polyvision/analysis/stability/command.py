"""``polyvision stability``: run the lab and write its report."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from polyvision.analysis.device import add_device_argument, pick_device
from polyvision.analysis.document import Section, write_report
from polyvision.analysis.stability.contrast import run_grids, run_pairs, run_precisions
from polyvision.analysis.stability.overflow import Cell, overflow_maps
from polyvision.analysis.stability.report import (
    grid_section,
    map_section,
    pair_section,
    precision_section,
    threshold_section,
)
from polyvision.analysis.stability.thresholds import THRESHOLDS, neighbours
from polyvision.analysis.stability.training import Run
from polyvision.errors import PolyvisionError

__all__ = ["PARTS", "add_arguments", "run"]

PARTS = ("maps", "pairs", "grid", "precisions")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("runs/stability"),
        help="folder of the report; files of an earlier one are replaced (default: %(default)s)",
    )
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=PARTS,
        default=PARTS,
        help="maps: thresholds and overflow maps, seconds; pairs: training contrast over seeds; "
        "grid: learning rate against scale; precisions: fp16, bf16, fp32 (default: all)",
    )
    parser.add_argument(
        "--seeds", type=int, default=3, help="paired seeds of the contrast (default: %(default)s)"
    )
    add_device_argument(parser)


def run(arguments: argparse.Namespace) -> str:
    """Run the lab, write the report, and return where it lies.

    Raises:
        PolyvisionError: the folder cannot be made, there is no such device, or no seed is left.
    """
    device = pick_device(arguments.device).type
    if arguments.seeds < 1:
        raise PolyvisionError(f"--seeds must be at least 1, got {arguments.seeds}")
    folder: Path = arguments.output
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PolyvisionError(f"--output {folder} cannot be a folder: {error.strerror}") from None
    start = time.monotonic()

    def progress(text: str) -> None:
        print(f"[{time.monotonic() - start:4.0f} s] {text}", file=sys.stderr, flush=True)

    hardware = (
        torch.cuda.get_device_name()
        if device == "cuda"
        else torch.backends.cpu.get_cpu_capability()
    )
    results: dict[str, Any] = {
        "environment": {"torch": torch.__version__, "device": device, "hardware": hardware}
    }
    sections: list[Section] = []
    if "maps" in arguments.parts:
        cells = overflow_maps(device=device, progress=progress)
        results["thresholds"] = [
            {"what": t.what, "exact": t.exact, "fp16": neighbours(t)} for t in THRESHOLDS
        ]
        results["maps"] = _map_rows(cells)
        sections += [threshold_section(), map_section(cells)]
    if "pairs" in arguments.parts:
        pairs = run_pairs(range(arguments.seeds), device, progress)
        results["pairs"] = [_record(one, curves=True) for _, runs in pairs for one in runs]
        sections.append(pair_section(pairs))
    if "grid" in arguments.parts:
        grids = run_grids(device, progress)
        results["grid"] = [_record(one) for _, runs in grids for one in runs]
        sections.append(grid_section(grids))
    if "precisions" in arguments.parts:
        precisions = run_precisions(device, progress)
        results["precisions"] = [_record(one) for _, runs in precisions for one in runs]
        sections.append(precision_section(precisions))
    lead = f"Made by `polyvision stability` on {device} ({hardware}), torch {torch.__version__}."
    lines = ",\n".join(f"{json.dumps(key)}: {_json(value)}" for key, value in results.items())
    files = {"stability.json": "{\n" + lines + "\n}\n"}
    write_report(folder, "fp16 stability lab", lead, sections, files)
    return f"report: {folder / 'report.html'} (also report.md, stability.json and the figures)"


def _map_rows(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Gather the cells of each row of the maps; lists run over the exponents."""
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    for cell in cells:
        names = {name: getattr(cell, name) for name in ("contender", "form", "dtype", "quantity")}
        row = rows.setdefault(tuple(names.values()), {**names, "first_exponent": cell.exponent})
        for name in ("non_finite", "unavoidable", "error"):
            row.setdefault(name, []).append(_short(getattr(cell, name)))
    return list(rows.values())


def _record(run: Run, *, curves: bool = False) -> dict[str, Any]:
    """Turn a run into plain values; curves only where they are drawn."""
    record = dataclasses.asdict(run)
    record |= {"last_loss": _short(run.last_loss), "lost": run.lost}
    record["steps_begun"] = len(run.losses)
    record |= {name: [_short(value) for value in record[name]] for name in ("losses", "peaks")}
    if not curves:
        del record["losses"], record["peaks"], record["scales"]
    return record


def _short(value: float | None) -> float | str | None:
    """Round to four digits; JSON has no infinity, so that becomes a text."""
    if value is None or math.isfinite(value):
        return None if value is None else float(f"{value:.4g}")
    return str(value)


def _json(value: Any) -> str:
    """Write one record per line."""
    if isinstance(value, list):
        return "[\n" + ",\n".join(json.dumps(v, allow_nan=False) for v in value) + "\n]"
    return json.dumps(value, allow_nan=False)
