"""The sections of the report, and their figures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from polyvision.analysis.document import Section, png
from polyvision.analysis.stability.contrast import ACTIVATIONS, Grid, Setting
from polyvision.analysis.stability.networks import NETWORKS
from polyvision.analysis.stability.overflow import CONTENDERS, DTYPES, FORMS, QUANTITIES, Cell
from polyvision.analysis.stability.thresholds import THRESHOLDS, neighbours
from polyvision.analysis.stability.training import COLLAPSE, PRECISIONS, Run

__all__ = [
    "grid_section",
    "map_section",
    "pair_section",
    "precision_section",
    "threshold_section",
]

_COLOURS = {"polynorm": "#1f6fb4", "polyrelu": "#d1495b", "relu": "#7a7a7a"}
_OUTCOME_COLOURS = {"trains": "#b7dfb9", "stalls": "#f4e3a1", "diverges": "#eda6a0"}
_FP16_LARGEST = 65504
_EXACT = 1e-8  # smaller errors are drawn as this
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
        figure=("maps.png", png(_maps_figure(cells))),
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
        figure=("curves.png", png(_curves_figure([(s.title, runs) for s, runs in groups]))),
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
        figure=("grid.png", png(_grid_figure(groups))),
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


def _maps_figure(cells: Sequence[Cell]) -> Figure:
    """Draw one panel per dtype and quantity: rows are contenders and forms, columns input scales.

    Colour is the relative error; red cells hold overflow that exact arithmetic avoids, black ones
    only results that lie outside the dtype.
    """
    exponents = sorted({cell.exponent for cell in cells})
    rows = [(name, form) for name in CONTENDERS for form in FORMS]
    figure = Figure(figsize=(13, 9), layout="constrained")
    panels = figure.subplots(len(DTYPES), len(QUANTITIES), sharex=True, sharey=True)
    known = {(c.contender, c.form, c.dtype, c.quantity, c.exponent): c for c in cells}
    image = None
    for axes_row, dtype in zip(panels, DTYPES, strict=True):
        for axes, quantity in zip(axes_row, QUANTITIES, strict=True):
            error = np.full((len(rows), len(exponents)), np.nan)
            paint = np.zeros((*error.shape, 4))
            for i, row in enumerate(rows):
                for j, exponent in enumerate(exponents):
                    cell = known.get((*row, dtype, quantity, exponent))
                    if cell is not None:
                        error[i, j], paint[i, j] = _shade(cell)
            image = axes.imshow(error, aspect="auto", cmap="YlGnBu", vmin=-8, vmax=0)
            axes.imshow(paint, aspect="auto")
            _label_map(axes, rows, exponents)
            axes.set_title(f"{dtype}: {quantity}", fontsize="medium")
    for axes in panels[-1]:
        axes.set_xlabel("largest input, 2^n")
    if image is not None:
        bar = figure.colorbar(image, ax=panels, shrink=0.5, pad=0.01)
        bar.set_label("relative error, log10")
    figure.suptitle(
        "Red: overflow that exact arithmetic avoids. Black: the result is outside the dtype.",
        fontsize="medium",
    )
    return figure


def _shade(cell: Cell) -> tuple[float, tuple[float, float, float, float]]:
    """Return the error on a log scale and the paint over it."""
    error = cell.error if cell.error is not None else math.nan
    shown = math.log10(max(error, _EXACT)) if not math.isnan(error) else math.nan
    if cell.non_finite > cell.unavoidable:
        return shown, (0.85, 0.1, 0.1, 1.0)
    if cell.unavoidable > 0:
        return shown, (0.1, 0.1, 0.1, 1.0)
    return shown, (0.0, 0.0, 0.0, 0.0)


def _label_map(axes: Axes, rows: list[tuple[str, str]], exponents: list[int]) -> None:
    axes.set_yticks(range(len(rows)), [f"{name}, {form}" for name, form in rows], fontsize="small")
    ticks = [i for i, exponent in enumerate(exponents) if exponent % 8 == 0]
    axes.set_xticks(ticks, [str(exponents[i]) for i in ticks])


def _curves_figure(groups: Sequence[tuple[str, Sequence[Run]]]) -> Figure:
    """Draw loss, loss scale and largest value against the step; a line per run."""
    figure = Figure(figsize=(12, 2.4 * len(groups)), layout="constrained")
    panels = figure.subplots(len(groups), 3, squeeze=False)
    for (loss, scale, peak), (title, runs) in zip(panels, groups, strict=True):
        for run in runs:
            label = run.activation if run.seed == runs[0].seed else None
            style = {"color": _COLOURS[run.activation], "linewidth": 1, "label": label}
            steps = np.arange(1, len(run.losses) + 1)
            loss.plot(steps, run.losses, **style)
            scale.plot(steps, run.scales, **style)
            peak.plot(steps, run.peaks, **style)
            if run.outcome == "diverges":
                scale.plot(steps[-1:], run.scales[-1:], "x", color=style["color"])
        loss.axhline(runs[0].guess, color="black", linewidth=0.6, linestyle=":")
        loss.set_ylim(0, 2 * runs[0].guess)
        loss.set_ylabel("loss")
        loss.set_title(title, fontsize="medium", loc="left")
        scale.set_yscale("log", base=2)
        scale.set_ylim(COLLAPSE / 2, 2.0**18)
        scale.axhline(COLLAPSE, color="black", linewidth=0.6, linestyle=":")
        scale.set_ylabel("loss scale")
        peak.set_yscale("log")
        peak.axhline(_FP16_LARGEST, color="black", linewidth=0.6, linestyle=":")
        peak.set_ylabel("largest output")
    panels[0][0].legend(fontsize="small")
    for axes in panels[-1]:
        axes.set_xlabel("step")
    return figure


def _grid_figure(groups: Sequence[tuple[Grid, Sequence[Run]]]) -> Figure:
    """Draw the outcome of every point: a row of panels per grid, a panel per activation."""
    figure = Figure(figsize=(13, 2.3 * len(groups)), layout="constrained")
    panels = figure.subplots(len(groups), len(ACTIVATIONS), squeeze=False)
    for row, (grid, runs) in zip(panels, groups, strict=True):
        for axes, activation in zip(row, ACTIVATIONS, strict=True):
            _draw_outcomes(axes, grid, [run for run in runs if run.activation == activation])
            axes.set_title(f"{grid.network}, {activation}", fontsize="medium")
            axes.set_xlabel({"gain": "initial gain", "input_scale": "input scale"}[grid.axis])
        row[0].set_ylabel("learning rate")
    return figure


def _draw_outcomes(axes: Axes, grid: Grid, runs: Sequence[Run]) -> None:
    for run in runs:
        x = grid.values.index(getattr(run.recipe, grid.axis))
        y = grid.rates.index(run.recipe.lr)
        colour = _OUTCOME_COLOURS[run.outcome]
        axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=colour, edgecolor="white"))
        text = f"{run.last_loss:.2g}" if run.outcome != "diverges" else f"step {len(run.losses)}"
        axes.text(x, y, text, ha="center", va="center", fontsize="x-small")
    axes.set_xlim(-0.5, len(grid.values) - 0.5)
    axes.set_ylim(-0.5, len(grid.rates) - 0.5)
    labels = [
        f"2^{math.log2(v):g}" if grid.axis == "input_scale" else f"{v:g}" for v in grid.values
    ]
    axes.set_xticks(range(len(grid.values)), labels, fontsize="small")
    axes.set_yticks(range(len(grid.rates)), [f"{v:g}" for v in grid.rates], fontsize="small")
