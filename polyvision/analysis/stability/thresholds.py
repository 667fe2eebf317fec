"""Where fp16 overflows: closed forms, and the same points found by search over all fp16 numbers.

A result of 65520 or more rounds to infinity: 65504 is the largest fp16 number and 65520 the middle
between it and 65536, where ties go to the even neighbour (IEEE 754-2008, section 4.3.1).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from scipy.optimize import brentq
from torch import Tensor

from polyvision.analysis.stability.overflow import CONTENDERS, EPS

__all__ = ["LIMIT", "THRESHOLDS", "Threshold", "neighbours"]

LIMIT = 65520.0


@dataclasses.dataclass(frozen=True)
class Threshold:
    """An overflow point.

    Attributes:
        what: which quantity overflows, for people.
        condition: the equation that it solves, x being a positive input.
        exact: its solution in real numbers.
        values: computes the quantity, or what makes it overflow, of a batch of fp16 inputs in real
            fp16 arithmetic.
        falling: the overflow begins below the point, not above it.
    """

    what: str
    condition: str
    exact: float
    values: Callable[[Tensor], Tensor]
    falling: bool = False


def neighbours(threshold: Threshold) -> tuple[float, float]:
    """Return the fp16 numbers on both sides of the point at which overflow begins in practice.

    The search goes from 1 outwards, upwards or, for a falling threshold, downwards.

    Returns:
        The last number that is safe with all before it, and the next one, which is not.
    """
    numbers = torch.arange(1, 0x7C00, dtype=torch.int16).view(torch.float16)  # all, ascending
    path = numbers[numbers <= 1].flip(0) if threshold.falling else numbers[numbers >= 1]
    broken = ~threshold.values(path).isfinite()
    first = int(broken.int().argmax())
    assert broken[first]
    assert first > 0
    return path[first - 1].item(), path[first].item()


def _output(name: str, form: str) -> Callable[[Tensor], Tensor]:
    """Return the function from inputs to the outputs of a contender on constant rows."""

    def values(x: Tensor) -> Tensor:
        function, weight = CONTENDERS[name].form(form, torch.float16)
        return function(x[:, None].expand(-1, 2), weight)[:, 0]

    return values


def _dx(name: str, form: str) -> Callable[[Tensor], Tensor]:
    """Return the function from inputs to their gradients for an incoming gradient of 1."""

    def values(x: Tensor) -> Tensor:
        function, weight = CONTENDERS[name].form(form, torch.float16)
        rows = x[:, None].expand(-1, 2).clone().requires_grad_()
        (dx,) = torch.autograd.grad(function(rows, weight).sum(), rows)
        return dx[:, 0]

    return values


def _root(function: Callable[[float], float]) -> float:
    """Solve ``function(x) = LIMIT`` on [1, LIMIT] for an increasing function."""
    return float(brentq(lambda x: function(x) - LIMIT, 1.0, LIMIT, xtol=1e-13))


def _power(what: str, power: int, values: Callable[[Tensor], Tensor]) -> Threshold:
    return Threshold(what, f"x^{power} = L", LIMIT ** (1 / power), values)


def _poly_relu(order: int) -> Threshold:
    terms = " + ".join(["x", *(f"x^{i}" for i in range(2, order + 1))])
    return Threshold(
        f"our PolyReLU of order {order}, output",
        f"{terms} = {order} L",
        _root(lambda x: sum(x**i for i in range(1, order + 1)) / order),
        _output(f"polyrelu-{order}", "ours"),
    )


def _poly_relu_dx(order: int) -> Threshold:
    terms = " + ".join(["1", *(f"{i} x^{i - 1}" for i in range(2, order + 1))])
    return Threshold(
        f"our PolyReLU of order {order}, dx for dy = 1",
        f"{terms} = {order} L",
        _root(lambda x: sum(i * x ** (i - 1) for i in range(1, order + 1)) / order),
        _dx(f"polyrelu-{order}", "ours"),
    )


THRESHOLDS: tuple[Threshold, ...] = (
    _power("x^2", 2, lambda x: x**2),
    _power("x^3", 3, lambda x: x**3),
    _power("x^4", 4, lambda x: x**4),
    _power("mean of x^6 in plain PolyNorm", 6, lambda x: (x**3).square()),
    _power("mean of x^4 in plain PolyNorm", 4, lambda x: (x**2).square()),
    _power("plain PolyNorm, output", 3, _output("polynorm", "plain")),
    Threshold(
        "plain PolyNorm, dx of small rows",
        "(x^6 + eps)^(-3/2) = L",
        (LIMIT ** (-2 / 3) - EPS) ** (1 / 6),
        _dx("polynorm", "plain"),
        falling=True,
    ),
    *(
        _power(f"plain PolyReLU of order {r}, output", r, _output(f"polyrelu-{r}", "plain"))
        for r in (2, 3, 4)
    ),
    *map(_poly_relu, (2, 3, 4)),
    *map(_poly_relu_dx, (3, 4)),
    _power("ReLU^2, output", 2, _output("relu2", "ours")),
    Threshold(
        "SwiGLU of equal inputs, output",
        "x^2 sigmoid(x) = L",
        LIMIT**0.5,
        _output("swiglu", "ours"),
    ),
)
