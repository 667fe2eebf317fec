"""The figures of the report."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from polyvision.analysis.stability.contenders import CONTENDERS, FORMS
from polyvision.analysis.stability.contrast import ACTIVATIONS, Grid
from polyvision.analysis.stability.overflow import DTYPES, QUANTITIES, Cell
from polyvision.analysis.stability.training import COLLAPSE, Run

__all__ = ["curves_figure", "grid_figure", "maps_figure"]

COLOURS = {"polynorm": "#1f6fb4", "polyrelu": "#d1495b", "relu": "#7a7a7a"}
_OUTCOMES = {"trains": "#b7dfb9", "stalls": "#f4e3a1", "diverges": "#eda6a0"}
_FP16_LARGEST = 65504
_EXACT = 1e-8  # smaller errors are drawn as this


def maps_figure(cells: Sequence[Cell]) -> Figure:
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


def curves_figure(groups: Sequence[tuple[str, Sequence[Run]]]) -> Figure:
    """Draw loss, loss scale and largest value against the step; a line per run."""
    figure = Figure(figsize=(12, 2.4 * len(groups)), layout="constrained")
    panels = figure.subplots(len(groups), 3, squeeze=False)
    for (loss, scale, peak), (title, runs) in zip(panels, groups, strict=True):
        for run in runs:
            label = run.activation if run.seed == runs[0].seed else None
            style = {"color": COLOURS[run.activation], "linewidth": 1, "label": label}
            steps = np.arange(1, len(run.losses) + 1)
            loss.plot(steps, _finite(run.losses), **style)
            scale.plot(steps, run.scales, **style)
            peak.plot(steps, _finite(run.peaks), **style)
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


def _finite(values: list[float]) -> NDArray[np.float64]:
    """Leave gaps where a value is not finite."""
    return np.array([value if math.isfinite(value) else np.nan for value in values])


def grid_figure(groups: Sequence[tuple[Grid, Sequence[Run]]]) -> Figure:
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
        axes.add_patch(_square(x, y, _OUTCOMES[run.outcome]))
        text = f"{run.last_loss:.2g}" if run.outcome != "diverges" else f"step {len(run.losses)}"
        axes.text(x, y, text, ha="center", va="center", fontsize="x-small")
    axes.set_xlim(-0.5, len(grid.values) - 0.5)
    axes.set_ylim(-0.5, len(grid.rates) - 0.5)
    labels = [
        f"2^{math.log2(v):g}" if grid.axis == "input_scale" else f"{v:g}" for v in grid.values
    ]
    axes.set_xticks(range(len(grid.values)), labels, fontsize="small")
    axes.set_yticks(range(len(grid.rates)), [f"{v:g}" for v in grid.rates], fontsize="small")


def _square(x: int, y: int, colour: str) -> Rectangle:
    return Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=colour, edgecolor="white")
