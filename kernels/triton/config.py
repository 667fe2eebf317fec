"""Tile shapes and warps, by formula from features, element size, layout, order and gate.

No autotuning: nothing is timed at run time. Tiles of contiguous rows do not depend on the number of
rows. Strided tiles (NCHW) depend on the positions of an image, up to 32, never on the batch size.
Reasons and register counts are in docs/kernels-triton.md.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

__all__ = ["Tile", "norm_tile", "programs", "relu_tile", "warp_size"]

_SHORT = 2048  # elements of a tile that holds several short rows
_LONGEST = 16384  # features of the longest row kept in registers, in the lightest case
_CHUNK = 8192  # features of a tile of longer rows
STRIDED_ROWS = 32  # rows of a strided tile: whole memory sectors
_STRIDED_LONGEST = 128  # features of the longest strided row kept in registers
_STRIDED_CHUNK = 64  # features of a tile of longer strided rows
_LOW_ORDER = 4  # above, a row's coefficients and statistics fill the registers
_PROGRAMS_PER_SM = 32  # of a persistent grid: several times what fits at once, see programs()


class Tile(NamedTuple):
    """Rows and features of a tile, threads that share it, and whether a row takes several tiles."""

    rows: int
    features: int
    threads: int
    looped: bool


def _power_of_two(n: int) -> int:
    """Return the power of two at or above ``n``."""
    return 1 << max(n - 1, 0).bit_length()


def norm_tile(size: int, inner: int, itemsize: int, order: int, gated: bool, rectify: bool) -> Tile:
    """Return the tile of the PolyNorm kernels for rows of ``size`` with stride ``inner``.

    Longer rows are read in chunks; what counts as long follows what a thread must hold in backward:
    x and dy, the factor of the gated form, the choice of a rectified base, and per row coefficients
    and statistics of every power.
    """
    features = _power_of_two(size)
    high = order > _LOW_ORDER
    if inner == 1:
        heavy = itemsize > 2 or gated
        longest, chunk = _LONGEST >> (heavy + high + rectify), _CHUNK >> (high + rectify)
        features = min(features, chunk) if size > longest else features
        rows, most = max(_SHORT // features, 1), 512
    else:
        longest, chunk = _STRIDED_LONGEST >> 3 * high, _STRIDED_CHUNK >> 2 * high
        features = min(features, chunk) if size > longest else features
        # Each thread holds several rows and what belongs to them: it needs up to 255 registers.
        rows, most = min(max(_SHORT // features, STRIDED_ROWS), _power_of_two(inner)), 256
        rows = min(rows, STRIDED_ROWS) if high else rows
    threads = min(max(rows * features // 16, 128), most)
    return Tile(rows, features, threads, size > longest)


def relu_tile(size: int, inner: int) -> Tile:
    """Return the tile of the PolyReLU kernels: 8 elements a thread, the fastest dim first.

    A tensor taken as one channel (size = 1) has the same tile whatever its length.
    """
    if size == 1:
        return Tile(_SHORT, 1, 256, False)
    fast, slow = (size, inner) if inner == 1 else (inner, size)
    width = min(_power_of_two(fast), _SHORT)
    if inner == 1:
        return Tile(_SHORT // width, width, 256, False)
    return Tile(width, min(_SHORT // width, _power_of_two(slow)), 256, False)


@functools.lru_cache(maxsize=64)
def _processors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


@functools.lru_cache(maxsize=1)
def warp_size() -> int:
    """Return the threads of a warp: 64 on AMD's data-centre chips, else 32."""
    return 64 if torch.version.hip else 32


def programs(device: torch.device) -> int:
    """Return the most programs of a persistent grid.

    How many fit at once follows the registers, which differ between compilers. A few more than fit
    would run alone at the end; many more are spread evenly by the chip's own scheduler, and the
    sums they leave are still small.
    """
    return _PROGRAMS_PER_SM * (_processors(device.index) if device.type == "cuda" else 1)
