"""The backend ``reference``: closed-form gradients from torch operations, for any device.

It keeps x and one small tensor of statistics for the backward pass, like the fused kernels, and
defines the interface that every backend has: four functions whose tensors are plain and need no
gradient. What the statistics hold is the business of the backend that wrote them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from polyvision.kernels import reference
from polyvision.kernels.reference import (
    channelwise,
    coefficient,
    compute_dtype,
    prelu,
    row_scale,
)
from torch import Tensor

__all__ = [
    "empty_grad_like",
    "empty_stats",
    "poly_norm_backward",
    "poly_norm_forward",
    "poly_relu_backward",
    "poly_relu_forward",
    "stats_shape",
    "supports",
    "zero_grad_like",
]


def supports(x: Tensor, mul: Tensor | None = None, slope: Tensor | None = None) -> bool:
    """Tell whether this backend takes these operands: always."""
    return True


def stats_shape(x: Tensor, weight: Tensor, dim: int) -> list[int]:
    """Return the shape of the statistics: order, then the shape of x without ``dim``."""
    rows = list(x.shape)
    del rows[dim]
    return [weight.shape[-1], *rows]


def empty_stats(x: Tensor, weight: Tensor, dim: int) -> Tensor:
    """Return an empty tensor for the statistics: one number per power and row."""
    return x.new_empty(stats_shape(x, weight, dim), dtype=compute_dtype(x))


def empty_grad_like(tensor: Tensor | None, needed: bool) -> Tensor | None:
    """Return an empty tensor for the gradient of a tensor, laid out like it."""
    return torch.empty_like(tensor) if tensor is not None and needed else None


def zero_grad_like(tensor: Tensor | None, needed: bool) -> Tensor | None:
    """Return contiguous zeros for the gradient of coefficients."""
    if tensor is None or not needed:
        return None
    return torch.zeros_like(tensor, memory_format=torch.contiguous_format)


def _laid_out_like(value: Tensor, x: Tensor) -> Tensor:
    """Return ``value`` in the dtype and memory format of ``x``."""
    return torch.empty_like(x).copy_(value)


def _sum(terms: Tensor, like: Tensor, group: Tensor | None, dim: int) -> Tensor:
    """Add up the terms of one coefficient: a scalar, or one sum per group."""
    if group is None:
        return terms.sum()
    groups = terms.new_zeros(like.shape[0])
    return groups.index_add_(0, group.flatten(), terms.sum(dim).flatten())


def _norm_base(x: Tensor, dim: int, rectify: bool) -> tuple[Tensor, Tensor]:
    v = x.to(compute_dtype(x))
    if rectify:
        v = v.relu()
    scale = row_scale(v, dim)
    return v / scale, scale


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
    """Return y, laid out like x, and the statistics (see ``empty_stats``), or None for these.

    Arguments as in ``reference.poly_norm``. Only the backward pass reads the statistics.
    """
    stats = empty_stats(x, weight, dim) if save_stats else None
    y = reference.poly_norm(x, weight, bias, eps, dim, mul, group, rectify)
    if stats is not None and x.numel():
        u, scale = _norm_base(x, dim, rectify)
        for i in range(1, weight.shape[-1] + 1):
            mean = (u**i).square().mean(dim) + eps / scale.squeeze(dim) ** (2 * i)
            stats[i - 1] = mean.rsqrt()
    return _laid_out_like(y, x), stats


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
    """Return the gradients of x, weight, bias and mul; None where ``needs`` is False.

    dx = sum_i i a_i u^(i-1) r_i / s * (g - z_i mean(g z_i)), z_i = u^i r_i, u = x / s; never
    a product such as r^3 x^5, which loses all digits for large x.
    """
    if not x.numel():
        dweight, dbias = zero_grad_like(weight, needs[1]), zero_grad_like(bias, needs[2])
        return empty_grad_like(x, needs[0]), dweight, dbias, empty_grad_like(mul, needs[3])
    u, scale = _norm_base(x, dim, rectify)
    g = grad.to(u.dtype)
    dmul = None
    if mul is not None:
        if needs[3]:
            value = reference.poly_norm(x.to(u.dtype), weight, bias, eps, dim, None, group, rectify)
            dmul = _laid_out_like(g * value, mul)
        g = g * mul.to(u.dtype)
    dx, sums = torch.zeros_like(u), []
    power = torch.ones_like(u)
    for i in range(1, weight.shape[-1] + 1):
        root = stats[i - 1].unsqueeze(dim)
        slope = i * coefficient(weight, i - 1, group, dim, u.dtype) * power * root / scale
        power = power * u
        z = power * root
        correlation = g * z
        sums.append(_sum(correlation, weight, group, dim))
        dx += slope * (g - z * correlation.mean(dim, keepdim=True))
    if rectify:
        dx = dx.masked_fill(u <= 0, 0)
    return (
        _laid_out_like(dx, x) if needs[0] else None,
        torch.stack(sums, -1).to(weight.dtype) if needs[1] else None,
        _bias_gradient(g, bias, group, dim) if needs[2] else None,
        dmul,
    )


def _bias_gradient(g: Tensor, bias: Tensor | None, group: Tensor | None, dim: int) -> Tensor | None:
    return None if bias is None else _sum(g, bias, group, dim).to(bias.dtype).view_as(bias)


def poly_relu_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    slope: Tensor | None,
    mul: Tensor | None,
    group: Tensor | None,
) -> Tensor:
    """Return y, laid out like x. Arguments as in ``reference.poly_relu``."""
    return _laid_out_like(reference.poly_relu(x, weight, bias, slope, mul, group), x)


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
    """Return the gradients of x, weight, bias, slope and mul; None where ``needs`` is False.

    dx = g b'(x) sum_i i a_i b(x)^(i-1), b the rectifier.
    """
    v = x.to(compute_dtype(x))
    g = grad.to(v.dtype)
    dmul = None
    if mul is not None:
        if needs[4]:
            dmul = _laid_out_like(g * reference.poly_relu(v, weight, bias, slope, None, group), mul)
        g = g * mul.to(v.dtype)
    base = prelu(v, slope)
    order = weight.shape[-1]
    power, sums = base, []
    for _ in range(order):
        sums.append(_sum(g * power, weight, group, -1))
        power = power * base
    outer = order * coefficient(weight, order - 1, group, -1, v.dtype) * torch.ones_like(base)
    for i in range(order - 1, 0, -1):
        outer = outer * base + i * coefficient(weight, i - 1, group, -1, v.dtype)
    outer = outer * g
    negative = torch.zeros_like(outer) if slope is None else outer * channelwise(slope, v)
    dslope = None
    if slope is not None and needs[3]:
        terms = torch.where(v <= 0, outer * v, 0)
        over = [d for d in range(v.ndim) if d != 1] if slope.numel() != 1 else list(range(v.ndim))
        dslope = terms.sum(over).to(slope.dtype).view_as(slope)
    return (
        _laid_out_like(torch.where(v <= 0, negative, outer), x) if needs[0] else None,
        torch.stack(sums, -1).to(weight.dtype) if needs[1] else None,
        _bias_gradient(g, bias, group, -1) if needs[2] else None,
        dslope,
        dmul,
    )
