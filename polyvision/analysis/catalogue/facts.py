"""What can be said of any activation: curve, parameters, range, bytes; as text or picture."""

from __future__ import annotations

import dataclasses
import inspect
import io
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from polyvision.activations import activation_info, activation_origin, create_activation
from polyvision.activations.registry import Kind
from polyvision.analysis.catalogue.contract import fp16_limit, kept_bytes, subject_of
from polyvision.errors import PolyvisionError

__all__ = ["Facts", "curve", "draw", "facts_of", "in_terminal", "picture", "save"]

_FROM, _TO, _POINTS = -4.0, 4.0, 161


@dataclasses.dataclass(frozen=True)
class Facts:
    """What is known of one activation.

    Attributes:
        name: its registered name.
        kind: with the given options.
        formula: one line of plain text.
        source: author, year and link.
        doc: the docstring of its class or function.
        options: what a user may set, with the values that it has here.
        parameters: the shape and first values of each learned tensor.
        fp16: a power of two up to which fp16 inputs give finite outputs; infinite for all.
        kept: bytes of each fp32 element that are kept for the backward pass; ReLU keeps 4.
        origin: the module or file of a user that registered it; None for one of this project.
    """

    name: str
    kind: Kind
    formula: str
    source: str
    doc: str
    options: dict[str, Any]
    parameters: dict[str, str]
    fp16: float
    kept: float
    origin: str | None

    @property
    def fp16_text(self) -> str:
        """The range in fp16, in words."""
        return "all" if math.isinf(self.fp16) else f"|x| <= {self.fp16:g}"


def facts_of(name: str, options: Mapping[str, Any] | None = None) -> Facts:
    """Measure one activation.

    Raises:
        PolyvisionError: there is no activation of that name, or an option does not fit.
    """
    info, given = activation_info(name), dict(options or {})
    module = create_activation(name, **given)
    subject = subject_of(name, **given)
    parameters = {}
    for key, parameter in module.named_parameters():
        values = [f"{v:.4g}" for v in parameter.detach().flatten()[:8].tolist()]
        more = ", ..." if parameter.numel() > 8 else ""
        parameters[key] = f"{tuple(parameter.shape)}: {', '.join(values)}{more}"
    return Facts(
        name=name,
        kind=info.kind_with(given),
        formula=given.get("f", info.formula) if name == "formula" else info.formula,
        source=info.source,
        doc=inspect.getdoc(info.factory) or "",
        options=dataclasses.asdict(info.options()) | given,
        parameters=parameters,
        fp16=fp16_limit(subject),
        kept=kept_bytes(subject),
        origin=activation_origin(name),
    )


def curve(name: str, options: Mapping[str, Any] | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return points, values and derivatives of an activation in eval mode.

    A gated one is drawn over its gate, with 1 as the other input. A normalising one maps the points
    as one row; its derivative is the slope of the curve that comes of it.
    """
    module = create_activation(name, **(options or {})).double().eval()
    x = torch.linspace(_FROM, _TO, _POINTS, dtype=torch.float64)
    kind = activation_info(name).kind_with(options or {})
    others = [torch.ones_like(x)[None]] if kind == "gated" else []
    row = x.clone()[None].requires_grad_()
    y = module(row, *others)
    if kind == "normalising":
        step = (_TO - _FROM) / (_POINTS - 1)
        slope = torch.gradient(y.detach()[0], spacing=step)[0]
    else:
        (slope,) = torch.autograd.grad(y.sum(), row)
    return x, y.detach()[0], slope.detach().reshape(-1)


def draw(name: str, options: Mapping[str, Any] | None = None) -> Figure:
    """Draw value and derivative."""
    x, y, slope = curve(name, options)
    figure = Figure(figsize=(3.2, 2.4), layout="constrained")
    axes = figure.add_subplot()
    axes.axhline(0, color="0.8", linewidth=0.8)
    axes.axvline(0, color="0.8", linewidth=0.8)
    axes.plot(x.numpy(), slope.numpy(), "--", color="C1", linewidth=1.2, label="derivative")
    axes.plot(x.numpy(), y.numpy(), color="C0", linewidth=1.8, label="value")
    axes.set_ylim(max(-4.0, float(y.min()) - 0.5), min(6.0, float(y.max()) + 0.5))
    axes.set_title(name, fontsize=9)
    axes.tick_params(labelsize=7)
    axes.legend(fontsize=6, frameon=False)
    return figure


def picture(figure: Figure, kind: str = "svg") -> bytes:
    """Return a figure as the bytes of a file, the same for the same figure."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else {})
    return buffer.getvalue()


def save(figure: Figure, path: Path) -> None:
    """Write a figure as PNG or SVG.

    Raises:
        PolyvisionError: it has another ending, or cannot be written.
    """
    kind = path.suffix.lower().removeprefix(".")
    if kind not in ("png", "svg"):
        raise PolyvisionError(f"--output {path}: take a name that ends in .png or .svg")
    try:
        path.write_bytes(picture(figure, kind))
    except OSError as error:
        raise PolyvisionError(f"--output: cannot write {path}: {error.strerror}") from error


def in_terminal(
    name: str, options: Mapping[str, Any] | None = None, *, width: int = 64, height: int = 17
) -> str:
    """Draw value (``*``) and derivative (``.``) with characters."""
    x, y, slope = curve(name, options)
    low, high = max(-4.0, float(y.min())), min(6.0, float(y.max()))
    low, high = min(low, -0.5), max(high, 0.5)
    rows = [[" "] * width for _ in range(height)]

    def row_of(value: float) -> int:
        return round((high - value) / (high - low) * (height - 1))

    rows[row_of(0.0)] = ["-"] * width
    middle = round(-_FROM / (_TO - _FROM) * (width - 1))
    for line in rows:
        line[middle] = "|"
    for values, mark in ((slope, "."), (y, "*")):
        for column in range(width):
            value = float(values[round(column / (width - 1) * (len(x) - 1))])
            if low <= value <= high:
                rows[row_of(value)][column] = mark
    labels = [f"{high:6.2f} ", *["       "] * (height - 2), f"{low:6.2f} "]
    lines = [label + "".join(line).rstrip() for label, line in zip(labels, rows, strict=True)]
    ends = f"{_FROM:g}".ljust(width - 2) + f"{_TO:g}"
    return "\n".join([*lines, f"       {ends}", "       * value   . derivative"])
