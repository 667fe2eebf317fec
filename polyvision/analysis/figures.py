"""Figures for TensorBoard."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from matplotlib.textpath import TextPath, text_to_path
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


# One set of axes holds all panels: 49 of their own would take ten times as long to draw.
_STEP = (1.32, 1.5)  # from panel to panel, whose sides are 1
_STYLES: dict[str, dict[str, Any]] = {
    "ReLU": {"color": "0.65", "linewidth": 0.9},
    "GELU": {"color": "0.65", "linewidth": 0.9, "linestyle": ":"},
    "initial": {"color": "tab:orange", "linewidth": 1.1, "linestyle": "--"},
    "learned": {"color": "tab:blue", "linewidth": 1.3},
}


def _figure(curves: Mapping[str, Curve]) -> Figure:
    columns = math.ceil(math.sqrt(len(curves)))
    lines = math.ceil(len(curves) / columns)
    width, height = max(1.5 * columns, 4.0) + 0.3, 1.5 * lines + 0.4
    figure = Figure(figsize=(width, height), dpi=80)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(-0.2, max(columns, 4.0 / 1.5) * _STEP[0] - 0.2)
    axes.set_ylim(-_STEP[1] * (lines - 1) - 0.3, 1.6)
    strokes: dict[str, list[Tensor]] = {style: [] for style in _STYLES}
    frames: list[Tensor] = []
    labels: list[Path] = []
    for i, (name, curve) in enumerate(curves.items()):
        corner = torch.tensor([_STEP[0] * (i % columns), -_STEP[1] * (i // columns)])
        panel = _Panel(corner, curve)
        frames += [panel.frame(), *panel.zeros()]
        for style, y in _lines(curve).items():
            strokes[style].append(panel.place(curve.x, y))
        labels += panel.label(name)
    axes.add_collection(LineCollection(_arrays(frames), colors="0.85", linewidths=0.6))
    for style, paths in strokes.items():
        axes.add_collection(LineCollection(_arrays(paths), label=style, **_STYLES[style]))
    outlines = Path.make_compound_path(*labels)
    # Not add_patch, which would look for the bounds of every stroke.
    axes.add_artist(PathPatch(outlines, facecolor="black", edgecolor="none", snap=False))
    axes.legend(loc="upper left", ncols=4, fontsize="small", frameon=False, borderaxespad=0.2)
    return figure


def _lines(curve: Curve) -> dict[str, Tensor]:
    x = curve.x
    return {
        "ReLU": F.relu(x),
        "GELU": F.gelu(x),
        "initial": curve.initial,
        "learned": curve.learned,
    }


def _arrays(paths: list[Tensor]) -> list[Any]:
    return [path.numpy() for path in paths]


class _Panel:
    """A unit square that holds one curve; its range is that of the site's own two functions.

    ReLU and GELU may leave it.
    """

    def __init__(self, corner: Tensor, curve: Curve) -> None:
        self.corner = corner
        own = torch.cat([curve.learned, curve.initial])
        own = own[own.isfinite()]
        self.x = _range(curve.x)
        self.y = _range(own if own.numel() else torch.zeros(1))

    def place(self, x: Tensor, y: Tensor) -> Tensor:
        """Map a line into the panel, (points, 2); what lies outside becomes a gap."""
        u = (x - self.x[0]) / (self.x[1] - self.x[0])
        v = (y - self.y[0]) / (self.y[1] - self.y[0])
        v = torch.where((v >= -0.001) & (v <= 1.001), v, torch.nan)
        return torch.stack([u, v], dim=1) + self.corner

    def frame(self) -> Tensor:
        """Return the outline."""
        return self.corner + torch.tensor([[0.0, 0], [1, 0], [1, 1], [0, 1], [0, 0]])

    def zeros(self) -> list[Tensor]:
        """Return the lines x = 0 and y = 0 where they cross the panel."""
        found = []
        if self.x[0] < 0 < self.x[1]:
            found.append(self.place(torch.zeros(2), torch.tensor(self.y)))
        if self.y[0] < 0 < self.y[1]:
            found.append(self.place(torch.tensor(self.x), torch.zeros(2)))
        return found

    def label(self, name: str) -> list[Path]:
        """Return the outlines of the site's name, above, and of the ends of both ranges, below."""
        left, bottom = self.corner.tolist()
        ranges = {"x": self.x, "y": self.y}
        ends = "   ".join(f"{axis} {low:.3g} to {high:.3g}" for axis, (low, high) in ranges.items())
        middle = left + 0.5
        return [_letters(name, 7, middle, bottom + 1.04), _letters(ends, 6, middle, bottom - 0.11)]


def _letters(text: str, points: float, middle: float, base: float) -> Path:
    """Return the outline of a line of text, centred at ``middle``.

    Most of the time of a figure with hundreds of letters goes into ``axes.text``; filling outlines
    that are made once for each letter takes a fraction of it.
    """
    letters = [_letter(letter) for letter in text]
    scale = points / 72 * np.array(_STEP) / 1.5
    ends = list(itertools.accumulate((width for _, width in letters), initial=0.0))
    start = middle - ends[-1] * scale[0] / 2
    drawn = [
        Path(np.asarray(path.vertices) * scale + np.array([start + x * scale[0], base]), path.codes)
        for (path, _), x in zip(letters, ends, strict=False)
        if path.codes is not None
    ]
    return Path.make_compound_path(*drawn)


@functools.cache
def _letter(letter: str) -> tuple[Path, float]:
    """Return the outline of a letter and its width, both for a font size of 1."""
    font = FontProperties()
    width, _, _ = text_to_path.get_text_width_height_descent(letter, font, False)
    width /= font.get_size_in_points()
    if letter.isspace():  # matplotlib fails on an outline without points
        return Path(np.empty((0, 2))), width
    outline = TextPath((0, 0), letter, size=1)
    return Path(outline.vertices, outline.codes), width


def _range(values: Tensor) -> tuple[float, float]:
    """Return least and largest value, apart even where all are equal."""
    low, high = float(values.min()), float(values.max())
    return (low, high) if high > low else (low - 0.5, low + 0.5)
