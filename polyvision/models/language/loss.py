r"""Cross-entropy of the output matrix without ever holding all its logits.

Logits of 50,000 words take 200 kB a token in fp32, as much as everything else that a small model
keeps. Here a few tokens at a time get logits, loss and gradients, which are kept in the size of
the hidden states and of the matrix; so no product is computed twice. PyTorch 2.14 has the like in
``linear_cross_entropy``, which this stands in for: it serves older releases too, compiles without
a graph break and gives the z-loss.

Source: Wijmans et al. 2024 (losses without logits), https://arxiv.org/abs/2411.09009; Hsu et al.
2024 (gradients in the forward pass), https://arxiv.org/abs/2410.10989; Chowdhery et al. 2022
(z-loss), https://arxiv.org/abs/2204.02311.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["IGNORED", "compute_dtype", "linear_cross_entropy"]

# Targets of this value are left out, as in torch.
IGNORED = -100
# Logits held at once: 64 MiB of fp32.
_LOGITS = 2**24


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    z_weight: float = 0.0,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Return the loss summed over all tokens, and the cross-entropy in it.

    .. math:: loss = \sum_n (\mathrm{lse}_n - l_{n t_n}) + \zeta \sum_n \mathrm{lse}_n^2, \qquad
        l = x W^T, \quad \mathrm{lse}_n = \ln \sum_v e^{l_{nv}}

    Logits are products in autocast's dtype where it is on, and treated in fp32 (fp64 for fp64). Can
    be differentiated once.

    Args:
        x: (N, width) hidden states.
        weight: (V, width) output matrix.
        targets: (N,) int64; ``IGNORED`` leaves a token out.
        z_weight: the weight of the z-loss.
        chunk: tokens at a time; None for as many as have 2^24 logits.

    Returns:
        Two scalars in fp32 or wider: the loss, and its first sum in nats, which has no gradient.

    Example:
        >>> x, w, t = torch.randn(5, 8), torch.randn(11, 8), torch.randint(11, (5,))
        >>> loss, nats = linear_cross_entropy(x, w, t, chunk=2)
        >>> torch.allclose(loss, F.cross_entropy(x @ w.T, t, reduction="sum"))
        True
    """
    rows = chunk or max(1, _LOGITS // weight.shape[0])
    needs = torch.is_grad_enabled() and (x.requires_grad, weight.requires_grad)
    result: tuple[Tensor, Tensor] = _LinearCrossEntropy.apply(
        x, weight, targets, z_weight, rows, needs or (False, False)
    )
    return result


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        z_weight: float,
        rows: int,
        needs: tuple[bool, bool],
    ) -> tuple[Tensor, Tensor]:
        dtype = compute_dtype(x)
        matrix = weight.to(dtype)
        wide = torch.promote_types(dtype, torch.float32)
        nats, z = x.new_zeros((), dtype=wide), x.new_zeros((), dtype=wide)
        dx = torch.empty_like(x, dtype=dtype) if needs[0] else None
        dweight: Tensor | None = None
        for start in range(0, len(x), rows):
            part = slice(start, start + rows)
            states, wanted = x[part].to(dtype), targets[part]
            logits = F.linear(states, matrix).to(wide)  # (rows, V)
            kept = wanted != IGNORED
            place = wanted.where(kept, 0)[:, None]
            right = logits.gather(-1, place)[:, 0]
            top = logits.amax(-1, keepdim=True)
            powers = logits.sub_(top).exp_()  # one exponential serves loss and gradient
            total = powers.sum(-1)
            lse = total.log() + top[:, 0]
            nats = nats + (lse - right).where(kept, 0).sum()
            z = z + lse.square().where(kept, 0).sum()
            if not any(needs):
                continue
            # d nats = softmax - onehot, d z = 2 lse softmax
            slope = (1 + 2 * z_weight * lse).where(kept, 0)
            dlogits = powers.mul_((slope / total)[:, None])
            dlogits.scatter_add_(-1, place, -kept.to(wide)[:, None])
            narrow = dlogits.to(dtype)
            if dx is not None:
                dx[part] = narrow @ matrix
            if not needs[1]:
                continue
            if dweight is None:
                dweight = (narrow.t() @ states).to(wide)
            elif dtype == wide:
                dweight.addmm_(narrow.t(), states)  # without a second matrix
            else:
                dweight += narrow.t() @ states
        ctx.save_for_backward(dx, dweight)
        ctx.dtypes = x.dtype, weight.dtype
        ctx.mark_non_differentiable(nats)
        return nats + z_weight * z, nats

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Any:
        dx, dweight = ctx.saved_tensors
        x_dtype, weight_dtype = ctx.dtypes
        # Scaled here, in wide arithmetic, not before: 1/tokens would underflow in fp16.
        return (
            None if dx is None else (dx.to(grad.dtype) * grad).to(x_dtype),
            None if dweight is None else (dweight * grad).to(weight_dtype),
            None,
            None,
            None,
            None,
        )


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of a matrix product of ``x``: autocast's where it is on, but for fp64."""
    device = x.device.type
    on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if on and x.dtype != torch.float64 else x.dtype
