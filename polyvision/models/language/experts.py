"""The two halves of an expert network on assigned rows, keeping little for the backward pass.

The first half takes each expert's tokens and projects them up; it keeps the tokens once, not once
for each of their K experts. The second half is activation, router weight, down projection and
the sum over a token's experts; it keeps the pre-activations alone, as ``ffn_down`` does.
Rows are moved by gathers only, forwards and backwards: no atomics, the same bits every time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from polyvision.models.language.grouped import grouped_matmul, grouped_outer
from polyvision.models.language.loss import compute_dtype
from polyvision.models.language.router import Assignment
from polyvision.recompute import (
    autocast_now,
    leaf_gradients,
    make_functional,
    repeated,
    under_compiler_or_transform,
)

__all__ = ["expert_down", "expert_up"]

Function = Callable[..., Tensor]


def _sum_of_experts(rows: Tensor, inverse: Tensor, tokens: int) -> Tensor:
    """Add up the K rows of each token: (M, D) in the experts' order -> (N, D)."""
    return rows[inverse].view(tokens, -1, rows.shape[1]).sum(1)


def _rows_of(x: Tensor, token: Tensor) -> Tensor:
    return x[token]


class _Up(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        token: Tensor,
        inverse: Tensor,
        ends: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, token, inverse, ends)
        ctx.dtype = dtype
        rows = _rows_of(x.to(dtype), token)
        h: Tensor = grouped_matmul(rows, weight.to(dtype).mT, ends)
        return h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, token, inverse, ends = ctx.saved_tensors
        grad = grad.contiguous()
        dx = dweight = None
        if ctx.needs_input_grad[0]:
            rows = grouped_matmul(grad, weight.to(ctx.dtype), ends)
            dx = _sum_of_experts(rows, inverse, len(x)).to(x.dtype)
        if ctx.needs_input_grad[1]:
            dweight = grouped_outer(grad, _rows_of(x.to(ctx.dtype), token), ends).to(weight.dtype)
        return dx, dweight, None, None, None, None


def expert_up(x: Tensor, weight: Tensor, assignment: Assignment) -> Tensor:
    """Project each assigned token by its expert's matrix.

    Args:
        x: (N, width) tokens.
        weight: (E, hidden, width).
        assignment: the M pairs of token and expert.

    Returns:
        (M, hidden) in the order of the experts.
    """
    token, _, _, inverse, ends = assignment
    dtype = compute_dtype(x)
    h: Tensor
    if under_compiler_or_transform():
        rows = repeated(_rows_of, x.to(dtype), token)
        h = grouped_matmul(rows, weight.to(dtype).mT, ends)
    else:
        h = _Up.apply(x, weight, token, inverse, ends, dtype)
    return h


def _scaled(active: Tensor, share: Tensor) -> Tensor:
    return active * share.to(active.dtype)[:, None]


def _down(scaled: Tensor, weight: Tensor, inverse: Tensor, ends: Tensor, tokens: int) -> Tensor:
    rows = grouped_matmul(scaled, weight.to(scaled.dtype).mT, ends)  # (M, width)
    return _sum_of_experts(rows, inverse, tokens)


class _Down(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        function: Function,
        share: Tensor,
        weight: Tensor,
        token: Tensor,
        inverse: Tensor,
        ends: Tensor,
        tokens: int,
        *tensors: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(share, weight, token, inverse, ends, *tensors)
        ctx.function = function
        ctx.autocast = autocast_now(weight.device.type)
        return _down(_scaled(function(*tensors), share), weight, inverse, ends, tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        share, weight, token, _, ends, *tensors = ctx.saved_tensors
        needs = ctx.needs_input_grad[7:]
        with ctx.autocast(), torch.enable_grad():
            aliases = [v.detach().requires_grad_(n) for v, n in zip(tensors, needs, strict=True)]
            out = ctx.function(*aliases)  # (M, hidden)
        active = out.detach()
        column = share.to(active.dtype)[:, None]
        rows = grad.to(active.dtype)[token]  # (M, width)
        dscaled = grouped_matmul(rows, weight.to(active.dtype), ends)  # (M, hidden)
        dshare = dweight = None
        if ctx.needs_input_grad[1]:
            wide = torch.promote_types(active.dtype, torch.float32)
            dshare = (dscaled * active).sum(-1, dtype=wide).to(share.dtype)
        if ctx.needs_input_grad[2]:
            dweight = grouped_outer(rows, _scaled(active, share), ends).to(weight.dtype)
        dtensors: list[Tensor | None] = [None] * len(aliases)
        if any(needs):
            dtensors = leaf_gradients(out, aliases, dscaled * column)
        return None, dshare, dweight, None, None, None, None, *dtensors


def expert_down(
    hidden: Sequence[Tensor],
    share: Tensor,
    weight: Tensor,
    activation: Function,
    assignment: Assignment,
    tokens: int,
) -> Tensor:
    """Activate, weight, project down, and add up the experts of each token.

    Args:
        hidden: what the activation takes: the pre-activation (M, hidden), the two of a gated one,
            also the group of each row.
        share: (M,) the router's weight of each pair.
        weight: (E, width, hidden).
        activation: a deterministic function or module of ``hidden``.
        assignment: the M pairs of token and expert.
        tokens: their number N.

    Returns:
        (N, width).
    """
    token, _, _, inverse, ends = assignment
    if under_compiler_or_transform():

        def scaled(share: Tensor, *hidden: Tensor) -> Tensor:
            return _scaled(activation(*hidden), share)

        return _down(repeated(scaled, share, *hidden), weight, inverse, ends, tokens)
    function, parameters = make_functional(activation, len(hidden))
    y: Tensor = _Down.apply(
        function, share, weight, token, inverse, ends, tokens, *hidden, *parameters
    )
    return y
