"""The health of a network as a result: scalars, table and figure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from polyvision.analysis.health.measure import Health
from polyvision.analysis.result import Result, text_table

__all__ = ["health_result"]


def health_result(health: Health) -> Result:
    """Turn measurements into a result.

    Tags: ``<site>/zero_share`` and the like for activations, ``<layer>/largest`` and the like for
    states, ``<matrix>/mean`` for weights, ``<layer>/grad_norm``, ``<network>/sparsity``, and
    ``mean/...`` over all of a kind.
    """
    scalars: dict[str, float] = {}
    for group in (health.sites, health.layers, health.weights):
        for name, values in group.items():
            scalars |= {f"{name}/{key}": value for key, value in values.items()}
        for key in next(iter(group.values()), {}):
            column = [v for v in _column(group, key) if math.isfinite(v)]
            if column and group is health.sites:
                scalars[f"mean/{key}"] = sum(column) / len(column)
    scalars |= {f"{name}/grad_norm": value for name, value in health.gradients.items()}
    if health.sparsity is not None:
        for name, value in health.sparsity["layers"].items():
            scalars[f"{name}/sparsity"] = value
        scalars["mean/sparsity"] = health.sparsity["sparsity"]
    data: dict[str, Any] = {**dataclasses.asdict(health), "first_massive": health.first_massive}
    return Result("health", scalars, data, _figure(health), _text(health))


def _column(group: Mapping[str, Mapping[str, float]], key: str) -> list[float]:
    return [values[key] for values in group.values()]


def _text(health: Health) -> str:
    parts = []
    for title, group in (
        ("activation", health.sites),
        ("state after", health.layers),
        ("weights", health.weights),
    ):
        if group:
            keys = list(next(iter(group.values())))
            rows = [[name, *(values[key] for key in keys)] for name, values in group.items()]
            parts.append(text_table([title, *keys], rows))
    if health.gradients:
        parts.append(text_table(["gradient of", "norm"], list(health.gradients.items())))
    if health.sparsity is not None:
        s = health.sparsity
        parts.append(
            f"{100 * s['sparsity']:.1f} % of the hidden neurons can be silenced for at most "
            f"{s['percent']:g} % more perplexity (CETT {s['cett']:.3f}, loss {s['loss_dense']:.4f} "
            f"-> {s['loss_sparse']:.4f})"
        )
    parts.append(f"first massive activation: {health.first_massive or 'none'}")
    return "\n\n".join(parts)


def _figure(health: Health) -> Figure:
    figure = Figure(figsize=(9.5, 6), layout="constrained")
    (deaths, shape), (sizes, last) = figure.subplots(2, 2)
    for key in ("zero_share", "dead_units", "dynamic_dead"):
        _draw(deaths, _column(health.sites, key), key.replace("_", " "))
    if health.sparsity is not None:
        share = list(health.sparsity["layers"].values())
        _draw(deaths, share, f"PPL-{health.sparsity['percent']:g} % sparsity")
    deaths.set_ylim(-0.03, 1.03)
    _label(deaths, "activation site", "share")
    _draw(shape, _column(health.sites, "kurtosis"), "activations")
    _draw(shape, _column(health.layers, "kurtosis"), "states")
    shape.set_yscale("symlog")
    _label(shape, "site or layer", "excess kurtosis")
    for key in ("largest", "median"):
        _draw(sizes, _column(health.layers, key), f"{key} |h|")
    _log_scale(sizes)
    _label(sizes, "layer", "state after the layer")
    if health.gradients:
        _draw(last, list(health.gradients.values()), "gradient norm")
        _log_scale(last)
        _label(last, "layer, in the order of the parameters", "gradient norm")
    else:
        _draw(last, _column(health.weights, "mean"), "mean weight")
        _label(last, "matrix", "mean weight after the activation")
    return figure


def _draw(axes: Axes, values: Sequence[float], label: str) -> None:
    if values:
        axes.plot(range(1, len(values) + 1), values, "o-", markersize=3, label=label)


def _log_scale(axes: Axes) -> None:
    """Make the scale logarithmic, which needs a value above 0."""
    seen = [float(value) for line in axes.lines for value in np.asarray(line.get_ydata())]
    if any(0 < value < math.inf for value in seen):
        axes.set_yscale("log")


def _label(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small")
