"""The plain formulas: the oracle of every fused kernel and the path where none is available.

Numerics are those of the kernels: fp32 inside for fp16, bf16 and fp32, fp64 inside for fp64, the
result rounded once to the dtype of ``x``. Composed from torch operations, hence differentiable any
number of times, exportable, and usable under ``torch.func`` and ``torch.compile``.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["poly_norm", "poly_relu"]


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _finish(y: Tensor, x: Tensor, bias: Tensor | None, mul: Tensor | None) -> Tensor:
    if bias is not None:
        y = y + bias.to(y.dtype)
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
) -> Tensor:
    """Compute sum_i weight[i-1] * x^i * rsqrt(mean(x^(2i), dim) + eps) + bias, times ``mul``.

    Rows larger than 1 are divided by a power of two near their maximum, and eps with them: exact
    algebra, and x^(2i) cannot overflow. Smaller rows need no scaling, since eps bounds the root.
    """
    v = x.to(_compute_dtype(x))
    if v.shape[dim] == 0:
        return _finish(v, x, bias, mul)
    with torch.no_grad():
        # An inf or nan in the row must reach the formula, not the scale.
        peak = v.abs().nan_to_num(1.0, 1.0, 1.0).amax(dim, keepdim=True).clamp_min(1.0)
        scale = torch.exp2(torch.floor(torch.log2(peak)))
    u = v / scale
    power = u
    y = torch.zeros_like(v)
    for i in range(1, weight.shape[0] + 1):
        mean = power.square().mean(dim, keepdim=True)
        y = y + weight[i - 1].to(v.dtype) * power * torch.rsqrt(mean + eps / scale ** (2 * i))
        power = power * u
    return _finish(y, x, bias, mul)


def poly_relu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    slope: Tensor | None = None,
    mul: Tensor | None = None,
) -> Tensor:
    """Compute sum_i weight[i-1] * relu(x)^i + bias by Horner's rule, times ``mul``.

    With ``slope`` the base is PReLU, max(x, 0) + slope * min(x, 0), instead of ReLU; a slope of
    several values follows dim 1, as in ``torch.nn.PReLU``.
    """
    v = x.to(_compute_dtype(x))
    if slope is None:
        base = v.relu()
    else:
        base = torch.nn.functional.prelu(v, slope.to(v.dtype))
    y = weight[-1].to(v.dtype) * base
    for i in range(weight.shape[0] - 2, -1, -1):
        y = (y + weight[i].to(v.dtype)) * base
    return _finish(y, x, bias, mul)
