"""PolyNorm kernels; the numerics are those of ``polyvision.kernels.reference.poly_norm``.

Forward, per row: u = x / s with s a power of two from max|x|, q_i = rsqrt(mean(u^2i) + eps / s^2i),
y = sum_i a_i q_i u^i + b.

Statistics, fp32 of shape (order, rows), rows in memory order: half the root mean square of x (half,
so that it is finite for every finite row), then t_i = q_i (u / v)^i for i = 2..order, where
v = x / s' with s' the power of two at or below that first statistic. One number thus holds both
t_1 (its mantissa) and the scale (its exponent), and backward needs no maximum of its own.

Backward, factored: with z_i = t_i v^i and c_i = mean(g z_i),
dx = sum_i i a_i t_i v^(i-1) (g - c_i z_i) / s', da_i = sum g z_i, db = sum g.

LOOPED kernels read a row in chunks of BLOCK_D, twice; the second time from its end, which is still
in the cache. This module imports Triton: import it lazily.
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
    load_rows,
    locate,
    row_sums,
    scale_of,
    tile_count,
    zeros,
)

__all__ = ["poly_norm_backward", "poly_norm_forward", "sum_groups"]

# Kernels are written in Triton's dialect: it gives the values their types.
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, ANN202


@triton.jit
def _base(x, offset, mask, RECTIFY: tl.constexpr):
    value = load(x, offset, mask)
    if RECTIFY:
        value = tl.where(value <= 0.0, 0.0, value)  # nan passes, as in torch.relu
    return value


@triton.jit
def _even_powers(u, ORDER: tl.constexpr):
    out = (u * u,)
    power = u
    for _ in tl.static_range(ORDER - 1):
        power = power * u
        out = out + (power * power,)
    return out


@triton.jit
def _rescale(sums, ratio):
    """Multiply sum i of u^2i by ratio^2i: u has been divided by a larger power of two since."""
    out = ()
    square = ratio * ratio
    factor = square
    for i in tl.static_range(len(sums)):
        out = out + (sums[i] * factor,)
        factor = factor * square
    return out


@triton.jit
def _inverse_roots(sums, size, inverse, eps):
    """Return q_i = rsqrt(sums_i / size + eps * inverse^2i)."""
    out = ()
    term = tl.cast(eps, tl.float32)
    for i in tl.static_range(len(sums)):
        term = term * inverse * inverse
        out = out + (tl.rsqrt(sums[i] / size + term),)
    return out


@triton.jit
def _store_stats(stats, row, rows, valid, sums, size, scale, inverse, eps, q):
    term = tl.cast(eps, tl.float32) * inverse * inverse
    half_rms = 0.5 * tl.sqrt(sums[0] / size + term) * scale
    tl.store(stats + row, half_rms, mask=valid)
    ratio = scale_of(half_rms)[0] * inverse
    factor = ratio
    for i in tl.static_range(1, len(q)):
        factor = factor * ratio
        tl.store(stats + i * rows + row, q[i] * factor, mask=valid)


@triton.jit
def _load_stats(stats, row, rows, valid, ORDER: tl.constexpr):
    """Return 1 / s' and t_1 ... t_r; rows outside the tensor get t = 0 but for t_1."""
    half_rms = load_rows(stats + row, valid, 1.0)
    scale, inverse = scale_of(half_rms)
    t = (0.5 * scale / half_rms,)
    for i in tl.static_range(1, ORDER):
        t = t + (load_rows(stats + i * rows + row, valid, 0.0),)
    return inverse, t


@triton.jit
def _store_output(y, mul, y_row, mul_row, column, mask, u, k, b):
    value = horner(u, k, b)
    if mul is not None:
        value = value * load(mul, mul_row + column, mask)
    tl.store(y + (y_row + column), value.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["outer"])
def poly_norm_forward(
    x,
    mul,
    y,
    stats,
    weight,
    bias,
    group,
    outer,
    inner,
    size,
    x_stride,
    mul_stride,
    y_stride,
    eps,
    ORDER: tl.constexpr,
    RECTIFY: tl.constexpr,
    STRIDED: tl.constexpr,
    LOOPED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One tile of rows per program. ``mul``, ``stats``, ``bias`` and ``group`` may be None."""
    o, j, valid = locate(tl.program_id(0), outer, inner, BLOCK_M, STRIDED)
    x_row = o * x_stride + j
    y_row = o * y_stride + j
    mul_row = o * mul_stride + j
    row = o * inner + j
    if LOOPED:
        scale, inverse = scale_of(tl.zeros((BLOCK_M, 1), tl.float32))
        sums = zeros(ORDER, BLOCK_M, 1)
        for start in range(0, size, BLOCK_D):
            column, mask = columns(start, size, inner, valid, BLOCK_D, STRIDED)
            value = _base(x, x_row + column, mask, RECTIFY)
            peak = tl.maximum(tl.max(tl.abs(value), 1, keep_dims=True), scale)
            larger, inverse = scale_of(peak)
            chunk = row_sums(_even_powers(value * inverse, ORDER))
            sums = add_each(_rescale(sums, scale * inverse), chunk)
            scale = larger
    else:
        column, mask = columns(0, size, inner, valid, BLOCK_D, STRIDED)
        value = _base(x, x_row + column, mask, RECTIFY)
        scale, inverse = scale_of(tl.max(tl.abs(value), 1, keep_dims=True))
        u = value * inverse
        sums = row_sums(_even_powers(u, ORDER))

    q = _inverse_roots(sums, size, inverse, eps)
    if stats is not None:
        rows = tl.cast(outer, tl.int64) * inner
        _store_stats(stats, row, rows, valid, sums, size, scale, inverse, eps, q)
    a, b = coefficients(weight, bias, group, row, valid, ORDER)
    k = ()
    for i in tl.static_range(ORDER):
        k = k + (a[i] * q[i],)

    if LOOPED:
        chunks = tl.cdiv(size, BLOCK_D)
        for n in range(chunks):
            start = (chunks - 1 - n) * BLOCK_D
            column, mask = columns(start, size, inner, valid, BLOCK_D, STRIDED)
            u = _base(x, x_row + column, mask, RECTIFY) * inverse
            _store_output(y, mul, y_row, mul_row, column, mask, u, k, b)
    else:
        _store_output(y, mul, y_row, mul_row, column, mask, u, k, b)


@triton.jit
def _moments(g, v, ORDER: tl.constexpr, WITH_SUM: tl.constexpr):
    """Return the tiles g v^1 ... g v^r, and g itself for the gradient of the bias."""
    product = g
    out = ()
    for _ in tl.static_range(ORDER):
        product = product * v
        out = out + (product,)
    if WITH_SUM:
        out = out + (g,)
    return out


@triton.jit
def _store_gradients(
    dx, dmul, dx_row, dmul_row, column, mask, grad, g, v, a, b, t, c, inverse, RECTIFY: tl.constexpr
):
    """Store dx and dmul of a tile; ``g`` is the gradient of the polynomial, ``grad`` of y."""
    if dx is not None:
        power = v
        total = a[0] * t[0] * (g - c[0] * t[0] * power)
        for i in tl.static_range(1, len(a)):
            outside = (i + 1) * a[i] * t[i] * power
            power = power * v
            total += outside * (g - c[i] * t[i] * power)
        total = total * inverse
        if RECTIFY:
            total = tl.where(v <= 0.0, 0.0, total)
        tl.store(dx + (dx_row + column), total.to(dx.dtype.element_ty), mask=mask)
    if dmul is not None:
        k = ()
        for i in tl.static_range(len(a)):
            k = k + (a[i] * t[i],)
        value = grad * horner(v, k, b)
        tl.store(dmul + (dmul_row + column), value.to(dmul.dtype.element_ty), mask=mask)


@triton.jit
def _over_rows(values):
    out = ()
    for i in tl.static_range(len(values)):
        out = out + (tl.sum(values[i], 0, keep_dims=True),)
    return out


@triton.jit
def _load_gradient(grad, mul, grad_row, mul_row, column, mask):
    value = load(grad, grad_row + column, mask)
    g = value
    if mul is not None:
        g = value * load(mul, mul_row + column, mask)
    return value, g


@triton.jit(do_not_specialize=["outer"])
def poly_norm_backward(
    grad,
    x,
    mul,
    stats,
    weight,
    bias,
    group,
    dx,
    dmul,
    partials,
    row_moments,
    outer,
    inner,
    size,
    grad_stride,
    x_stride,
    mul_stride,
    dx_stride,
    dmul_stride,
    ORDER: tl.constexpr,
    RECTIFY: tl.constexpr,
    STRIDED: tl.constexpr,
    LOOPED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Tiles of rows, program p taking every P-th from p on; what is None is left out.

    The gradients of the coefficients, one column each (a_1 ... a_r, b), go to ``partials``
    (P, columns), summed over the rows of a program, or to ``row_moments`` (columns, rows).
    """
    COUNT: tl.constexpr = ORDER + (0 if bias is None else 1)
    rows = tl.cast(outer, tl.int64) * inner
    total = zeros(COUNT, 1 if STRIDED else BLOCK_M, 1)
    tiles = tile_count(outer, inner, BLOCK_M, STRIDED)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        o, j, valid = locate(tile, outer, inner, BLOCK_M, STRIDED)
        grad_row = o * grad_stride + j
        x_row = o * x_stride + j
        mul_row = o * mul_stride + j
        dx_row = o * dx_stride + j
        dmul_row = o * dmul_stride + j
        row = o * inner + j
        inverse, t = _load_stats(stats, row, rows, valid, ORDER)
        a, b = coefficients(weight, bias, group, row, valid, ORDER)
        if LOOPED:
            sums = zeros(COUNT, BLOCK_M, 1)
            for start in range(0, size, BLOCK_D):
                column, mask = columns(start, size, inner, valid, BLOCK_D, STRIDED)
                value, g = _load_gradient(grad, mul, grad_row, mul_row, column, mask)
                v = _base(x, x_row + column, mask, RECTIFY) * inverse
                chunk = row_sums(_moments(g, v, ORDER, COUNT > ORDER))
                sums = add_each(sums, chunk)
        else:
            column, mask = columns(0, size, inner, valid, BLOCK_D, STRIDED)
            value, g = _load_gradient(grad, mul, grad_row, mul_row, column, mask)
            v = _base(x, x_row + column, mask, RECTIFY) * inverse
            sums = row_sums(_moments(g, v, ORDER, COUNT > ORDER))

        moments = ()
        means = ()
        for i in tl.static_range(ORDER):
            moments = moments + (sums[i] * t[i],)
            means = means + (sums[i] * t[i] / size,)
        if COUNT > ORDER:
            moments = moments + (sums[ORDER],)
        if partials is not None:
            # A thread of a strided tile holds many rows: totals of each cost too many registers.
            total = add_each(total, _over_rows(moments) if STRIDED else moments)
        if row_moments is not None:
            for i in tl.static_range(COUNT):
                tl.store(row_moments + i * rows + row, moments[i], mask=valid)

        if LOOPED:
            chunks = tl.cdiv(size, BLOCK_D)
            for n in range(chunks):
                start = (chunks - 1 - n) * BLOCK_D
                column, mask = columns(start, size, inner, valid, BLOCK_D, STRIDED)
                value, g = _load_gradient(grad, mul, grad_row, mul_row, column, mask)
                v = _base(x, x_row + column, mask, RECTIFY) * inverse
                _store_gradients(
                    dx,
                    dmul,
                    dx_row,
                    dmul_row,
                    column,
                    mask,
                    value,
                    g,
                    v,
                    a,
                    b,
                    t,
                    means,
                    inverse,
                    RECTIFY,
                )
        else:
            _store_gradients(
                dx,
                dmul,
                dx_row,
                dmul_row,
                column,
                mask,
                value,
                g,
                v,
                a,
                b,
                t,
                means,
                inverse,
                RECTIFY,
            )
    if partials is not None:
        for i in tl.static_range(COUNT):
            tl.store(partials + tl.program_id(0) * COUNT + i, tl.sum(total[i]))


@triton.jit(do_not_specialize=["rows"])
def sum_groups(
    row_moments, group, partials, rows, groups, COUNT: tl.constexpr, BLOCK: tl.constexpr
):
    """Sum the rows of one group (axis 0), every S-th block of them (axis 1), without atomics.

    ``row_moments`` (COUNT, rows) -> ``partials`` (S, groups, COUNT).
    """
    mine = tl.program_id(0)
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    total = zeros(COUNT, 1, BLOCK)
    for n in range(tl.cdiv(rows, BLOCK * splits)):
        row = (tl.cast(n, tl.int64) * splits + split) * BLOCK + tl.arange(0, BLOCK)[None, :]
        member = tl.load(group + row, mask=row < rows, other=-1) == mine
        moments = ()
        for i in tl.static_range(COUNT):
            offset = tl.cast(rows, tl.int64) * i + row
            moments = moments + (tl.load(row_moments + offset, mask=member, other=0.0),)
        total = add_each(total, moments)
    for i in tl.static_range(COUNT):
        offset = (tl.cast(split, tl.int64) * groups + mine) * COUNT + i
        tl.store(partials + offset, tl.sum(total[i]))
