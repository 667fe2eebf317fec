"""Where fp16 overflows: closed forms, and the same points found by search over all fp16 numbers.

A result of 65520 or more rounds to infinity: 65504 is the largest fp16 number and 65520 the middle
between it and 65536, where ties go to the even neighbour (IEEE 754-2008, section 4.3.1).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from polyvision.analysis.stability.contenders import CONTENDERS, EPS

__all__ = ["LIMIT", "THRESHOLDS", "Threshold", "neighbours", "root"]

LIMIT = 65520.0


@dataclasses.dataclass(frozen=True)
class Threshold:
    """An overflow point.

    Attributes:
        what: which quantity overflows, for people.
        condition: the equation that it solves, x being a positive input.
        exact: its solution in real numbers.
        breaks: tells, for a batch of fp16 inputs, which of them overflow in real fp16 arithmetic.
        falling: the overflow begins below the point, not above it.
    """

    what: str
    condition: str
    exact: float
    breaks: Callable[[Tensor], Tensor]
    falling: bool = False


def root(function: Callable[[float], float]) -> float:
    """Solve ``function(x) = LIMIT`` on [1, LIMIT] for an increasing function, by bisection.

    Example:
        >>> round(root(lambda x: x**3), 3)
        40.314
    """
    low, high = 1.0, LIMIT
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < LIMIT else (low, middle)
    return high


def neighbours(threshold: Threshold) -> tuple[float, float]:
    """Return the fp16 numbers on both sides of the point at which overflow begins in practice.

    The search goes from 1 outwards, upwards or, for a falling threshold, downwards.

    Returns:
        The last number that is safe with all before it, and the next one, which is not.
    """
    numbers = torch.arange(1, 0x7C00, dtype=torch.int16).view(torch.float16)  # all, ascending
    path = numbers[numbers <= 1].flip(0) if threshold.falling else numbers[numbers >= 1]
    broken = threshold.breaks(path)
    first = int(broken.int().argmax())
    assert broken[first]
    assert first > 0
    return path[first - 1].item(), path[first].item()


def _output(name: str, form: str) -> Callable[[Tensor], Tensor]:
    """Tell which inputs give a non-finite output."""
    contender = CONTENDERS[name]
    function = contender.plain if form == "plain" else contender.ours
    dtype = torch.float16 if form == "plain" else torch.float32

    def breaks(x: Tensor) -> Tensor:
        y = function(x[:, None].expand(-1, 2), contender.weight(dtype))
        return ~y[:, 0].isfinite()

    return breaks


def _dx(name: str, form: str) -> Callable[[Tensor], Tensor]:
    """Tell which inputs give a non-finite gradient for an incoming gradient of 1."""
    contender = CONTENDERS[name]
    function = contender.plain if form == "plain" else contender.ours
    dtype = torch.float16 if form == "plain" else torch.float32

    def breaks(x: Tensor) -> Tensor:
        x = x[:, None].expand(-1, 2).clone().requires_grad_()
        y = function(x, contender.weight(dtype))
        (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
        return ~dx[:, 0].isfinite()

    return breaks


def _mean_square(power: int) -> Callable[[Tensor], Tensor]:
    """Tell which constant rows have an infinite mean of x^(2 power)."""
    return lambda x: (x**power).square().isinf()


def _poly_relu(order: int) -> Callable[[float], float]:
    return lambda x: sum(x**i for i in range(1, order + 1)) / order


def _slope(order: int) -> Callable[[float], float]:
    return lambda x: sum(i * x ** (i - 1) for i in range(1, order + 1)) / order


THRESHOLDS: tuple[Threshold, ...] = (
    Threshold("x^2", "x^2 = L", root(lambda x: x**2), lambda x: (x**2).isinf()),
    Threshold("x^3", "x^3 = L", root(lambda x: x**3), lambda x: (x**3).isinf()),
    Threshold("x^4", "x^4 = L", root(lambda x: x**4), lambda x: (x**4).isinf()),
    Threshold("mean of x^6 in plain PolyNorm", "x^6 = L", root(lambda x: x**6), _mean_square(3)),
    Threshold("mean of x^4 in plain PolyNorm", "x^4 = L", root(lambda x: x**4), _mean_square(2)),
    Threshold(
        "plain PolyNorm, output", "x^3 = L", root(lambda x: x**3), _output("polynorm", "plain")
    ),
    Threshold(
        "plain PolyNorm, dx of small rows",
        "(x^6 + eps)^(-3/2) = L",
        (LIMIT ** (-2 / 3) - EPS) ** (1 / 6),
        _dx("polynorm", "plain"),
        falling=True,
    ),
    *(
        Threshold(
            f"plain PolyReLU of order {r}, output",
            f"x^{r} = L",
            root(lambda x, r=r: x**r),  # type: ignore[misc]
            _output(f"polyrelu-{r}", "plain"),
        )
        for r in (2, 3, 4)
    ),
    *(
        Threshold(
            f"our PolyReLU of order {r}, output",
            " + ".join(["x", *(f"x^{i}" for i in range(2, r + 1))]) + f" = {r} L",
            root(_poly_relu(r)),
            _output(f"polyrelu-{r}", "ours"),
        )
        for r in (2, 3, 4)
    ),
    *(
        Threshold(
            f"our PolyReLU of order {r}, dx for dy = 1",
            " + ".join(["1", *(f"{i} x^{i - 1}" for i in range(2, r + 1))]) + f" = {r} L",
            root(_slope(r)),
            _dx(f"polyrelu-{r}", "ours"),
        )
        for r in (3, 4)
    ),
    Threshold("ReLU^2, output", "x^2 = L", root(lambda x: x**2), _output("relu2", "ours")),
    Threshold(
        "SwiGLU of equal inputs, output",
        "x^2 sigmoid(x) = L",
        root(lambda x: x**2),
        _output("swiglu", "ours"),
    ),
)
