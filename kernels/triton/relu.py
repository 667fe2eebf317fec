"""PolyReLU kernels; the numerics are those of ``polyvision.kernels.reference.poly_relu``.

y = sum_i a_i p^i + b with p = max(x, 0), or max(x, 0) + slope * min(x, 0) with one slope or one per
channel. Backward: h = g sum_i i a_i p^(i-1), dx = h p', da_i = sum g p^i, db = sum g,
dslope = sum of h x over x <= 0.

A dense tensor without slopes per channel or groups is taken in storage order as one channel,
(outer, size, inner) = (1, 1, elements). This module imports Triton: import it lazily.
"""

from __future__ import annotations

import triton
import triton.language as tl
from polyvision.kernels.triton.tile import (
    add_each,
    coefficients,
    columns,
    horner,
    load,
    locate,
    tile_count,
    zeros,
)

__all__ = ["poly_relu_backward", "poly_relu_forward"]

# Kernels are written in Triton's dialect: it gives the values their types.
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, ANN202


@triton.jit
def _slopes(slope, slope_step, channel, size):
    """Load the slopes of a tile's channels, (1, BLOCK_D); a step of 0 is one slope for all."""
    value = 0.0
    if slope is not None:
        pointer = slope + channel * slope_step
        value = tl.load(pointer, mask=channel < size, other=0.0).to(tl.float32)
    return value


@triton.jit
def _negative(value, slopes, slope):
    """Multiply by the slopes, or return 0 for ReLU even where ``value`` is infinite."""
    out = 0.0
    if slope is not None:
        out = value * slopes
    return out


@triton.jit(do_not_specialize=["outer"])
def poly_relu_forward(
    x,
    mul,
    y,
    weight,
    bias,
    slope,
    group,
    outer,
    inner,
    size,
    x_stride,
    mul_stride,
    y_stride,
    slope_step,
    ORDER: tl.constexpr,
    STRIDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One tile of rows (axis 0) and channels (axis 1) per program."""
    o, j, valid = locate(tl.program_id(0), outer, inner, BLOCK_M, STRIDED)
    first = tl.program_id(1) * BLOCK_D
    column, mask = columns(first, size, inner, valid, BLOCK_D, STRIDED)
    a, b = coefficients(weight, bias, group, o * inner + j, valid, ORDER)
    slopes = _slopes(slope, slope_step, (first + tl.arange(0, BLOCK_D))[None, :], size)
    value = load(x, (o * x_stride + j) + column, mask)
    p = tl.where(value <= 0.0, _negative(value, slopes, slope), value)  # nan passes
    out = horner(p, a, b)
    if mul is not None:
        out = out * load(mul, (o * mul_stride + j) + column, mask)
    tl.store(y + ((o * y_stride + j) + column), out.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["outer"])
def poly_relu_backward(
    grad,
    x,
    mul,
    weight,
    bias,
    slope,
    group,
    dx,
    dmul,
    partials,
    row_moments,
    slope_partials,
    outer,
    inner,
    size,
    grad_stride,
    x_stride,
    mul_stride,
    dx_stride,
    dmul_stride,
    slope_step,
    ORDER: tl.constexpr,
    STRIDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Tiles of one channel block (axis 1), program p taking every P-th from p on (axis 0).

    The gradients of the coefficients, one column each (a_1 ... a_r, b), go to ``partials``
    (axis 1 * axis 0, columns), summed over all tiles of a program, or to ``row_moments``
    (columns, axis 1, rows); those of the slopes to ``slope_partials`` (axis 0, size). What is None
    is left out. Sums are kept per lane: the loop has no barrier.
    """
    COUNT: tl.constexpr = ORDER + (0 if bias is None else 1)
    first = tl.program_id(1) * BLOCK_D
    channel = (first + tl.arange(0, BLOCK_D))[None, :]
    slopes = _slopes(slope, slope_step, channel, size)
    rows = tl.cast(outer, tl.int64) * inner
    total = zeros(COUNT, BLOCK_M, BLOCK_D)
    slope_total = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    tiles = tile_count(outer, inner, BLOCK_M, STRIDED)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        o, j, valid = locate(tile, outer, inner, BLOCK_M, STRIDED)
        column, mask = columns(first, size, inner, valid, BLOCK_D, STRIDED)
        row = o * inner + j
        a, b = coefficients(weight, bias, group, row, valid, ORDER)
        value = load(x, (o * x_stride + j) + column, mask)
        incoming = load(grad, (o * grad_stride + j) + column, mask)
        p = tl.where(value <= 0.0, _negative(value, slopes, slope), value)
        g = incoming
        if mul is not None:
            g = incoming * load(mul, (o * mul_stride + j) + column, mask)
        if dmul is not None:
            out = incoming * horner(p, a, b)
            tl.store(
                dmul + ((o * dmul_stride + j) + column), out.to(dmul.dtype.element_ty), mask=mask
            )

        product = g
        moments = ()
        for _ in tl.static_range(ORDER):
            product = product * p
            moments = moments + (product,)
        if COUNT > ORDER:
            moments = moments + (g,)
        if partials is not None:
            total = add_each(total, moments)
        if row_moments is not None:
            for i in tl.static_range(COUNT):
                target = row_moments + (i * tl.num_programs(1) + tl.program_id(1)) * rows + row
                tl.store(target, tl.sum(moments[i], 1, keep_dims=True), mask=valid)

        h = g * a[0]
        if ORDER > 1:
            derivative = ()
            for i in tl.static_range(1, ORDER):
                derivative = derivative + ((i + 1) * a[i],)
            h = g * horner(p, derivative, a[0])
        if slope_partials is not None:
            slope_total += tl.where(value <= 0.0, h * value, 0.0)
        if dx is not None:
            out = tl.where(value <= 0.0, _negative(h, slopes, slope), h)
            tl.store(dx + ((o * dx_stride + j) + column), out.to(dx.dtype.element_ty), mask=mask)

    if partials is not None:
        program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        for i in tl.static_range(COUNT):
            tl.store(partials + program * COUNT + i, tl.sum(total[i]))
    if slope_partials is not None:
        target = slope_partials + tl.program_id(0) * size + channel
        tl.store(target, tl.sum(slope_total, 0, keep_dims=True), mask=channel < size)
