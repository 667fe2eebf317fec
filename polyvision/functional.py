"""The public functions: polynomial composition activations on tensors.

Coefficients ascend: ``weight[i]`` multiplies the power ``i + 1``. Inputs may have any layout; the
computation runs in fp32 (fp64 for fp64) and the result has the dtype of ``x``.

The functions are single steps in a graph of ``torch.fx``, which knows those of this file by
``torch.fx.wrap``; for a name imported into another file call ``torch.fx.wrap("poly_norm")`` there.

Source: Zhuo et al., "Polynomial Composition Activations: Unleashing the Dynamics of Large Language
Models", 2024, https://arxiv.org/abs/2411.03884.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from polyvision import kernels
from polyvision.errors import PolyvisionError

__all__ = [
    "MAX_ORDER",
    "ffn_down",
    "poly_norm",
    "poly_norm_apply",
    "poly_norm_stats",
    "poly_relu",
    "poly_relu_norm",
    "polycom",
]

MAX_ORDER = 8
_COEFFICIENTS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

for _name in ("poly_norm", "poly_norm_apply", "poly_norm_stats", "poly_relu", "poly_relu_norm"):
    torch.fx.wrap(_name)


def poly_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    *,
    dim: int = -1,
    mul: Tensor | None = None,
    group: Tensor | None = None,
) -> Tensor:
    r"""Weighted sum of the powers of ``x``, each divided by its root mean square along ``dim``.

    .. math:: y = \sum_{i=1}^{r} w_{i-1}\, x^i / \sqrt{\mathrm{mean}_{dim}(x^{2i}) + \epsilon} + b

    This is Algorithm 2 of the paper. Equation 3 there divides by the L2 norm instead, which equals
    this function divided by the square root of the row's length.

    Args:
        x: floating-point tensor of any shape.
        weight: coefficients of x^1 ... x^r, shape ``(r,)`` with r from 1 to 8; ``(groups, r)`` with
            ``group``.
        bias: constant term, shape ``(1,)``, or ``(groups, 1)`` with ``group``; None for none.
        eps: added to each mean of squares, greater than 0.
        dim: the feature dimension that is normalised over.
        mul: tensor of the shape of ``x`` that multiplies the result before it is rounded (gated
            form).
        group: which coefficients each row takes (for example those of its expert): integers of the
            shape of ``x`` without ``dim``.

    Returns:
        Tensor with the shape and dtype of ``x``.

    Raises:
        ValueError: a shape, dtype or value does not fit; the text names it.

    Example:
        >>> x = torch.tensor([[1.0, -2.0, 2.0]])
        >>> poly_norm(x, torch.tensor([1.0, 0.0, 0.0])).square().mean().round(decimals=4)
        tensor(1.)
    """
    _check_norm("poly_norm", x, weight, bias, eps, dim, mul, group)
    return kernels.poly_norm(x, weight, bias, eps, dim, mul, group)


def poly_relu_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    *,
    dim: int = -1,
    mul: Tensor | None = None,
    group: Tensor | None = None,
) -> Tensor:
    """PolyNorm of the rectified input, ``poly_norm(relu(x), ...)``, in one pass.

    Arguments, result and errors are those of ``poly_norm``. The paper names this variant but does
    not define it; this is the reading that fits its description.

    Example:
        >>> poly_relu_norm(torch.tensor([[-3.0, 2.0]]), torch.tensor([1.0])).round(decimals=3)
        tensor([[0.0000, 1.4140]])
    """
    _check_norm("poly_relu_norm", x, weight, bias, eps, dim, mul, group)
    return kernels.poly_norm(x, weight, bias, eps, dim, mul, group, rectify=True)


def poly_relu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    slope: Tensor | None = None,
    mul: Tensor | None = None,
    group: Tensor | None = None,
) -> Tensor:
    r"""Polynomial of the rectified input.

    .. math:: y = \sum_{i=1}^{r} w_{i-1}\, \max(x, 0)^i + b

    Args:
        x: floating-point tensor of any shape.
        weight: coefficients of the powers 1 ... r, shape ``(r,)`` with r from 1 to 8;
            ``(groups, r)`` with ``group``.
        bias: constant term, shape ``(1,)``, or ``(groups, 1)`` with ``group``; None for none.
        slope: with it the base is PReLU, ``max(x, 0) + slope * min(x, 0)`` (PolyPReLU); shape
            ``(1,)``, or one value per channel of dim 1.
        mul: tensor of the shape of ``x`` that multiplies the result before it is rounded (gated
            form).
        group: which coefficients each row along the last dimension takes: integers of the shape of
            ``x`` without the last dimension.

    Returns:
        Tensor with the shape and dtype of ``x``.

    Raises:
        ValueError: a shape or dtype does not fit; the text names it.

    Example:
        >>> poly_relu(torch.tensor([-1.0, 2.0]), torch.tensor([1.0, 0.5, 0.25]))
        tensor([0., 6.])
    """
    _check_input("poly_relu", x, weight, bias, -1, mul, group)
    _check_operands("poly_relu", x, {"slope": slope}, {})
    if slope is not None and slope.numel() != 1:
        channels = x.shape[1] if x.ndim > 1 else None
        if slope.ndim != 1 or slope.numel() != channels:
            raise PolyvisionError(
                f"poly_relu: slope must have shape (1,) or one value per channel of dim 1 "
                f"({channels}), got shape {tuple(slope.shape)} for x of shape {tuple(x.shape)}"
            )
    return kernels.poly_relu(x, weight, bias, slope, mul, group)


def polycom(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    rho: Callable[[Tensor], Tensor],
    kind: str = "I",
) -> Tensor:
    """Polynomial composition with any base function, equation 1 of the paper.

    Type I is ``sum_i weight[i-1] * rho(x)^i + bias``, type II ``sum_i weight[i-1] * rho(x^i) +
    bias``. Composed from torch operations; only the inputs are kept for the backward pass, which
    computes the powers again, so ``rho`` must be deterministic.

    Args:
        x: floating-point tensor of any shape.
        weight: coefficients of the powers 1 ... r, shape ``(r,)`` with r from 1 to 8.
        bias: constant term, shape ``(1,)``; None for none.
        rho: the base, a function or module of one tensor; a module's parameters get gradients,
            tensors that a function refers to do not.
        kind: "I" or "II".

    Returns:
        Tensor with the shape and dtype of ``x``.

    Raises:
        ValueError: a shape, dtype or value does not fit; the text names it.

    Example:
        >>> polycom(torch.tensor([2.0]), torch.tensor([1.0, 1.0]), rho=torch.square, kind="II")
        tensor([20.])
    """
    _check_input("polycom", x, weight, bias, -1, None, None)
    if kind not in ("I", "II"):
        raise PolyvisionError(f"polycom: kind must be 'I' or 'II', got {kind!r}")
    if not callable(rho):
        raise PolyvisionError(f"polycom: rho must be a function of one tensor, got {rho!r}")
    return kernels.polycom(x, weight, bias, rho, kind)


def poly_norm_stats(x: Tensor, order: int, *, dim: int = -1) -> Tensor:
    """Sums of the even powers of a part of each row: the first half of PolyNorm.

    Where the feature dimension is split over devices, add the results of all of them (one small
    ``all_reduce``) and go on with ``poly_norm_apply``.

    Args:
        x: this device's part of the input.
        order: highest power r of the activation, 1 to 8.
        dim: the feature dimension.

    Returns:
        The sums of x^2, x^4 ... x^2r: the shape of ``x`` without ``dim``, then r. They are fp64, so
        that no fp16, bf16 or fp32 input overflows them at the usual orders, up to 3.

    Raises:
        ValueError: a dtype or value does not fit; the text names it.

    Example:
        >>> poly_norm_stats(torch.tensor([1.0, 2.0]), 2)
        tensor([ 5., 17.], dtype=torch.float64)
    """
    if not (isinstance(order, int) and 1 <= order <= MAX_ORDER):
        raise PolyvisionError(f"poly_norm_stats: order must be 1 to {MAX_ORDER}, got {order!r}")
    _check_dim("poly_norm_stats", x, dim)
    return kernels.poly_norm_stats(x, order, dim % x.ndim)


def poly_norm_apply(
    x: Tensor,
    stats: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    *,
    n: int,
    dim: int = -1,
) -> Tensor:
    """PolyNorm of a part of each row, given the sums over whole rows: the second half.

    Differentiable in ``stats`` too, so that the gradient takes the same small ``all_reduce`` back.

    Args:
        x: this device's part of the input.
        stats: ``poly_norm_stats`` summed over the devices.
        weight: coefficients, shape ``(r,)``.
        bias: constant term, shape ``(1,)``; None for none.
        eps: added to each mean of squares.
        n: the length of a whole row.
        dim: the feature dimension.

    Returns:
        Tensor with the shape and dtype of ``x``.

    Raises:
        ValueError: a shape, dtype or value does not fit; the text names it.

    Example:
        >>> x, w = torch.randn(4, 6), torch.tensor([0.5, 0.3, 0.2])
        >>> torch.allclose(poly_norm_apply(x, poly_norm_stats(x, 3), w, n=6), poly_norm(x, w))
        True
    """
    _check_norm("poly_norm_apply", x, weight, bias, eps, dim, None, None)
    if not (isinstance(n, int) and n > 0):
        raise PolyvisionError(
            f"poly_norm_apply: n must be the length of a whole row, at least 1, got {n!r}"
        )
    rows = _rows(x, dim)
    if stats.shape != (*rows, weight.shape[0]):
        raise PolyvisionError(
            f"poly_norm_apply: stats must have shape {(*rows, weight.shape[0])} for this x, dim "
            f"and weight, got {tuple(stats.shape)}"
        )
    return kernels.poly_norm_apply(x, stats, weight, bias, eps, n, dim % x.ndim)


def ffn_down(
    inputs: Tensor | tuple[Tensor, ...],
    weight: Tensor,
    activation: Callable[..., Tensor],
    bias: Tensor | None = None,
) -> Tensor:
    """Activation and down projection of a feed-forward network, keeping the pre-activation only.

    Computes ``linear(activation(*inputs), weight, bias)``. The backward pass computes the
    activation again, which costs little beside the matrix products, instead of keeping its result;
    so it does in compiled code. Under ``torch.func`` and in exports it is the plain composition.

    Args:
        inputs: the pre-activation, or those of a gated activation.
        weight: weight of the down projection, shape ``(out, in)``.
        activation: a deterministic function or module; a module's parameters get gradients, tensors
            that a function refers to do not.
        bias: bias of the down projection; None for none.

    Returns:
        Tensor of shape ``(..., out)``.

    Example:
        >>> h, w = torch.randn(2, 8, requires_grad=True), torch.randn(4, 8)
        >>> ffn_down(h, w, torch.nn.functional.silu).shape
        torch.Size([2, 4])
    """
    inputs = (inputs,) if isinstance(inputs, Tensor | torch.fx.Proxy) else tuple(inputs)
    if any(isinstance(x, torch.fx.Proxy) for x in inputs):  # the same function, without keeping
        return torch.nn.functional.linear(activation(*inputs), weight, bias)
    return kernels.ffn_down(inputs, weight, activation, bias)


def _rows(x: Tensor, dim: int) -> tuple[int, ...]:
    dim %= x.ndim
    return (*x.shape[:dim], *x.shape[dim + 1 :])


def _check_dim(name: str, x: Tensor, dim: int) -> None:
    if not x.is_floating_point():
        raise PolyvisionError(f"{name}: x must be floating point, got {x.dtype}")
    if x.ndim == 0 or not -x.ndim <= dim < x.ndim:
        raise PolyvisionError(f"{name}: dim={dim} does not exist in x of shape {tuple(x.shape)}")


def _check_norm(
    name: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    dim: int,
    mul: Tensor | None,
    group: Tensor | None,
) -> None:
    if not (isinstance(eps, float | int) and 0 < eps < math.inf):
        raise PolyvisionError(f"{name}: eps must be a finite number greater than 0, got {eps!r}")
    _check_dim(name, x, dim)
    _check_input(name, x, weight, bias, dim, mul, group)


def _check_input(
    name: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dim: int,
    mul: Tensor | None,
    group: Tensor | None,
) -> None:
    if not x.is_floating_point():
        raise PolyvisionError(f"{name}: x must be floating point, got {x.dtype}")
    _check_operands(name, x, {"weight": weight, "bias": bias}, {"mul": mul, "group": group})
    form = "(order,)" if group is None else "(groups, order), since group is given,"
    if weight.ndim != 1 + (group is not None) or not 1 <= weight.shape[-1] <= MAX_ORDER:
        raise PolyvisionError(
            f"{name}: weight must have shape {form} with order 1 to {MAX_ORDER}, "
            f"got {tuple(weight.shape)}"
        )
    bias_shape = (*weight.shape[:-1], 1)
    if bias is not None and bias.shape != bias_shape:
        raise PolyvisionError(f"{name}: bias must have shape {bias_shape}, got {tuple(bias.shape)}")
    if mul is not None and mul.shape != x.shape:
        raise PolyvisionError(
            f"{name}: mul must have the shape of x, {tuple(x.shape)}, got {tuple(mul.shape)}"
        )
    if group is not None:
        _check_group(name, x, dim, group)


def _check_operands(
    name: str,
    x: Tensor,
    coefficients: dict[str, Tensor | None],
    others: dict[str, Tensor | None],
) -> None:
    """The kernels take addresses: what lies elsewhere or in another form must not reach them."""
    for operand, value in (coefficients | others).items():
        if value is not None and value.device != x.device:
            raise PolyvisionError(
                f"{name}: {operand} is on {value.device}, x on {x.device}; move one of them"
            )
    for operand, value in coefficients.items():
        if value is not None and value.dtype not in _COEFFICIENTS:
            raise PolyvisionError(
                f"{name}: {operand} must be float32, bfloat16, float16 or float64, "
                f"got {value.dtype}"
            )


def _check_group(name: str, x: Tensor, dim: int, group: Tensor) -> None:
    rows = _rows(x, dim) if x.ndim else None
    if group.shape != rows or group.dtype not in (torch.int32, torch.int64):
        raise PolyvisionError(
            f"{name}: group must hold int32 or int64 numbers of shape {rows} (x without "
            f"dim {dim}), got {group.dtype} of shape {tuple(group.shape)}"
        )
