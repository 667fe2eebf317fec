"""The formulas in float64, written without polyvision, and the comparison with them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# Relative root mean square error of the arithmetic, before the result is rounded to its dtype.
TOLERANCE = {
    torch.float64: 1e-14,
    torch.float32: 1e-6,
    torch.float16: 1e-6,
    torch.bfloat16: 1e-6,
}
# All different, so that none can stand for another.
WEIGHT = torch.tensor([0.7, -1.3, 0.45, 0.9, -0.35, 0.6, -0.8, 0.25])
BIAS = torch.tensor([0.3])


def norm_formula(
    x: Tensor, weight: Tensor, bias: Tensor | None, mul: Tensor | None = None, dim: int = -1,
    eps: float = 1e-6, rectify: bool = False,
) -> Tensor:  # fmt: skip
    x = torch.where(x <= 0, 0, x) if rectify else x
    y = 0
    for i, a in enumerate(weight, 1):
        y = y + a * x**i / torch.sqrt((x ** (2 * i)).mean(dim, keepdim=True) + eps)
    y = y if bias is None else y + bias[0]
    return y if mul is None else y * mul


def relu_formula(
    x: Tensor, weight: Tensor, bias: Tensor | None, slope: Tensor | None = None,
    mul: Tensor | None = None,
) -> Tensor:  # fmt: skip
    if slope is not None and slope.numel() > 1:
        slope = slope.view(-1, *[1] * (x.ndim - 2))
    base = torch.where(x <= 0, 0 if slope is None else slope * x, x)
    y = sum(a * base**i for i, a in enumerate(weight, 1))
    y = y if bias is None else y + bias[0]
    return y if mul is None else y * mul


def assert_close(value: Tensor, exact: Tensor, size: Tensor | None = None) -> None:
    """Allow the error of the arithmetic and 1.1 times that of rounding the exact value once.

    The first is relative to ``exact``, or to ``size`` where the terms of ``exact`` cancel.
    """
    rounding = (exact.to(value.dtype).double() - exact).norm()
    arithmetic = TOLERANCE[value.dtype] * (exact if size is None else size).norm()
    assert value.shape == exact.shape
    assert (value.double() - exact).norm() <= 1.1 * rounding + arithmetic


def evaluate(
    function: Callable[..., Tensor], inputs: list[Tensor | None], grad: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Return the value and the gradients of the inputs that are there."""
    leaves = [None if v is None else v.detach().requires_grad_() for v in inputs]
    y = function(*leaves)
    return y.detach(), list(torch.autograd.grad(y, [v for v in leaves if v is not None], grad))


def sum_of_sizes(
    formula: Callable[..., Tensor], inputs: list[Tensor | None], position: int, grad: Tensor
) -> Tensor:
    """Return what the gradient of a coefficient would be if no two of its terms cancelled."""
    value = inputs[position]
    directions = torch.eye(value.numel(), dtype=value.dtype).view(-1, *value.shape)

    def size(direction: Tensor) -> Tensor:
        def along(v: Tensor) -> Tensor:
            return formula(*inputs[:position], v, *inputs[position + 1 :])

        return (grad * torch.func.jvp(along, (value,), (direction,))[1]).abs().sum()

    return torch.func.vmap(size, chunk_size=64)(directions).view_as(value)


def size_of_dx(inputs: list[Tensor | None], grad: Tensor) -> Tensor:
    """Return the same for dx of PolyNorm over the last dimension."""
    x, weight = inputs[:2]
    roots = [(x ** (2 * i)).mean(-1, keepdim=True).sqrt() for i in range(1, len(weight) + 1)]
    slopes = [i * a.abs() * x.abs() ** (i - 1) for i, a in enumerate(weight, 1)]
    return grad.abs() * sum(slope / root for slope, root in zip(slopes, roots, strict=True))


def assert_matches(
    function: Callable[..., Tensor],
    formula: Callable[..., Tensor],
    inputs: list[Tensor | None],
    cancels: bool = False,
) -> None:
    """Compare value and gradients with the formula in float64 on the same rounded inputs.

    Gradients of coefficients are judged relative to the sum of the sizes of their terms; so are y
    and dx of PolyNorm where the rows are so short, or so even, that terms cancel (``cancels``).
    """
    x = inputs[0]
    grad = torch.randn(x.shape).to(x.dtype)
    y, found = evaluate(function, inputs, grad)
    exact_inputs = [None if v is None else v.detach().double() for v in inputs]
    exact_y, exact = evaluate(formula, exact_inputs, grad.double())
    assert (y.dtype, found[0].dtype) == (x.dtype, x.dtype)
    assert y.stride() == found[0].stride() == torch.empty_like(x).stride()
    if not x.numel():
        assert all(not g.any() for g in found)
        return
    if cancels:
        # Each power over its root mean square has size 1.
        size = sum(v.double().abs().sum() for v in inputs[1:3] if v is not None)
        assert_close(y, exact_y, torch.full_like(exact_y, size))
        assert_close(found[0], exact[0], size_of_dx(exact_inputs, grad.double()))
    else:
        assert_close(y, exact_y)
        assert_close(found[0], exact[0])
    given = [i for i, v in enumerate(inputs) if v is not None]
    for i, value, reference in zip(given[1:], found[1:], exact[1:], strict=True):
        if i > 2 and value.shape == x.shape:
            assert_close(value, reference)
            continue
        size = sum_of_sizes(formula, exact_inputs, i, grad.double())
        limit = TOLERANCE[value.dtype] * size + torch.finfo(torch.float32).tiny
        assert bool(((value.double() - reference).abs() <= limit).all())
