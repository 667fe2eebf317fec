"""Calls the C++ kernels: how a tensor of any layout becomes rows, and the four functions.

Every operand is seen as (outer, n, inner) with one stride each; ``n`` runs along the feature
dimension, the other dimensions are merged into two. Contiguous, NCHW, channels-last, sliced and
expanded tensors all fit; what does not is copied first.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Sequence

import torch
from polyvision.kernels import closed_form
from polyvision.kernels.closed_form import empty_grad_like, empty_stats, zero_grad_like
from polyvision.kernels.cpu import build
from torch import Tensor

from polyvision.errors import PolyvisionError

__all__ = [
    "poly_norm_backward",
    "poly_norm_forward",
    "poly_relu_backward",
    "poly_relu_forward",
    "supports",
]

_TYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
_CALL = struct.Struct("44qd")  # struct Call of kernels.cpp
_FLAT_PIECE = 4096

Rows = tuple[int, int, int, int]  # outer, n, inner, n of the last outer position
Strides = tuple[int, int, int]


def supports(x: Tensor, mul: Tensor | None = None, slope: Tensor | None = None) -> bool:
    """Tell whether the kernels take these operands."""
    return x.dtype in _TYPES and (mul is None or mul.dtype == x.dtype)


@functools.lru_cache(maxsize=4096)
def _rows(
    shape: tuple[int, ...], dim: int, strides: tuple[tuple[int, ...], ...]
) -> tuple[Rows, list[Strides]] | None:
    """Merge all dimensions but ``dim`` into two; None if the strides of the operands forbid it."""
    groups: list[tuple[int, list[int]]] = []  # size, stride of each operand
    for d, size in enumerate(shape):
        if d == dim or size == 1:
            continue
        step = [stride[d] for stride in strides]
        if groups and all(s == t * size for s, t in zip(groups[-1][1], step, strict=True)):
            groups[-1] = (groups[-1][0] * size, step)
        else:
            groups.append((size, step))
    if len(groups) > 2:
        return None
    empty = (1, [0] * len(strides))
    if len(groups) == 1:
        # Neighbours in memory go to the inner place: they are loaded together.
        groups = [empty, groups[0]] if groups[0][1][0] == 1 else [groups[0], empty]
    (outer, outer_step), (inner, inner_step) = groups or [empty, empty]
    n = shape[dim]
    element = [1 if n == 1 else stride[dim] for stride in strides]
    return (outer, n, inner, n), list(zip(outer_step, element, inner_step, strict=True))


def _flat(count: int, operands: int) -> tuple[Rows, list[Strides]]:
    """Cut memory that all operands share the order of into pieces."""
    outer = math.ceil(count / _FLAT_PIECE)
    rows = (outer, _FLAT_PIECE, 1, count - (outer - 1) * _FLAT_PIECE)
    return rows, [(_FLAT_PIECE, 1, 0)] * operands


_FORMATS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)


def _same_order(tensors: Sequence[Tensor]) -> bool:
    """Tell whether all tensors are dense and lie in memory in the same order."""
    return any(all(t.is_contiguous(memory_format=f) for t in tensors) for f in _FORMATS)


def _layout(
    tensors: Sequence[Tensor], dim: int, pointwise: bool
) -> tuple[Rows, list[Strides]] | None:
    if pointwise and _same_order(tensors):
        return _flat(tensors[0].numel(), len(tensors))
    shape = tensors[0].shape
    return _rows(tuple(shape), dim % len(shape), tuple(t.stride() for t in tensors))


def _run(
    is_norm: bool,
    backward: bool,
    x: Tensor,
    out: Tensor | None,
    grad: Tensor | None,
    mul: Tensor | None,
    dmul: Tensor | None,
    coefficients: Sequence[Tensor | None],  # weight, bias, slope and their gradients
    stats: Tensor | None,
    group: Tensor | None,
    dim: int = -1,
    eps: float = 0.0,
    rectify: bool = False,
) -> None:
    weight, slope = coefficients[0], coefficients[2]
    assert weight is not None
    tensors = (x, out, grad, mul, dmul)
    pointwise = not is_norm and group is None and not _per_channel(slope)
    layout = _layout([t for t in tensors if t is not None], dim, pointwise)
    copies: tuple[Tensor | None, ...] = tensors
    if layout is None:
        copies = tuple(None if t is None else t.contiguous() for t in tensors)
        layout = _layout([t for t in copies if t is not None], dim, pointwise)
        assert layout is not None
    rows, strides = layout
    remaining = iter(strides)
    fields: list[int] = []
    for tensor in copies:
        fields += (0, 0, 0, 0) if tensor is None else (tensor.data_ptr(), *next(remaining))
    for tensor in coefficients:
        fields += (0, 0) if tensor is None else (tensor.data_ptr(), _TYPES[tensor.dtype])
    call = _CALL.pack(
        *fields,
        0 if stats is None else stats.data_ptr(),
        0 if group is None else group.data_ptr(),
        1 if group is None else weight.shape[0],
        1 if slope is None else slope.numel(),
        weight.shape[-1],
        rectify,
        _TYPES[x.dtype],
        torch.get_num_threads(),
        *rows,
        eps,
    )
    if build.library()(call, is_norm, backward) != 0:
        assert group is not None
        raise PolyvisionError(
            f"group must lie in 0 to {weight.shape[0] - 1}, the rows of weight; it holds "
            f"{int(group.min())} to {int(group.max())}"
        )
    for tensor, copy in ((out, copies[1]), (dmul, copies[4])):
        if tensor is not None and copy is not None and copy is not tensor:
            tensor.copy_(copy)


def _plain(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _groups(group: Tensor | None) -> Tensor | None:
    return None if group is None else group.to(torch.int64).contiguous()


def _per_channel(slope: Tensor | None) -> bool:
    return slope is not None and slope.numel() > 1


def _relu_dim(slope: Tensor | None) -> int:
    """Return the dimension rows run along: that of the channels where each has its slope."""
    return 1 if _per_channel(slope) else -1


def _rows_and_channels(slope: Tensor | None, group: Tensor | None) -> bool:
    """Tell whether coefficients go by row and slopes by channel, which the kernels do not do."""
    return group is not None and _per_channel(slope)


def poly_norm_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    dim: int,
    mul: Tensor | None,
    group: Tensor | None,
    rectify: bool,
    save_stats: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Return y and the statistics; see ``closed_form.poly_norm_forward``."""
    y, stats = torch.empty_like(x), empty_stats(x, weight, dim) if save_stats else None
    if x.numel():
        coefficients = (weight.contiguous(), _plain(bias), None, None, None, None)
        rows = stats, _groups(group), dim, eps, rectify
        _run(True, False, x, y, None, mul, None, coefficients, *rows)
    return y, stats


def poly_norm_backward(
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
    needs: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of x, weight, bias and mul; see ``closed_form.poly_norm_backward``."""
    dx, dmul = empty_grad_like(x, needs[0]), empty_grad_like(mul, needs[3])
    dweight, dbias = zero_grad_like(weight, needs[1]), zero_grad_like(bias, needs[2])
    if x.numel():
        coefficients = (weight.contiguous(), _plain(bias), None, dweight, dbias, None)
        rows = stats, _groups(group), dim, eps, rectify
        _run(True, True, x, dx, grad, mul, dmul, coefficients, *rows)
    return dx, dweight, dbias, dmul


def poly_relu_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    slope: Tensor | None,
    mul: Tensor | None,
    group: Tensor | None,
) -> Tensor:
    """Return y; see ``closed_form.poly_relu_forward``."""
    if _rows_and_channels(slope, group):
        return closed_form.poly_relu_forward(x, weight, bias, slope, mul, group)
    y = torch.empty_like(x)
    if x.numel():
        coefficients = (weight.contiguous(), _plain(bias), _plain(slope), None, None, None)
        rows = None, _groups(group), _relu_dim(slope)
        _run(False, False, x, y, None, mul, None, coefficients, *rows)
    return y


def poly_relu_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    slope: Tensor | None,
    mul: Tensor | None,
    group: Tensor | None,
    needs: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of x, weight, bias, slope and mul; see ``closed_form``."""
    if _rows_and_channels(slope, group):
        return closed_form.poly_relu_backward(grad, x, weight, bias, slope, mul, group, needs)
    dx, dmul = empty_grad_like(x, needs[0]), empty_grad_like(mul, needs[4])
    dweight, dbias = zero_grad_like(weight, needs[1]), zero_grad_like(bias, needs[2])
    dslope = zero_grad_like(slope, needs[3])
    if x.numel():
        coefficients = (
            *(weight.contiguous(), _plain(bias), _plain(slope)),
            *(dweight, dbias, dslope),
        )
        rows = None, _groups(group), _relu_dim(slope)
        _run(False, True, x, dx, grad, mul, dmul, coefficients, *rows)
    return dx, dweight, dbias, dslope, dmul
