r"""RMSNorm with a short backward pass on CPUs, where torch has no kernel for it.

There ``torch.nn.RMSNorm`` is five operations: autograd keeps two tensors of the input's size, and
the gradient takes a dozen passes over memory, 4 % of a small model's step. Written out, with r one
number a row,

.. math::
    y = x\,r\,w, \quad r = (\mathrm{mean}(x^2) + \epsilon)^{-1/2}, \qquad
    dx = r\,(g w) - x\,\frac{r^3}{n} \sum g x w, \quad dw = \sum_{rows} r\,(g x)

it keeps x and takes five passes, both sums being matrix-vector products of g x.

Source: Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyvision.recompute import gradients, under_compiler_or_transform

__all__ = ["RMSNorm"]


class RMSNorm(nn.RMSNorm):
    """``torch.nn.RMSNorm`` over the last dimension: the same parameters and values.

    Args:
        width: size of the last dimension.
        eps: added to the mean of squares.

    Shape:
        (..., width) -> (..., width).

    Example:
        >>> RMSNorm(2, eps=1e-6)(torch.tensor([[3.0, 4.0]])).square().mean().round(decimals=4)
        tensor(1., grad_fn=<RoundBackward1>)
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__(width, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise. Narrow inputs, other devices and the compiler are left to torch."""
        wide = x.dtype in (torch.float32, torch.float64) and x.dtype == self.weight.dtype
        if (
            wide
            and x.device.type == "cpu"
            and torch.is_grad_enabled()
            and not under_compiler_or_transform()
        ):
            y: Tensor = _RMSNorm.apply(x, self.weight, self.eps)
            return y
        # In one kernel, which takes no fp32 weights for the bf16 that autocast makes.
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        n = x.shape[-1]
        norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        r = norm.square_().div_(n).add_(eps).rsqrt_()  # (..., 1)
        ctx.save_for_backward(x, weight, r)
        ctx.eps = eps
        return (x * r).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, r = ctx.saved_tensors
        n = x.shape[-1]
        if torch.is_grad_enabled():  # the backward pass is itself differentiated

            def formula(x: Tensor, weight: Tensor) -> Tensor:
                return F.rms_norm(x, (n,), weight, ctx.eps)

            return *gradients(formula, grad, (x, weight), ctx.needs_input_grad[:2], True), None
        products = (grad * x).reshape(-1, n)  # (rows, n)
        sums = products.mv(weight).view_as(r)
        dx = (grad * weight).mul_(r).addcmul_(x, sums * r.pow(3), value=-1 / n)
        return dx, products.t().mv(r.flatten()), None
