"""Figures for TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from matplotlib import colormaps
from matplotlib.figure import Figure
from torch import Tensor, nn

__all__ = ["activation_curves"]


def activation_curves(
    modules: Mapping[str, nn.Module], rows: Mapping[str, Tensor]
) -> Figure | None:
    """Draw each site's function over values that reached it, coloured by depth.

    Args:
        modules: the activations by site; those with two inputs are left out.
        rows: for each site a tensor (rows, features) of pre-activations. One row is drawn: there a
            normalising activation is a plain function of one variable too.

    Returns:
        The figure, or None when no site can be drawn.
    """
    curves = {name: _curve(modules[name], x) for name, x in rows.items() if name in modules}
    drawn = {name: curve for name, curve in curves.items() if curve is not None}
    if not drawn:
        return None
    figure = Figure(figsize=(6, 4.5), layout="constrained")
    axes = figure.subplots()
    for i, (name, (x, y)) in enumerate(drawn.items()):
        colour = colormaps["viridis"](i / max(len(drawn) - 1, 1))
        label = name if i in (0, len(drawn) - 1) else None
        axes.plot(x.tolist(), y.tolist(), color=colour, linewidth=1, label=label)
    axes.axline((0, 0), slope=1, color="gray", linewidth=0.8, linestyle=":", label="identity")
    axes.set_xlabel("pre-activation (one feature vector per site)")
    axes.set_ylabel("activation")
    axes.legend(fontsize="small", title="first and last site")
    return figure


def _curve(module: nn.Module, rows: Tensor) -> tuple[Tensor, Tensor] | None:
    x = rows[0]
    # The feature dimension comes second whatever the site's dim is: (1, features) or NCHW 1x1.
    shaped = x.view(1, -1, 1, 1) if getattr(module, "dim", -1) == 1 else x.view(1, -1)
    with torch.no_grad():
        try:
            y = module(shaped).flatten()
        except TypeError:  # a gated activation takes two inputs
            return None
    order = x.argsort()
    return x[order].cpu(), y[order].float().cpu()
