"""How the kernels see a tensor: (outer, size, inner), without a copy.

Element (o, d, j) lies at ``o * stride + d * inner + j``: contiguous rows and channels_last have
inner = 1, NCHW normalised over its channels has inner = H * W. Only the outer stride may differ
between the tensors of one call, as it does between the halves of one projection.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "Layout",
    "fastest_dim",
    "laid_out_like",
    "match",
    "match_optional",
    "row_layout",
    "rows_to_logical",
    "rows_to_storage",
]


class Layout(NamedTuple):
    """Sizes of (outer, size, inner), and the tensor's dims behind them in storage order."""

    outer: int
    size: int
    inner: int
    outer_dims: tuple[int, ...]
    inner_dims: tuple[int, ...]
    dim: int

    @property
    def rows(self) -> int:
        """Number of rows of ``size`` elements."""
        return self.outer * self.inner

    def outer_stride(self, shape: tuple[int, ...], strides: tuple[int, ...]) -> int | None:
        """Return the outer stride of a tensor in this layout, None if it does not fit."""
        if self.size > 1 and strides[self.dim] != self.inner:
            return None
        if self.inner_dims and _walk(shape, strides, self.inner_dims) != 1:
            return None
        return _walk(shape, strides, self.outer_dims)


def _walk(shape: tuple[int, ...], strides: tuple[int, ...], dims: tuple[int, ...]) -> int | None:
    """Return the one stride that walks ``dims`` in order: 0 without dims, None if there is none."""
    for wide, narrow in itertools.pairwise(dims):
        if strides[wide] != strides[narrow] * shape[narrow]:
            return None
    return strides[dims[-1]] if dims else 0


@functools.lru_cache(maxsize=1024)
def _row_layout(shape: tuple[int, ...], strides: tuple[int, ...], dim: int) -> Layout | None:
    if not shape:
        return Layout(1, 1, 1, (), (), 0)
    # Dims of size 1 have no stride that matters; the sort is stable, ties keep their order.
    others = [d for d in range(len(shape)) if d != dim and shape[d] != 1]
    others.sort(key=lambda d: -strides[d])
    inside = tuple(d for d in others if shape[dim] > 1 and strides[d] < strides[dim])
    outside = tuple(d for d in others if d not in inside)
    inner = math.prod(shape[d] for d in inside)
    outer = math.prod(shape[d] for d in outside)
    layout = Layout(outer, shape[dim], inner, outside, inside, dim)
    return None if layout.outer_stride(shape, strides) is None else layout


def row_layout(x: Tensor, dim: int) -> tuple[Tensor, Layout]:
    """Return ``x`` and its layout with rows along ``dim``; a dense copy if only that has one."""
    dim %= max(x.ndim, 1)
    layout = _row_layout(x.shape, x.stride(), dim)
    if layout is None:
        x = torch.empty_like(x).copy_(x)
        layout = _row_layout(x.shape, x.stride(), dim)
        assert layout is not None, (x.shape, x.stride(), dim)
    return x, layout


def fastest_dim(x: Tensor) -> int:
    """Return the dim of ``x`` with the smallest stride."""
    return min((d for d in range(x.ndim) if x.shape[d] != 1), key=x.stride, default=0)


@functools.lru_cache(maxsize=1024)
def _outer_stride(shape: tuple[int, ...], strides: tuple[int, ...], layout: Layout) -> int | None:
    return layout.outer_stride(shape, strides)


def match(t: Tensor, x: Tensor, layout: Layout) -> tuple[Tensor, int]:
    """Return ``t``, copied to the memory format of ``x`` if it does not fit, and its stride."""
    stride = _outer_stride(t.shape, t.stride(), layout)
    if stride is None:
        t = torch.empty_like(x, dtype=t.dtype).copy_(t)
        stride = _outer_stride(t.shape, t.stride(), layout)
        assert stride is not None, (t.shape, t.stride(), layout)
    return t, stride


def match_optional(t: Tensor | None, x: Tensor, layout: Layout) -> tuple[Tensor | None, int]:
    """Return ``match`` of a tensor, (None, 0) of None."""
    return (None, 0) if t is None else match(t, x, layout)


def laid_out_like(t: Tensor | None, like: Tensor | None, matched: Tensor | None) -> Tensor | None:
    """Return gradient ``t`` laid out like ``like``, of which ``matched`` may be a copy."""
    if t is None or like is None or matched is like:
        return t
    return torch.empty_like(like).copy_(t)


def _storage_order(x: Tensor, layout: Layout) -> tuple[list[int], list[int] | None]:
    """Return the sizes of the row dims, and these dims in storage order unless that is logical."""
    dims = [d for d in range(x.ndim) if d != layout.dim]
    sizes = [x.shape[d] for d in dims]
    stored = layout.outer_dims + layout.inner_dims
    if all(a < b for a, b in itertools.pairwise(stored)):
        return sizes, None
    stored += tuple(d for d in dims if d not in stored)
    return sizes, [dims.index(d) for d in stored]


def rows_to_storage(t: Tensor, x: Tensor, layout: Layout) -> Tensor:
    """Return ``t``, which ends in the row dims of ``x``, with rows as the kernels count them."""
    sizes, order = _storage_order(x, layout)
    if order is None:
        return t.contiguous()
    t = t.reshape(-1, *sizes)
    return t.permute(0, *(1 + d for d in order)).contiguous()


def rows_to_logical(t: Tensor, x: Tensor, layout: Layout) -> Tensor:
    """Return ``t`` of shape (n, rows), written by a kernel, as (n, row dims of ``x``)."""
    sizes, order = _storage_order(x, layout)
    if order is None:
        return t.view(-1, *sizes)
    t = t.view(-1, *(sizes[d] for d in order))
    return t.permute(0, *(1 + order.index(d) for d in range(len(order)))).contiguous()
