"""Learning curves: a line per activation, a band over its seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from polyvision.analysis.compare.pairing import Groups
from polyvision.analysis.compare.reading import Run, Series

__all__ = ["curves_figure", "mean_and_band", "smooth"]

_COLOURS = ("tab:gray", "tab:blue", "tab:red", "tab:green", "tab:purple", "tab:orange", "tab:cyan")
_STYLES = ("-", "--", ":", "-.")  # once all colours are taken
# A line of more points is smoothed over one part in this many.
_POINTS = 100


def curves_figure(groups: Groups, tags: Sequence[str]) -> Figure:
    """Draw a panel per metric: runs as thin lines, means as thick ones, mean -+ std as a band.

    Args:
        groups: the runs, by activation and seed; the baseline comes first.
        tags: the metrics.
    """
    figure = Figure(figsize=(4.6 * len(tags), 3.8), layout="constrained")
    panels = figure.subplots(1, len(tags), squeeze=False)[0]
    for axes, tag in zip(panels, tags, strict=True):
        for i, (act, seeds) in enumerate(groups.items()):
            turn, colour = divmod(i, len(_COLOURS))
            style = _STYLES[turn % len(_STYLES)]
            _draw(axes, tag, act, list(seeds.values()), _COLOURS[colour], style)
        axes.set_xlabel("optimizer step")
        axes.set_title(tag, fontsize="medium")
        axes.grid(alpha=0.3)
    panels[0].legend(fontsize="small", ncols=1 + len(groups) // 9)
    return figure


def _draw(axes: Axes, tag: str, act: str, runs: Sequence[Run], colour: str, style: str) -> None:
    seen = (_finite(run.series.get(tag, {})) for run in runs)
    lines = [smooth(line) for line in seen if line]
    for line in lines:
        axes.plot(list(line), list(line.values()), color=colour, linewidth=0.6, alpha=0.6)
    steps, means, bands = mean_and_band(lines)
    label = f"{act} ({len(lines)} run{'s' if len(lines) != 1 else ''})"
    axes.plot(steps, means, style, color=colour, linewidth=1.8, label=label)
    if len(lines) > 1:
        low = [mean - band for mean, band in zip(means, bands, strict=True)]
        high = [mean + band for mean, band in zip(means, bands, strict=True)]
        axes.fill_between(steps, low, high, color=colour, alpha=0.2, linewidth=0)


def _finite(values: Series) -> Series:
    return {step: value for step, value in values.items() if math.isfinite(value)}


def mean_and_band(
    lines: Sequence[Series],
) -> tuple[list[int], list[float], list[float]]:
    """Return the steps that all lines have, the means there, and the standard deviations.

    Where a run has ended, the mean of the rest would jump: it ends there.
    """
    shared = sorted(set.intersection(*map(set, lines))) if lines else []
    values = [[line[step] for line in lines] for step in shared]
    bands = [statistics.stdev(each) if len(each) > 1 else 0.0 for each in values]
    return shared, [statistics.fmean(each) for each in values], bands


def smooth(values: Series) -> Series:
    """Return at each point the mean over the last hundredth of all; short lines stay the same."""
    window = max(1, len(values) // _POINTS)
    numbers = list(values.values())
    starts = (max(0, i + 1 - window) for i in range(len(numbers)))
    means = (statistics.fmean(numbers[start : i + 1]) for i, start in enumerate(starts))
    return dict(zip(values, means, strict=True))
