"""The public functions: polynomial composition activations on tensors.

Coefficients ascend: ``weight[i]`` multiplies the power ``i + 1``. Inputs may have any layout; the
computation runs in fp32 (fp64 for fp64) and the result has the dtype of ``x``.

Source: Zhuo et al., "Polynomial Composition Activations: Unleashing the Dynamics of Large Language
Models", 2024, https://arxiv.org/abs/2411.03884.
"""

from __future__ import annotations

import math

from torch import Tensor

from polyvision import kernels

__all__ = ["MAX_ORDER", "poly_norm", "poly_relu"]

MAX_ORDER = 8


def poly_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    *,
    dim: int = -1,
    mul: Tensor | None = None,
) -> Tensor:
    r"""Weighted sum of the powers of ``x``, each divided by its root mean square along ``dim``.

    .. math:: y = \sum_{i=1}^{r} w_{i-1}\, x^i / \sqrt{\mathrm{mean}_{dim}(x^{2i}) + \epsilon} + b

    This is Algorithm 2 of the paper. Equation 3 there divides by the L2 norm instead, which equals
    this function divided by the square root of the row's length.

    Args:
        x: floating-point tensor of any shape.
        weight: coefficients of x^1 ... x^r, shape ``(r,)`` with r from 1 to 8.
        bias: constant term, shape ``(1,)``; None for none.
        eps: added to each mean of squares, greater than 0.
        dim: the feature dimension that is normalised over.
        mul: tensor of the shape of ``x`` that multiplies the result before it is rounded (gated form).

    Returns:
        Tensor with the shape and dtype of ``x``.

    Raises:
        ValueError: a shape, dtype or value does not fit; the text names it.

    Example:
        >>> x = torch.tensor([[1.0, -2.0, 2.0]])
        >>> poly_norm(x, torch.tensor([1.0, 0.0, 0.0])).square().mean().round(decimals=4)
        tensor(1.)
    """
    _check_input("poly_norm", x, weight, bias, mul)
    if not (isinstance(eps, float | int) and 0 < eps < math.inf):
        raise ValueError(f"poly_norm: eps must be a finite number greater than 0, got {eps!r}")
    if x.ndim == 0 or not -x.ndim <= dim < x.ndim:
        raise ValueError(f"poly_norm: dim={dim} does not exist in x of shape {tuple(x.shape)}")
    return kernels.poly_norm(x, weight, bias, eps, dim, mul)


def poly_relu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    slope: Tensor | None = None,
    mul: Tensor | None = None,
) -> Tensor:
    r"""Polynomial of the rectified input.

    .. math:: y = \sum_{i=1}^{r} w_{i-1}\, \max(x, 0)^i + b

    Args:
        x: floating-point tensor of any shape.
        weight: coefficients of the powers 1 ... r, shape ``(r,)`` with r from 1 to 8.
        bias: constant term, shape ``(1,)``; None for none.
        slope: with it the base is PReLU, ``max(x, 0) + slope * min(x, 0)`` (PolyPReLU); shape
            ``(1,)``, or one value per channel of dim 1.
        mul: tensor of the shape of ``x`` that multiplies the result before it is rounded (gated form).

    Returns:
        Tensor with the shape and dtype of ``x``.

    Raises:
        ValueError: a shape or dtype does not fit; the text names it.

    Example:
        >>> poly_relu(torch.tensor([-1.0, 2.0]), torch.tensor([1.0, 0.5, 0.25]))
        tensor([0., 6.])
    """
    _check_input("poly_relu", x, weight, bias, mul)
    if slope is not None and slope.numel() != 1:
        channels = x.shape[1] if x.ndim > 1 else None
        if slope.ndim != 1 or slope.numel() != channels:
            raise ValueError(
                f"poly_relu: slope must have shape (1,) or one value per channel of dim 1 "
                f"({channels}), got shape {tuple(slope.shape)} for x of shape {tuple(x.shape)}"
            )
    return kernels.poly_relu(x, weight, bias, slope, mul)


def _check_input(
    name: str, x: Tensor, weight: Tensor, bias: Tensor | None, mul: Tensor | None
) -> None:
    if not x.is_floating_point():
        raise ValueError(f"{name}: x must be floating point, got {x.dtype}")
    if weight.ndim != 1 or not 1 <= weight.shape[0] <= MAX_ORDER:
        raise ValueError(
            f"{name}: weight must have shape (order,) with order 1 to {MAX_ORDER}, "
            f"got {tuple(weight.shape)}"
        )
    if bias is not None and bias.shape != (1,):
        raise ValueError(f"{name}: bias must have shape (1,), got {tuple(bias.shape)}")
    if mul is not None and mul.shape != x.shape:
        raise ValueError(
            f"{name}: mul must have the shape of x, {tuple(x.shape)}, got {tuple(mul.shape)}"
        )
