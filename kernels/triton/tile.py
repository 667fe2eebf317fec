"""What the kernels share: tile addresses, polynomials, powers of two, several row sums in one.

Every tensor of the size of ``x`` is seen as (outer, size, inner) with element (o, d, j) at
``o * stride + d * inner + j``. A tile holds BLOCK_M rows and BLOCK_D features and is reduced along
its features. Rows are counted by o when inner is 1 (rows, channels_last), else by j within one o
(NCHW normalised over its channels): STRIDED. Either way the fastest dimension is contiguous.

What belongs to a row has shape (BLOCK_M, 1). Tiles are loaded in fp32, offsets are 64-bit. This
module imports Triton: import it lazily.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "add_each",
    "coefficients",
    "columns",
    "horner",
    "load",
    "load_rows",
    "locate",
    "row_sums",
    "scale_of",
    "tile_count",
    "zeros",
]

# Kernels are written in Triton's dialect: it gives the values their types.
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, ANN202


@triton.jit
def tile_count(outer, inner, BLOCK_M: tl.constexpr, STRIDED: tl.constexpr):
    """Return the number of tiles along the rows."""
    return outer * tl.cdiv(inner, BLOCK_M) if STRIDED else tl.cdiv(outer, BLOCK_M)


@triton.jit
def locate(tile, outer, inner, BLOCK_M: tl.constexpr, STRIDED: tl.constexpr):
    """Return the outer index, the inner index and the validity of each row of a tile."""
    tile = tl.cast(tile, tl.int64)
    lane = tl.arange(0, BLOCK_M)[:, None]
    if STRIDED:
        blocks = tl.cdiv(inner, BLOCK_M)
        o = tile // blocks
        j = tile % blocks * BLOCK_M + lane
        valid = j < inner
    else:
        o = tile * BLOCK_M + lane
        j = tl.zeros((BLOCK_M, 1), tl.int64)
        valid = o < outer
    return o, j, valid


@triton.jit
def columns(start, size, inner, valid, BLOCK_D: tl.constexpr, STRIDED: tl.constexpr):
    """Return offsets (1, BLOCK_D) of the features from ``start`` on, and the mask of the tile."""
    d = (start + tl.arange(0, BLOCK_D))[None, :]
    mask = valid & (d < size)
    if STRIDED:
        d = d.to(tl.int64) * inner
    return d, mask


@triton.jit
def load(pointer, offset, mask):
    """Load a tile in fp32; lanes outside the mask are zero."""
    return tl.load(pointer + offset, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_rows(pointer, valid, other):
    """Load one value per row; as a vector, since a column would be loaded by too many threads."""
    flat = tl.reshape(pointer, (pointer.shape[0],))
    value = tl.load(flat, mask=tl.reshape(valid, (pointer.shape[0],)), other=other)
    return value[:, None]


@triton.jit
def _coefficient(pointer, index, valid, group):
    pointer = pointer + index
    return tl.load(pointer) if group is None else load_rows(pointer, valid, 0.0)


@triton.jit
def coefficients(weight, bias, group, row, valid, ORDER: tl.constexpr):
    """Load a_1 ... a_r and b: scalars, or one value per row by its group."""
    index = 0
    if group is not None:
        index = load_rows(group + row, valid, 0).to(tl.int64)
    a = ()
    for i in tl.static_range(ORDER):
        a = a + (_coefficient(weight, index * ORDER + i, valid, group).to(tl.float32),)
    b = 0.0
    if bias is not None:
        b = _coefficient(bias, index, valid, group).to(tl.float32)
    return a, b


@triton.jit
def scale_of(value):
    """Return the power of two at or below ``value >= 0``, and its inverse.

    It is kept within [1, 2^126], so that both are normal numbers. Infinity and nan give 2^126: they
    must reach the formula, and no finite scale keeps them from it.
    """
    bits = tl.cast(value, tl.int32, bitcast=True) & 0x7F800000
    bits = tl.minimum(tl.maximum(bits, 0x3F800000), 0x7E800000)
    scale = tl.cast(bits, tl.float32, bitcast=True)
    return scale, tl.cast(0x7F000000 - bits, tl.float32, bitcast=True)


@triton.jit
def horner(u, a, constant):
    """Return ``constant`` plus the sum of ``a[i] * u^(i+1)``."""
    last: tl.constexpr = len(a) - 1
    y = a[last]
    for k in tl.static_range(last):
        y = y * u + a[last - 1 - k]
    return y * u + constant


@triton.jit
def zeros(COUNT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return a tuple of COUNT tiles of zeros."""
    out = ()
    for _ in tl.static_range(COUNT):
        out = out + (tl.zeros((BLOCK_M, BLOCK_D), tl.float32),)
    return out


@triton.jit
def add_each(left, right):
    """Add two tuples element by element."""
    out = ()
    for i in tl.static_range(len(left)):
        out = out + (left[i] + right[i],)
    return out


@triton.jit
def row_sums(tiles):
    """Sum each tile along its features.

    One reduction of all tiles together would have fewer barriers, but keeps all tiles in registers
    at once: with Triton 3.6 twice as many, and spills.
    """
    out = ()
    for i in tl.static_range(len(tiles)):
        out = out + (tl.sum(tiles[i], 1, keep_dims=True),)
    return out
