"""Gradients of coefficients: buffers for the partial sums of a backward kernel, and their total.

Every program writes its own partial sums, which are added in a fixed order: no atomics, the same
bits every time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from polyvision.kernels.triton.config import warp_size
from torch import Tensor

__all__ = ["coefficient_gradients", "sum_buffers"]

_GROUP_SPLITS = 8  # programs that share the rows of one group
_GROUP_BLOCK = 1024
_GROUP_THREADS = 256


def sum_buffers(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: Tensor | None,
    grid: tuple[int, int],
    rows: int,
) -> tuple[Tensor | None, Tensor | None]:
    """Return buffers for the sums of each program, or with ``group`` of each row."""
    count = weight.shape[-1] + (bias is not None)
    shape = (grid[0] * grid[1], count) if group is None else (count, grid[1], rows)
    buffer = torch.empty(shape, dtype=torch.float32, device=x.device)
    return (buffer, None) if group is None else (None, buffer)


def coefficient_gradients(
    partials: Tensor | None,
    moments: Tensor | None,
    group: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    needs: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Finish the sums of a backward kernel: gradients of weight and bias."""
    if moments is not None and group is not None:
        partials = _group_partials(moments.sum(1), group, weight.shape[0])
    if partials is None:
        return None, None
    order = weight.shape[-1]
    dweight = dbias = None  # two sums: the results must not share memory
    if needs[0]:
        dweight = partials[..., :order].sum(0).to(weight.dtype)
    if needs[1] and bias is not None:
        dbias = partials[..., order:].sum(0).reshape(bias.shape).to(bias.dtype)
    return dweight, dbias


def _group_partials(moments: Tensor, group: Tensor, groups: int) -> Tensor:
    """Sum ``moments`` (columns, rows) by group, to (splits, groups, columns)."""
    from polyvision.kernels.triton import norm

    count, rows = moments.shape
    partials = moments.new_empty((_GROUP_SPLITS, groups, count))
    norm.sum_groups[(groups, _GROUP_SPLITS)](
        moments,
        group,
        partials,
        rows,
        groups,
        count,
        _GROUP_BLOCK,
        num_warps=_GROUP_THREADS // warp_size(),
    )
    return partials
