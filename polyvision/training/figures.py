"""Figures for TensorBoard."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

__all__ = ["SITES_PER_FIGURE", "Curve", "activation_curves", "site_curve"]

SITES_PER_FIGURE = 56
_COLUMNS = 8
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
        x = rows[order[len(order) // 2]].sort().values
    else:
        x = torch.linspace(float(rows.min()), float(rows.max()), _POINTS, device=rows.device)
    values = (_apply(each.to(x.device), x).float().cpu() for each in (module, initial))
    return Curve(x.cpu(), *values)


def _apply(module: nn.Module, x: Tensor) -> Tensor:
    # The feature dimension comes second whatever the site's dim is: (1, features) or NCHW 1x1.
    shaped = x.view(1, -1, 1, 1) if getattr(module, "dim", -1) == 1 else x.view(1, -1)
    with torch.no_grad():
        try:
            y: Tensor = module(shaped)
        except TypeError:  # a gated activation takes two inputs
            y = module(shaped, torch.ones_like(shaped))
    return y.flatten()


def _figure(curves: Mapping[str, Curve]) -> Figure:
    columns = min(_COLUMNS, len(curves))
    lines = math.ceil(len(curves) / columns)
    figure = Figure(figsize=(max(1.7 * columns, 5), 1.4 * lines + 0.7), dpi=80)
    panels = figure.subplots(lines, columns, squeeze=False).flatten()
    for axes, (name, curve) in zip(panels, curves.items(), strict=False):
        _draw(axes, name, curve)
    for axes in panels[len(curves) :]:
        axes.set_axis_off()
    # Placed by hand: the layout engines of matplotlib take longer than all the rest.
    top = 1 - 0.6 / float(figure.get_figheight())
    figure.subplots_adjust(left=0.04, right=0.99, bottom=0.06, top=top, hspace=0.75, wspace=0.3)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncols=4, fontsize="small", frameon=False)
    return figure


def _draw(axes: Axes, name: str, curve: Curve) -> None:
    x = curve.x
    lines = {
        "ReLU": (F.relu(x), {"color": "0.7", "linewidth": 0.8}),
        "GELU": (F.gelu(x), {"color": "0.7", "linewidth": 0.8, "linestyle": ":"}),
        "initial": (curve.initial, {"color": "tab:orange", "linewidth": 1, "linestyle": "--"}),
        "learned": (curve.learned, {"color": "tab:blue", "linewidth": 1.2}),
    }
    for label, (y, style) in lines.items():
        axes.plot(x.numpy(), y.numpy(), label=label, **style)
    own = torch.cat([curve.learned, curve.initial])
    own = own[own.isfinite()]
    if own.numel() and own.min() < own.max():  # ReLU and GELU may leave the panel
        margin = 0.15 * float(own.max() - own.min())
        axes.set_ylim(float(own.min()) - margin, float(own.max()) + margin)
    axes.set_title(name, fontsize=6, pad=2)
    axes.tick_params(labelsize=5, length=2, pad=1)
    axes.locator_params(nbins=3)
