"""The plain formulas: the oracle of every fused kernel, and what differentiates twice.

Numerics are those of the kernels: fp32 inside for fp16, bf16 and fp32, fp64 inside for fp64, the
result rounded once to the dtype of ``x``. Composed from torch operations, hence differentiable any
number of times, exportable, and usable under ``torch.func``.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "channelwise",
    "coefficient",
    "compute_dtype",
    "poly_norm",
    "poly_relu",
    "prelu",
    "row_scale",
]


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of the arithmetic: fp64 for fp64, else fp32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def coefficient(
    values: Tensor, column: int, group: Tensor | None, dim: int, dtype: torch.dtype
) -> Tensor:
    """Return one coefficient: a scalar, or one per row, broadcastable along ``dim``."""
    values = values.to(dtype)
    if group is None:
        return values[column]
    # Unlike indexing, this takes no negative numbers.
    return values[:, column].index_select(0, group.flatten()).view(group.shape).unsqueeze(dim)


def row_scale(v: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """Return a power of two near each row's maximum, at least 1.

    Dividing by it is exact and keeps x^(2i) from overflowing. Smaller rows need no scaling, since
    eps bounds the root. An inf or nan in the row must reach the formula, not the scale.

    ``frexp`` would give the exponent exactly, but has no counterpart in ONNX. The logarithm may
    round over an integer, which does no harm: the scaled row stays below 4, its powers in range.
    """
    with torch.no_grad():
        peak = v.abs().nan_to_num(1.0, 1.0, 1.0).amax(dim, keepdim=True)
        exponent = peak.clamp_min(1.0).log2().floor()
        return exponent.clamp(0.0, 126.0 if v.dtype == torch.float32 else 1022.0).exp2()


def _finish(
    y: Tensor, x: Tensor, bias: Tensor | None, mul: Tensor | None, group: Tensor | None, dim: int
) -> Tensor:
    if bias is not None:
        y = y + coefficient(bias, 0, group, dim, y.dtype)
    if mul is not None:
        y = y * mul.to(y.dtype)
    return y.to(x.dtype)


def poly_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    dim: int = -1,
    mul: Tensor | None = None,
    group: Tensor | None = None,
    rectify: bool = False,
) -> Tensor:
    """Compute sum_i weight[i-1] * x^i * rsqrt(mean(x^(2i), dim) + eps) + bias, times ``mul``.

    With ``rectify`` the base is relu(x). With ``group`` (the shape of x without ``dim``), row r
    takes ``weight[group[r]]`` and ``bias[group[r]]``.
    """
    v = x.to(compute_dtype(x))
    if rectify:
        v = v.relu()
    if v.shape[dim] == 0:
        return _finish(v, x, bias, mul, group, dim)
    scale = row_scale(v, dim)
    u = v / scale
    power = u
    y = torch.zeros_like(v)
    for i in range(1, weight.shape[-1] + 1):
        root = torch.rsqrt(power.square().mean(dim, keepdim=True) + eps / scale ** (2 * i))
        y = y + coefficient(weight, i - 1, group, dim, v.dtype) * power * root
        power = power * u
    return _finish(y, x, bias, mul, group, dim)


def channelwise(slope: Tensor, v: Tensor) -> Tensor:
    """Return the slope in the dtype of ``v``; several values are laid along dim 1."""
    slope = slope.to(v.dtype)
    return slope.view(-1, *([1] * (v.ndim - 2))) if slope.numel() != 1 else slope


def prelu(v: Tensor, slope: Tensor | None) -> Tensor:
    """Compute max(v, 0) + slope * min(v, 0).

    ``torch.nn.functional.prelu`` would round to bf16 under autocast.
    """
    return v.relu() if slope is None else torch.where(v > 0, v, channelwise(slope, v) * v)


def poly_relu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    slope: Tensor | None = None,
    mul: Tensor | None = None,
    group: Tensor | None = None,
) -> Tensor:
    """Compute sum_i weight[i-1] * relu(x)^i + bias by Horner's rule, times ``mul``.

    With ``slope`` the base is PReLU, max(x, 0) + slope * min(x, 0), instead of ReLU; a slope of
    several values follows dim 1, as in ``torch.nn.PReLU``. With ``group`` (the shape of x without
    the last dimension), row r takes ``weight[group[r]]`` and ``bias[group[r]]``.
    """
    v = x.to(compute_dtype(x))
    base = prelu(v, slope)
    order = weight.shape[-1]
    y = coefficient(weight, order - 1, group, -1, v.dtype) * base
    for i in range(order - 2, -1, -1):
        y = (y + coefficient(weight, i, group, -1, v.dtype)) * base
    return _finish(y, x, bias, mul, group, -1)
