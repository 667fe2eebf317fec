"""Launch functions of the Triton kernels: layouts, outputs, grids; no dispatcher, no autograd.

Nothing is validated here (``polyvision.functional`` does) and no input is written to. Contiguous
rows, channels_last, NCHW and slices of them along the outer dims are read in place; other layouts
are copied. ``x`` is fp16, bf16 or fp32, coefficients have any float dtype. Triton is imported at
the first launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from polyvision.kernels import closed_form
from polyvision.kernels.triton.config import Tile, norm_tile, programs, relu_tile, warp_size
from polyvision.kernels.triton.layout import (
    Layout,
    fastest_dim,
    laid_out_like,
    match,
    match_optional,
    row_layout,
    rows_to_logical,
    rows_to_storage,
)
from polyvision.kernels.triton.sums import coefficient_gradients, sum_buffers
from torch import Tensor

__all__ = ["poly_norm_backward", "poly_norm_forward", "poly_relu_backward", "poly_relu_forward"]


def poly_norm_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    dim: int,
    mul: Tensor | None = None,
    group: Tensor | None = None,
    rectify: bool = False,
    save_stats: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Compute ``polyvision.functional.poly_norm`` and what its backward needs.

    Args:
        x: the input.
        weight: ``(order,)``, or ``(groups, order)`` with ``group``.
        bias: one value, or one per group; None for none.
        eps: added to each mean of squares.
        dim: the feature dimension.
        mul: multiplies the result before it is rounded.
        group: group of each row, shape of ``x`` without ``dim`` or flat.
        rectify: take the powers of relu(x) (PolyReLUNorm).
        save_stats: also return the statistics.

    Returns:
        The result, laid out like ``x``, and fp32 statistics (see ``norm.py``) of shape (order,
        shape of ``x`` without ``dim``) for the backward of the same ``x``.
    """
    order = weight.shape[-1]
    if x.numel() == 0:
        rows = list(x.shape)
        del rows[dim]
        return torch.empty_like(x), x.new_empty([order, *rows], dtype=torch.float32)
    from polyvision.kernels.triton import norm

    x, layout = row_layout(x, dim)
    x, x_stride = match(x, x, layout)
    mul, mul_stride = match_optional(mul, x, layout)
    y, y_stride = match(torch.empty_like(x), x, layout)
    stats = None
    if save_stats:
        stats = torch.empty((order, layout.rows), dtype=torch.float32, device=x.device)
    tile = norm_tile(layout.size, layout.inner, x.element_size(), order, mul is not None, rectify)
    with _device(x):
        norm.poly_norm_forward[(_tiles(layout, tile),)](
            x,
            mul,
            y,
            stats,
            weight.contiguous(),
            None if bias is None else bias.contiguous(),
            None if group is None else rows_to_storage(group, x, layout),
            layout.outer,
            layout.inner,
            layout.size,
            x_stride,
            mul_stride,
            y_stride,
            eps,
            order,
            rectify,
            layout.inner > 1,
            tile.looped,
            tile.rows,
            tile.features,
            num_warps=tile.threads // warp_size(),
        )
    return y, None if stats is None else rows_to_logical(stats, x, layout)


def poly_norm_backward(
    grad: Tensor,
    x: Tensor,
    stats: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    dim: int,
    mul: Tensor | None = None,
    group: Tensor | None = None,
    rectify: bool = False,
    needs: Sequence[bool] = (True, True, True, True),
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Compute the gradients of x, weight, bias and mul; those not in ``needs`` are None.

    The other arguments are those of the forward; ``stats`` already holds eps, which is taken only
    so that all backends are called alike. The sums over rows have a fixed order.
    """
    if x.numel() == 0:
        return _zero_gradients((x, weight, bias, mul), needs)  # type: ignore[return-value]
    from polyvision.kernels.triton import norm

    x, layout = row_layout(x, dim)
    x, x_stride = match(x, x, layout)
    grad, grad_stride = match(grad, x, layout)
    factor, factor_stride = match_optional(mul, x, layout)
    dx, dx_stride = match_optional(torch.empty_like(x) if needs[0] else None, x, layout)
    dmul = torch.empty_like(factor) if needs[3] and factor is not None else None
    dmul, dmul_stride = match_optional(dmul, x, layout)
    if group is not None:
        group = rows_to_storage(group, x, layout)
    order = weight.shape[-1]
    tile = norm_tile(layout.size, layout.inner, x.element_size(), order, mul is not None, rectify)
    grid = min(_tiles(layout, tile), programs(x.device))
    partials = moments = None
    if needs[1] or needs[2]:
        partials, moments = sum_buffers(x, weight, bias, group, (grid, 1), layout.rows)
    with _device(x):
        norm.poly_norm_backward[(grid,)](
            grad,
            x,
            factor,
            rows_to_storage(stats, x, layout),
            weight.contiguous(),
            None if bias is None else bias.contiguous(),
            group,
            dx,
            dmul,
            partials,
            moments,
            layout.outer,
            layout.inner,
            layout.size,
            grad_stride,
            x_stride,
            factor_stride,
            dx_stride,
            dmul_stride,
            order,
            rectify,
            layout.inner > 1,
            tile.looped,
            tile.rows,
            tile.features,
            num_warps=tile.threads // warp_size(),
        )
        dweight, dbias = coefficient_gradients(partials, moments, group, weight, bias, needs[1:3])
    return dx, dweight, dbias, laid_out_like(dmul, mul, factor)


def poly_relu_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    slope: Tensor | None = None,
    mul: Tensor | None = None,
    group: Tensor | None = None,
) -> Tensor:
    """Compute ``polyvision.functional.poly_relu``.

    ``slope`` has one value, or one per channel of dim 1. With ``group`` the coefficients are per
    row along the last dim, as for ``poly_norm_forward``.
    """
    if x.numel() == 0:
        return torch.empty_like(x)
    if _rows_and_channels(x, slope, group):
        return closed_form.poly_relu_forward(x, weight, bias, slope, mul, group)
    from polyvision.kernels.triton import relu

    x, layout = row_layout(x, _relu_dim(x, slope, group))
    x, x_stride = match(x, x, layout)
    mul, mul_stride = match_optional(mul, x, layout)
    y, y_stride = match(torch.empty_like(x), x, layout)
    strides = (x_stride, y_stride) if mul is None else (x_stride, y_stride, mul_stride)
    layout = _flat(layout, strides, slope, group)
    tile = relu_tile(layout.size, layout.inner)
    with _device(x):
        relu.poly_relu_forward[(_tiles(layout, tile), -(-layout.size // tile.features))](
            x,
            mul,
            y,
            weight.contiguous(),
            None if bias is None else bias.contiguous(),
            None if slope is None else slope.contiguous(),
            None if group is None else rows_to_storage(group, x, layout),
            layout.outer,
            layout.inner,
            layout.size,
            x_stride,
            mul_stride,
            y_stride,
            int(_per_channel(slope)),
            weight.shape[-1],
            layout.inner > 1,
            tile.rows,
            tile.features,
            num_warps=tile.threads // warp_size(),
        )
    return y


def poly_relu_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    slope: Tensor | None = None,
    mul: Tensor | None = None,
    group: Tensor | None = None,
    needs: Sequence[bool] = (True, True, True, True, True),
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Compute the gradients of x, weight, bias, slope and mul; those not in ``needs`` are None.

    The other arguments are those of the forward. The sums have a fixed order.
    """
    if x.numel() == 0:
        return _zero_gradients((x, weight, bias, slope, mul), needs)  # type: ignore[return-value]
    if _rows_and_channels(x, slope, group):
        return closed_form.poly_relu_backward(grad, x, weight, bias, slope, mul, group, needs)
    from polyvision.kernels.triton import relu

    x, layout = row_layout(x, _relu_dim(x, slope, group))
    x, x_stride = match(x, x, layout)
    grad, grad_stride = match(grad, x, layout)
    factor, factor_stride = match_optional(mul, x, layout)
    dx, dx_stride = match_optional(torch.empty_like(x) if needs[0] else None, x, layout)
    dmul = torch.empty_like(factor) if needs[4] and factor is not None else None
    dmul, dmul_stride = match_optional(dmul, x, layout)
    if group is not None:
        group = rows_to_storage(group, x, layout)
    strides = (x_stride, grad_stride) if mul is None else (x_stride, grad_stride, factor_stride)
    layout = _flat(layout, strides, slope, group)
    tile = relu_tile(layout.size, layout.inner)
    blocks = -(-layout.size // tile.features)
    grid = min(_tiles(layout, tile), max(programs(x.device) // blocks, 1))
    partials = moments = slopes = None
    if needs[1] or needs[2]:
        partials, moments = sum_buffers(x, weight, bias, group, (grid, blocks), layout.rows)
    if needs[3] and slope is not None:
        slopes = torch.empty((grid, layout.size), dtype=torch.float32, device=x.device)
    with _device(x):
        relu.poly_relu_backward[(grid, blocks)](
            grad,
            x,
            factor,
            weight.contiguous(),
            None if bias is None else bias.contiguous(),
            None if slope is None else slope.contiguous(),
            group,
            dx,
            dmul,
            partials,
            moments,
            slopes,
            layout.outer,
            layout.inner,
            layout.size,
            grad_stride,
            x_stride,
            factor_stride,
            dx_stride,
            dmul_stride,
            int(_per_channel(slope)),
            weight.shape[-1],
            layout.inner > 1,
            tile.rows,
            tile.features,
            num_warps=tile.threads // warp_size(),
        )
        dweight, dbias = coefficient_gradients(partials, moments, group, weight, bias, needs[1:3])
    dslope = None
    if slopes is not None and slope is not None:
        total = slopes.sum(0) if _per_channel(slope) else slopes.sum()
        dslope = total.reshape(slope.shape).to(slope.dtype)
    return dx, dweight, dbias, dslope, laid_out_like(dmul, mul, factor)


def _device(x: Tensor) -> AbstractContextManager[None]:
    """Launch on the device of ``x``, which need not be the current one."""
    return torch.cuda.device_of(x)  # type: ignore[no-untyped-call]


def _tiles(layout: Layout, tile: Tile) -> int:
    """Return the number of tiles along the rows."""
    if layout.inner > 1:
        return layout.outer * -(-layout.inner // tile.rows)
    return -(-layout.outer // tile.rows)


def _per_channel(slope: Tensor | None) -> bool:
    return slope is not None and slope.numel() > 1


def _rows_and_channels(x: Tensor, slope: Tensor | None, group: Tensor | None) -> bool:
    """Tell whether coefficients follow rows and slopes another dim: no kernel, nobody's use."""
    return group is not None and _per_channel(slope) and x.ndim != 2


def _relu_dim(x: Tensor, slope: Tensor | None, group: Tensor | None) -> int:
    """Return the dim of the channels, of the rows, or whichever is fastest."""
    if group is not None:
        return -1
    return 1 if _per_channel(slope) else fastest_dim(x)


def _flat(
    layout: Layout, strides: tuple[int, ...], slope: Tensor | None, group: Tensor | None
) -> Layout:
    """Return dense tensors that need neither channels nor rows as one channel, in storage order."""
    if group is not None or _per_channel(slope) or layout.inner > 1:
        return layout
    if layout.outer > 1 and any(stride != layout.size for stride in strides):
        return layout
    return Layout(1, 1, layout.outer * layout.size, (), (), 0)


def _zero_gradients(
    tensors: tuple[Tensor | None, ...], needs: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Return the gradients of an empty input."""
    return tuple(
        torch.zeros_like(t) if need and t is not None else None
        for t, need in zip(tensors, needs, strict=True)
    )
