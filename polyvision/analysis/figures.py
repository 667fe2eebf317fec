"""Learned activation functions drawn beside their initial ones, for TensorBoard."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from torch import Tensor, nn

from polyvision.activations import activation_kind

__all__ = ["SITES_PER_FIGURE", "Curve", "activation_curves", "site_curve"]

SITES_PER_FIGURE = 64
_POINTS = 101


@dataclasses.dataclass(frozen=True)
class Curve:
    """The function at one site: three tensors of shape (points,), ``x`` ascending.

    Attributes:
        x: pre-activations.
        learned: what the site makes of them now.
        initial: what it made of them before training.
    """

    x: Tensor
    learned: Tensor
    initial: Tensor


def activation_curves(
    modules: Mapping[str, nn.Module],
    initial: Mapping[str, nn.Module],
    rows: Mapping[str, Tensor],
) -> list[Figure]:
    """Draw each site's function over the pre-activations that reached it, beside its initial one.

    ReLU and GELU are drawn for scale. At most ``SITES_PER_FIGURE`` sites share a figure.

    Args:
        modules: the activations by site.
        initial: the same before training.
        rows: for each site a tensor (rows, features) of pre-activations.
    """
    seen = {name: x for name, x in rows.items() if name in modules and bool(x.isfinite().all())}
    curves = {name: site_curve(modules[name], initial[name], x) for name, x in seen.items()}
    names = list(curves)
    pages = [names[i : i + SITES_PER_FIGURE] for i in range(0, len(names), SITES_PER_FIGURE)]
    return [_figure({name: curves[name] for name in page}) for page in pages]


def site_curve(module: nn.Module, initial: nn.Module, rows: Tensor) -> Curve:
    """Evaluate a site and its initial state where its pre-activations lie.

    A pointwise activation is evaluated between the least and the largest of them. A normalising one
    is a plain function of one variable only within a feature vector: it is evaluated at the values
    of one, the vector whose root mean square is the median. A gated one is evaluated along its
    gate, the other input being 1.

    Args:
        module: the activation at the site.
        initial: the same before training.
        rows: finite pre-activations, (rows, features).
    """
    if hasattr(module, "dim"):
        order = rows.square().mean(1).argsort()
        x = rows[order[len(order) // 2]]
    else:
        x = torch.linspace(float(rows.min()), float(rows.max()), _POINTS, device=rows.device)
    values = [_apply(each.to(x.device), x).float().cpu() for each in (module, initial)]
    # Sorted afterwards: some activations tell features apart by their place.
    x, ascending = x.cpu().sort()
    return Curve(x, *(y[ascending] for y in values))


def _apply(module: nn.Module, x: Tensor) -> Tensor:
    # The feature dimension comes second whatever the site's dim is: (1, features) or NCHW 1x1.
    shaped = x.reshape(1, -1, 1, 1) if getattr(module, "dim", -1) == 1 else x.reshape(1, -1)
    inputs = [shaped]
    if activation_kind(module) == "gated":
        inputs.append(torch.ones_like(shaped))
    if getattr(module, "groups", None):
        # Of coefficients that differ from expert to expert, those of the first one.
        inputs.append(torch.zeros(1, dtype=torch.int64, device=x.device))
    training = module.training
    module.eval()  # what is random in training is a function of x only now
    with torch.no_grad():
        y: Tensor = module(*inputs)
    module.train(training)
    return y.flatten()


# All panels lie in one set of axes: a subplot for each would take twice as long to draw.
_STEP = (1.32, 1.5)  # from panel to panel, whose sides are 1
_STYLES: dict[str, dict[str, Any]] = {
    "frame": {"color": "0.85", "linewidth": 0.6},
    "ReLU": {"color": "0.65", "linewidth": 0.9},
    "GELU": {"color": "0.65", "linewidth": 0.9, "linestyle": ":"},
    "initial": {"color": "tab:orange", "linewidth": 1.1, "linestyle": "--"},
    "learned": {"color": "tab:blue", "linewidth": 1.3},
}


def _figure(curves: Mapping[str, Curve]) -> Figure:
    columns = math.ceil(math.sqrt(len(curves)))
    lines = math.ceil(len(curves) / columns)
    figure = Figure(figsize=(max(1.5 * columns, 4.0) + 0.3, 1.5 * lines + 0.4), dpi=80)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(-0.2, max(columns, 4.0 / 1.5) * _STEP[0] - 0.2)
    axes.set_ylim(-_STEP[1] * (lines - 1) - 0.3, 1.6)
    strokes: dict[str, list[Any]] = {style: [] for style in _STYLES}
    for i, (name, curve) in enumerate(curves.items()):
        left, bottom = _STEP[0] * (i % columns), -_STEP[1] * (i // columns)
        x, y = _range(curve.x), _range(torch.cat([curve.learned, curve.initial]))
        panel = {
            "frame": _frame(x, y),
            "ReLU": torch.stack([curve.x, F.relu(curve.x)], dim=1),
            "GELU": torch.stack([curve.x, F.gelu(curve.x)], dim=1),
            "initial": torch.stack([curve.x, curve.initial], dim=1),
            "learned": torch.stack([curve.x, curve.learned], dim=1),
        }
        low = torch.tensor([x[0], y[0]])
        size = torch.tensor([x[1], y[1]]) - low
        for style, points in panel.items():
            unit = (points - low) / size
            inside = (unit[:, 1:] >= -0.001) & (unit[:, 1:] <= 1.001)  # else a gap
            placed = torch.where(inside, unit, torch.nan) + torch.tensor([left, bottom])
            strokes[style].append(placed.numpy())
        ends = f"x {x[0]:.3g} to {x[1]:.3g}   y {y[0]:.3g} to {y[1]:.3g}"
        axes.text(left + 0.5, bottom + 1.04, name, fontsize=7, ha="center")
        axes.text(left + 0.5, bottom - 0.11, ends, fontsize=6, ha="center")
    for style, paths in strokes.items():
        label = None if style == "frame" else style
        axes.add_collection(LineCollection(paths, label=label, **_STYLES[style]), autolim=False)
    axes.legend(loc="upper left", ncols=4, fontsize="small", frameon=False, borderaxespad=0.2)
    return figure


def _frame(x: tuple[float, float], y: tuple[float, float]) -> Tensor:
    """Return the outline of a panel, and the lines x = 0 and y = 0 where they cross it."""
    outline = [(x[0], y[0]), (x[1], y[0]), (x[1], y[1]), (x[0], y[1]), (x[0], y[0])]
    gap = (math.nan, math.nan)
    zeros = [gap, (0.0, y[0]), (0.0, y[1])] if x[0] < 0 < x[1] else []
    zeros += [gap, (x[0], 0.0), (x[1], 0.0)] if y[0] < 0 < y[1] else []
    return torch.tensor(outline + zeros)


def _range(values: Tensor) -> tuple[float, float]:
    """Return the least and the largest finite value, apart even where all are equal."""
    finite = values[values.isfinite()]
    low, high = (float(finite.min()), float(finite.max())) if finite.numel() else (0.0, 0.0)
    return (low, high) if high > low else (low - 0.5, low + 0.5)
