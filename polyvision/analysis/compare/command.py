"""``polyvision compare``: from run folders to a report."""

from __future__ import annotations

import argparse
import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyvision.analysis.compare.pairing import baseline_of, common_step, group_runs, metrics_of
from polyvision.analysis.compare.reading import find_runs, read_run
from polyvision.analysis.compare.report import Comparison
from polyvision.analysis.compare.settings import check_alike
from polyvision.analysis.document import write_report

__all__ = [
    "add_arguments",
    "compare",
    "data_name",
    "run",
    "settings_line",
    "tables",
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.add_argument(
        "runs", nargs="+", metavar="RUNS", help="run folders, folders above them, or globs"
    )
    parser.add_argument(
        "--baseline",
        help="the activation that the others are compared with (default: relu, else the first)",
    )
    parser.add_argument(
        "--allow",
        default="",
        metavar="KEY[,KEY]",
        help="settings that may differ; a group, such as recipe, stands for all its keys",
    )
    parser.add_argument(
        "--common-step",
        action="store_true",
        help="compare all runs, unfinished ones too, at the last step at which every one was "
        "validated",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("runs/compare"),
        help="folder of the report; files of an earlier one are replaced (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> str:
    """Compare, write the report, and return its Markdown.

    Raises:
        PolyvisionError: there are no runs, their settings differ, or the folder cannot be written.
    """
    allow = [key for key in arguments.allow.split(",") if key]
    comparison = compare(
        arguments.runs,
        baseline=arguments.baseline,
        allow=allow,
        at_common_step=arguments.common_step,
    )
    title = f"{', '.join(comparison.counted)} on {data_name(comparison)}"
    return write_report(
        arguments.output,
        title,
        settings_line(comparison),
        comparison.sections(),
        tables(comparison),
    )


def compare(
    places: list[str],
    *,
    baseline: str | None = None,
    allow: list[str] | None = None,
    at_common_step: bool = False,
) -> Comparison:
    """Read runs, check that they are alike, and pair them.

    Args:
        places: run folders, folders above them, or globs.
        baseline: the activation that the others are compared with; None: relu, else the first.
        allow: settings that may differ.
        at_common_step: compare all runs at the last step that they share.

    Raises:
        PolyvisionError: there are no runs, or their settings differ.
    """
    folders, stateless = find_runs(places)
    notes = [f"Left out: {f} has no state.json, which older versions lack." for f in stateless]
    runs = [read_run(folder) for folder in folders]
    notes += check_alike(runs, allow or [])
    groups, dropped = group_runs(runs)
    kept = [run for seeds in groups.values() for run in seeds.values()]
    first = baseline_of(groups, baseline)
    return Comparison(
        groups={first: groups[first], **groups},
        metrics=metrics_of(kept),
        step=common_step(kept) if at_common_step else None,
        notes=(*notes, *dropped),
    )


def data_name(comparison: Comparison) -> str:
    """Return the name of the data that the runs were trained on."""
    return str(_settings(comparison)["data"]["name"])


def settings_line(comparison: Comparison) -> str:
    """Return the settings that the runs share, as a sentence."""
    settings = _settings(comparison)
    return (
        f"{settings['model']['name']}, recipe {settings['recipe']['name']}, precision "
        f"{settings['precision']}."
    )


def _settings(comparison: Comparison) -> Mapping[str, Any]:
    return next(iter(comparison.groups[comparison.baseline].values())).config


def tables(comparison: Comparison) -> dict[str, str]:
    """Return the report's tables in full precision: file name -> CSV."""
    return {"runs.csv": _runs_csv(comparison), "differences.csv": _differences_csv(comparison)}


def _runs_csv(comparison: Comparison) -> str:
    """Write one line per run, with full precision."""
    labels = list(comparison.measures)
    rows = [["activation", "seed", "status", "counted", "step", "total_steps", "parameters"]]
    rows[0] += [*labels, "folder"]
    for act, seeds in comparison.groups.items():
        for seed, each in seeds.items():
            counted = seed in comparison.counted[act]
            values = [measure(each) for _, measure in comparison.measures.values()]
            facts = [act, seed, each.status, counted, each.step, each.total_steps, each.parameters]
            rows.append([*map(str, facts), *map(_full, values), str(each.folder)])
    return _csv(rows)


def _differences_csv(comparison: Comparison) -> str:
    """Write one line per activation and metric; no interval with fewer than two pairs."""
    rows = [["activation", "baseline", "metric", "pairs", "seeds", "difference", "low", "high"]]
    for row in comparison.differences():
        difference = row.difference
        low, high = difference.interval or (None, None)
        mean = difference.mean if difference.values else None
        facts = [row.act, comparison.baseline, row.metric, str(len(difference.values))]
        seeds = " ".join(map(str, difference.seeds))
        rows.append([*facts, seeds, _full(mean), _full(low), _full(high)])
    return _csv(rows)


def _full(value: float | None) -> str:
    return "" if value is None else repr(value)


def _csv(rows: list[list[str]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()
