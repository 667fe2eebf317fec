"""Matrix products of groups of rows, each group with a matrix of its own.

Operations of ``torch.library``, so that the compiler and fake tensors see them, in every dtype.
Inside, torch's grouped product serves where it takes the operands: one kernel, and in bf16 on a
recent GPU nothing waits for the host. Elsewhere (fp64, rows that are no multiple of 16 bytes) a
product per group does the same; it reads the group sizes on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["grouped_matmul", "grouped_outer", "loop_matmul", "loop_outer"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_grouped_mm = cast(
    Callable[..., Tensor], getattr(F, "grouped_mm", None) or cast(Any, torch)._grouped_mm
)


@torch.library.custom_op("polyvision::grouped_matmul", mutates_args=())
def grouped_matmul(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply each group of rows by its own matrix; differentiable.

    Args:
        x: (M, K) rows, the groups one after the other.
        weight: (G, K, N), any strides.
        ends: (G,) int32: the row after the last one of each group, the last of them M.

    Returns:
        (M, N).
    """
    if _fits(x, x.shape[1], weight.shape[2]):
        return _grouped_mm(x.contiguous(), weight, offs=ends)
    return loop_matmul(x, weight, ends)


@torch.library.custom_op("polyvision::grouped_outer", mutates_args=())
def grouped_outer(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    """Return x_g^T y_g for each group of rows: (M, K) and (M, N) give (G, K, N); differentiable.

    A group without rows gives zeros.
    """
    if _fits(x, x.shape[1], y.shape[1]):
        return _grouped_mm(x.contiguous().t(), y.contiguous(), offs=ends)
    return loop_outer(x, y, ends)


def _fits(x: Tensor, *sizes: int) -> bool:
    aligned = all(size * x.element_size() % 16 == 0 for size in sizes)
    return aligned and x.dtype in _DTYPES and len(x) > 0


def _groups(ends: Tensor) -> list[slice]:
    stops = ends.tolist()
    return [slice(a, b) for a, b in zip([0, *stops], stops, strict=False)]


def loop_matmul(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Compute ``grouped_matmul`` group by group."""
    return torch.cat([x[rows] @ weight[g] for g, rows in enumerate(_groups(ends))])


def loop_outer(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    """Compute ``grouped_outer`` group by group."""
    return torch.stack([x[rows].t() @ y[rows] for rows in _groups(ends)])


@grouped_matmul.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


@grouped_outer.register_fake
def _(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(ends.shape[0], x.shape[1], y.shape[1])


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _matmul_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, ends = ctx.saved_tensors
    dx = grouped_matmul(grad, weight.mT, ends) if ctx.needs_input_grad[0] else None
    dweight = grouped_outer(x, grad, ends) if ctx.needs_input_grad[1] else None
    return dx, dweight, None


def _outer_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, y, ends = ctx.saved_tensors
    dx = grouped_matmul(y, grad.mT, ends) if ctx.needs_input_grad[0] else None
    dy = grouped_matmul(x, grad, ends) if ctx.needs_input_grad[1] else None
    return dx, dy, None


grouped_matmul.register_autograd(_matmul_backward, setup_context=_setup)
grouped_outer.register_autograd(_outer_backward, setup_context=_setup)
