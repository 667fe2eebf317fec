"""The kernels as ``torch.library`` operations: what the compiler and tensor subclasses see.

They are functional: no argument is written to. The backend is an argument, so that a backward pass
reads the statistics of its own forward pass. The backward operations return an empty tensor for
each gradient that is not needed. ``autograd`` makes the operations differentiable.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from polyvision.kernels import selection
from polyvision.kernels.closed_form import (
    empty_grad_like,
    empty_stats,
    stats_shape,
    zero_grad_like,
)
from torch import Tensor

__all__ = ["norm", "norm_backward", "relu", "relu_backward"]


@torch.library.custom_op(
    "polyvision::poly_norm",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor? bias, float eps, int dim, Tensor? mul, "
    "Tensor? group, bool rectify, str backend) -> (Tensor, Tensor)",
)
def norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    dim: int,
    mul: Tensor | None,
    group: Tensor | None,
    rectify: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Run ``poly_norm_forward`` of a backend: y and the statistics."""
    run = selection.load(backend).poly_norm_forward
    y, stats = run(x, weight, bias, eps, dim, mul, group, rectify)
    return y, stats.view(stats_shape(x, weight, dim))


@torch.library.custom_op(
    "polyvision::poly_norm_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor x, Tensor stats, Tensor weight, Tensor? bias, float eps, int dim, "
    "Tensor? mul, Tensor? group, bool rectify, str backend, bool[] needs) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
)
def norm_backward(
    grad: Tensor,
    x: Tensor,
    stats: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    dim: int,
    mul: Tensor | None,
    group: Tensor | None,
    rectify: bool,
    backend: str,
    needs: Sequence[bool],
) -> tuple[Tensor, ...]:
    """Run ``poly_norm_backward`` of a backend: the gradients that are needed."""
    run = selection.load(backend).poly_norm_backward
    return _filled(x, run(grad, x, stats, weight, bias, eps, dim, mul, group, rectify, needs))


@torch.library.custom_op(
    "polyvision::poly_relu",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor? bias, Tensor? slope, Tensor? mul, Tensor? group, "
    "str backend) -> Tensor",
)
def relu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    slope: Tensor | None,
    mul: Tensor | None,
    group: Tensor | None,
    backend: str,
) -> Tensor:
    """Run ``poly_relu_forward`` of a backend."""
    run = selection.load(backend).poly_relu_forward
    return run(x, weight, bias, slope, mul, group)  # type: ignore[no-any-return]


@torch.library.custom_op(
    "polyvision::poly_relu_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor x, Tensor weight, Tensor? bias, Tensor? slope, Tensor? mul, "
    "Tensor? group, str backend, bool[] needs) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def relu_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    slope: Tensor | None,
    mul: Tensor | None,
    group: Tensor | None,
    backend: str,
    needs: Sequence[bool],
) -> tuple[Tensor, ...]:
    """Run ``poly_relu_backward`` of a backend: the gradients that are needed."""
    run = selection.load(backend).poly_relu_backward
    return _filled(x, run(grad, x, weight, bias, slope, mul, group, needs))


def _filled(x: Tensor, gradients: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Put an empty tensor where there is no gradient."""
    return tuple(x.new_empty(0) if g is None else g for g in gradients)


@norm.register_fake
def _(x: Tensor, weight: Tensor, bias: Any, eps: float, dim: int, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), empty_stats(x, weight, dim)


@relu.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


def _fake_gradients(
    x: Tensor, coefficients: Sequence[Tensor | None], mul: Tensor | None, needs: Sequence[bool]
) -> tuple[Tensor, ...]:
    small = [zero_grad_like(c, n) for c, n in zip(coefficients, needs[1:-1], strict=True)]
    return _filled(x, [empty_grad_like(x, needs[0]), *small, empty_grad_like(mul, needs[-1])])


@norm_backward.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    stats: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    dim: int,
    mul: Tensor | None,
    group: Tensor | None,
    rectify: bool,
    backend: str,
    needs: Sequence[bool],
) -> tuple[Tensor, ...]:
    return _fake_gradients(x, (weight, bias), mul, needs)


@relu_backward.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    slope: Tensor | None,
    mul: Tensor | None,
    group: Tensor | None,
    backend: str,
    needs: Sequence[bool],
) -> tuple[Tensor, ...]:
    return _fake_gradients(x, (weight, bias, slope), mul, needs)
