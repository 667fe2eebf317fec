"""The sections of the report."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from polyvision.analysis.document import Section, png
from polyvision.analysis.stability.contenders import CONTENDERS, FORMS
from polyvision.analysis.stability.contrast import ACTIVATIONS, Grid, Setting
from polyvision.analysis.stability.networks import NETWORKS
from polyvision.analysis.stability.overflow import DTYPES, QUANTITIES, Cell
from polyvision.analysis.stability.plots import curves_figure, grid_figure, maps_figure
from polyvision.analysis.stability.thresholds import THRESHOLDS, neighbours
from polyvision.analysis.stability.training import PRECISIONS, Run

__all__ = [
    "grid_section",
    "map_section",
    "pair_section",
    "precision_section",
    "threshold_section",
]

_OUTCOMES = (
    "Outcomes: *trains* - the mean loss of the last tenth of the steps is below 3/4 of ln(classes),"
    " the loss of a uniform guess, and less than half of these steps were skipped; *diverges* - the"
    " loss scale fell to 2^-14 (where the trainers stop too), a loss of the last tenth is not"
    " finite, or their mean is above 2 ln(classes); *stalls* - the rest."
)


def threshold_section() -> Section:
    """Put the derived overflow points beside those found among all fp16 numbers."""
    rows = [("what overflows", "condition, L = 65520", "derived", "last safe fp16", "next fp16")]
    for threshold in THRESHOLDS:
        inside, beyond = neighbours(threshold)
        rows.append(
            (
                threshold.what,
                threshold.condition,
                f"{threshold.exact:.6g}",
                f"{inside:.7g}",
                f"{beyond:.7g}",
            )
        )
    return Section(
        "Thresholds of fp16",
        (
            "L is the smallest number that rounds to infinity in fp16. The last two columns were "
            "found by trying every fp16 number; rows are constant.",
        ),
        table=tuple(rows),
    )


def map_section(cells: Sequence[Cell]) -> Section:
    """Summarise the overflow maps: range of scales without overflow, and errors there."""
    rows = [("activation", "form", "dtype", *(f"{q}: overflow, error" for q in QUANTITIES))]
    for name in CONTENDERS:
        for form in FORMS:
            for dtype in DTYPES:
                texts = (_summary(cells, name, form, dtype, q) for q in QUANTITIES)
                rows.append((name, form, dtype, *texts))
    return Section(
        "Overflow maps",
        (
            "Largest input 2^-24 to 2^15, uniform; incoming gradients standard normal. *plain* is "
            "the printed formula with every operation in the dtype, *ours* what polyvision "
            "computes. Each entry: the exponents n at which some value is not finite although it "
            "could be; then, after a bar, those at which the result itself lies outside the dtype; "
            "then the largest relative error against float64 on the same rounded inputs, over the "
            "scales from 2^-4 to 2^2.",
        ),
        table=tuple(rows),
        figure=("maps.png", png(maps_figure(cells))),
    )


def _summary(cells: Sequence[Cell], name: str, form: str, dtype: str, quantity: str) -> str:
    key = (name, form, dtype, quantity)
    row = [c for c in cells if (c.contender, c.form, c.dtype, c.quantity) == key]
    if not row:
        return "-"
    avoidable = _ranges([c.exponent for c in row if c.non_finite > c.unavoidable])
    outside = _ranges([c.exponent for c in row if c.unavoidable > 0])
    errors = [c.error for c in row if -4 <= c.exponent <= 2 and c.error is not None]
    return f"{avoidable} | {outside} | " + (f"{max(errors):.0e}" if errors else "-")


def _ranges(exponents: list[int]) -> str:
    """Write sorted numbers as ranges: 1, 2, 3, 7 -> '1..3, 7'."""
    parts: list[list[int]] = []
    for exponent in exponents:
        if parts and exponent == parts[-1][1] + 1:
            parts[-1][1] = exponent
        else:
            parts.append([exponent, exponent])
    return ", ".join(f"{a}..{b}" if a != b else str(a) for a, b in parts) or "none"


def pair_section(groups: Sequence[tuple[Setting, Sequence[Run]]]) -> Section:
    """Summarise the paired runs by setting and activation."""
    rows: list[tuple[str, ...]] = [
        ("setting", "activation", "outcomes", "last loss", "skipped", "lost", "first non-finite")
    ]
    for setting, runs in groups:
        for activation in ACTIVATIONS:
            own = [run for run in runs if run.activation == activation]
            rows.append((setting.title, activation, *_paired(own)))
    seeds = len({run.seed for _, runs in groups for run in runs})
    used = {setting.network: NETWORKS[setting.network] for setting, _ in groups}
    return Section(
        "Training contrast in fp16",
        (
            f"{PRECISIONS['fp16']}. {seeds} paired seeds: equal seeds give every activation the "
            "same initial weights and order of data.",
            _OUTCOMES,
            "Columns: loss at the end by seed; mean number of steps that the loss scaler skipped; "
            "*lost*, the steps at which the loss itself stopped being finite, where the trainers "
            "end a run since no loss scale helps; where the first non-finite value of a run arose.",
            "Networks: " + "; ".join(f"{name} - {text}" for name, text in used.items()) + ".",
        ),
        table=tuple(rows),
        figure=("curves.png", png(curves_figure([(s.title, runs) for s, runs in groups]))),
    )


def _paired(runs: Sequence[Run]) -> tuple[str, ...]:
    counts = {o: sum(run.outcome == o for run in runs) for o in ("trains", "stalls", "diverges")}
    lost = [str(step) if (step := run.lost) else "-" for run in runs]
    sightings = sorted({s.kind + " of " + s.layer for run in runs if (s := run.sighting)})
    return (
        ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count),
        " ".join(f"{run.last_loss:.3g}" for run in runs),
        f"{statistics.fmean(len(run.skipped) for run in runs):.3g}",
        " ".join(lost),
        "; ".join(sightings[:2]) + (" ..." if sightings[2:] else "") or "none",
    )


def grid_section(groups: Sequence[tuple[Grid, Sequence[Run]]]) -> Section:
    """Count the outcomes of the grids."""
    rows: list[tuple[str, ...]] = [("grid", "activation", "trains", "stalls", "diverges")]
    for grid, runs in groups:
        for activation in ACTIVATIONS:
            own = [run.outcome for run in runs if run.activation == activation]
            counts = (str(own.count(o)) for o in ("trains", "stalls", "diverges"))
            rows.append((f"{grid.network}, lr x {grid.axis}", activation, *counts))
    return Section(
        "Where each breaks",
        (
            "fp16, one seed. A cell of the figure holds the loss at the end or, if the run "
            "diverges, its last step. Green trains, yellow stalls, red diverges.",
        ),
        table=tuple(rows),
        figure=("grid.png", png(grid_figure(groups))),
    )


def precision_section(groups: Sequence[tuple[Setting, Sequence[Run]]]) -> Section:
    """Compare the precisions: is the range of fp16 to blame, or the function?"""
    rows: list[tuple[str, ...]] = [("setting", "activation", *PRECISIONS)]
    for setting, runs in groups:
        for activation in ACTIVATIONS:
            own = {
                run.recipe.precision: f"{run.outcome}: {run.reason}"
                for run in runs
                if run.activation == activation
            }
            rows.append((setting.title, activation, *(own[name] for name in PRECISIONS)))
    notes = (f"{name} - {text}" for name, text in PRECISIONS.items())
    return Section(
        "Is fp16 to blame?",
        ("The same runs in every precision, seed 0. " + "; ".join(notes) + ".",),
        table=tuple(rows),
    )
