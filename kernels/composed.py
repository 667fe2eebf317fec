"""Operations composed from torch operations: PolyCom with any base, PolyNorm in two parts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from polyvision.kernels.reference import compute_dtype, row_scale
from torch import Tensor

from polyvision.recompute import make_functional, recompute

__all__ = ["poly_norm_apply", "poly_norm_stats", "polycom"]


def polycom(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rho: Callable[[Tensor], Tensor],
    kind: str,
) -> Tensor:
    """Compute sum_i weight[i-1] * rho(x)^i (kind "I") or * rho(x^i) (kind "II"), plus bias.

    The powers are recomputed in the backward pass. If ``rho`` is a module, its parameters get
    gradients.
    """
    base_of, parameters = make_functional(rho, 1)

    def formula(x: Tensor, weight: Tensor, bias: Tensor | None, *parameters: Tensor) -> Tensor:
        v = x.to(compute_dtype(x))
        base = base_of(v, *parameters) if kind == "I" else v
        power, y = base, torch.zeros_like(v)
        for i in range(weight.shape[0]):
            term = power if kind == "I" else base_of(power, *parameters)
            y = y + weight[i].to(v.dtype) * term
            power = power * base
        if bias is not None:
            y = y + bias.to(v.dtype)
        return y.to(x.dtype)

    return recompute(formula, x, weight, bias, *parameters)


def _scaled(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    v = x.to(compute_dtype(x))
    if v.shape[dim] == 0:
        return v, v.new_ones(v.sum(dim, keepdim=True).shape, dtype=torch.float64)
    scale = row_scale(v, dim)
    return v / scale, scale.double()


def poly_norm_stats(x: Tensor, order: int, dim: int) -> Tensor:
    """Return the sums of x^2, x^4 ... over ``dim``, in fp64: x's shape without ``dim``, then order.

    fp64 on purpose: x^6 of any fp32 input fits into it, and sums of several devices can be added
    without agreeing on a scale first.
    """

    def formula(x: Tensor) -> Tensor:
        u, scale = _scaled(x, dim)
        square, power = u.square(), torch.ones_like(u)
        sums = []
        for i in range(1, order + 1):
            power = power * square
            sums.append((power.sum(dim, keepdim=True).double() * scale ** (2 * i)).squeeze(dim))
        return torch.stack(sums, -1)

    return recompute(formula, x)


def poly_norm_apply(
    x: Tensor, stats: Tensor, weight: Tensor, bias: Tensor | None, eps: float, n: int, dim: int
) -> Tensor:
    """Compute PolyNorm of a part of a row whose sums over all ``n`` elements are ``stats``."""

    def formula(x: Tensor, stats: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        u, scale = _scaled(x, dim)
        power, y = u, torch.zeros_like(u)
        for i in range(1, weight.shape[0] + 1):
            root = torch.rsqrt(stats[..., i - 1].unsqueeze(dim) / n + eps) * scale**i
            y = y + weight[i - 1].to(u.dtype) * power * root.to(u.dtype)
            power = power * u
        if bias is not None:
            y = y + bias.to(u.dtype)
        return y.to(x.dtype)

    return recompute(formula, x, stats, weight, bias)
