"""Learned combinations of a dictionary of activations: fixed ones, and ones chosen by each token.

The dictionary is identity, ReLU, ReLU^2, Leaky ReLU (slope 0.01), GELU, SiLU and tanh, in this
order. fp16 and bf16 are computed in fp32 and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from polyvision.activations.base.coefficients import Coefficients
from polyvision.activations.base.shared import Device, Dtype, number, parameter, wide
from polyvision.activations.registry import register_activation
from polyvision.recompute import recompute

__all__ = ["BiMoA", "LearnedActivation", "MoA"]

_SOURCE = "Wang et al. 2026, https://arxiv.org/abs/2605.26647"
_SIZE = 7

torch.fx.wrap("wide")
torch.fx.wrap("_la")
torch.fx.wrap("_moa")
torch.fx.wrap("_bi_moa")


def _combined(x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Add up the functions of the dictionary, each times its weight."""
    positive = x.relu()
    identity, relu, relu2, leaky, gelu, silu, tanh = weights
    y = identity * x + relu * positive + relu2 * positive * positive
    y = y + leaky * (positive - 0.01 * (-x).relu())
    y = y + gelu * (x * (1 + torch.erf(x / math.sqrt(2))) / 2)
    return y + silu * (x * torch.sigmoid(x)) + tanh * torch.tanh(x)


def _shares(logits: Tensor | None, x: Tensor, first: int) -> Sequence[Tensor]:
    """Return a token's weights of the dictionary, from its logits; 1/2 each without any."""
    if logits is None:
        return [torch.full((), 0.5, dtype=x.dtype, device=x.device)] * _SIZE
    shares = torch.sigmoid(wide(logits))
    return [shares[..., k : k + 1] for k in range(first, first + _SIZE)]


@register_activation(
    "la",
    kind="pointwise",
    source=_SOURCE,
    formula="sum_k w_k phi_k(x), phi: x, relu, relu^2, leaky relu, gelu, silu, tanh",
)
class LearnedActivation(Coefficients):
    r"""Learned activation (LA): a learned linear combination of seven activations.

    .. math:: y = \sum_{k=1}^{7} w_k\, \phi_k(x)

    :math:`\phi` is identity, ReLU, ReLU^2, Leaky ReLU, GELU, SiLU, tanh. Range: all numbers; at its
    initial values finite in fp16 for inputs up to 240, in bf16 up to 1e19. Only the input is
    kept for the backward pass.

    Args:
        inplace: accepted and ignored.
        initial: initial value of each weight. Only a summary of the paper gives it, as 1.
        device: where the weights live.
        dtype: dtype of the weights.

    Shape:
        Input and output: any shape. Parameter: ``weight`` (7,), each ``initial``.

    Wang et al. 2026, https://arxiv.org/abs/2605.26647.

    Raises:
        ValueError: a value is out of range.

    Example:
        >>> LearnedActivation()(torch.tensor([0.0, 1.0])).round(decimals=2)
        tensor([0.0000, 6.3300], grad_fn=<RoundBackward1>)
    """

    def __init__(
        self,
        inplace: bool = False,
        *,
        initial: float = 1.0,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__()
        self._initial = number(self, "initial", initial)
        self.weight = parameter(self, [self._initial] * _SIZE, device, dtype)

    def function_name(self) -> str:
        """Name the function that the weights belong to."""
        return type(self).__name__

    def reset_parameters(self) -> None:
        """Set every weight to its initial value."""
        nn.init.constant_(self.weight, self._initial)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the activation to ``x``."""
        return _la(x, self.weight)

    def extra_repr(self) -> str:
        """Show the initial value of the weights."""
        return f"initial={self._initial}"


def _la(x: Tensor, weight: Tensor) -> Tensor:
    def formula(x: Tensor, weight: Tensor) -> Tensor:
        v = wide(x)
        return _combined(v, weight.to(v.dtype).unbind()).to(x.dtype)

    return recompute(formula, x, weight)


@register_activation(
    "moa",
    kind="mixture",
    source=_SOURCE,
    formula="sum_k sigmoid(u_k . t) phi_k(x), for the token t that x was made from",
)
class MoA(nn.Module):
    r"""Mixture of activations: each token weighs the seven functions of LA for itself.

    .. math:: y = \sum_{k=1}^{7} \sigma(u_k \cdot t)\, \phi_k(x), \quad x = W t

    t is the token that enters the feed-forward network, which holds the u_k as the matrix
    ``mixing``. They start at 0, our choice, since the paper's initial values are not known to us:
    every weight is 1/2. The hidden size stays that of an ungated network, so it has 7 times its
    width more parameters. Finite in fp16 for inputs up to 240. Only the inputs are kept for the
    backward pass.

    Shape:
        The hidden layer (..., hidden), and logits (..., 7) -> (..., hidden). Without logits every
        weight is 1/2.

    Wang et al. 2026, https://arxiv.org/abs/2605.26647 (type I).

    Example:
        >>> MoA()(torch.tensor([[1.0]]), torch.full((1, 7), -100.0)).tolist()
        [[0.0]]
    """

    mixing: ClassVar[int] = _SIZE  # logits that a feed-forward network makes of each token

    def forward(self, x: Tensor, logits: Tensor | None = None) -> Tensor:
        """Combine the functions of ``x`` by the weights of its token."""
        return _moa(x, logits)


def _moa(x: Tensor, logits: Tensor | None) -> Tensor:
    def formula(x: Tensor, logits: Tensor | None) -> Tensor:
        v = wide(x)
        return _combined(v, _shares(logits, v, 0)).to(x.dtype)

    return recompute(formula, x, logits)


@register_activation(
    "bi_moa",
    kind="gated",
    source=_SOURCE,
    formula="moa(gate) * moa(up), each with weights of its own",
)
class BiMoA(nn.Module):
    r"""Mixture of activations on both sides of a gated unit.

    .. math::
        y = \Big(\sum_k \sigma(u_k \cdot t)\, \phi_k(gate)\Big)
        \Big(\sum_k \sigma(v_k \cdot t)\, \phi_k(up)\Big)

    t is the token that enters the feed-forward network, which holds u and v as the matrix
    ``mixing``; they start at 0, as for ``MoA``. Beside the matrices of a gated network, with 2/3 of
    the hidden size, it has 14 times its width more parameters. Finite in fp16 for inputs up to 13.
    Only the inputs are kept for the backward pass.

    Shape:
        Two projections (..., hidden), and logits (..., 14) -> (..., hidden). Without logits every
        weight is 1/2.

    Wang et al. 2026, https://arxiv.org/abs/2605.26647 (type II).
    """

    mixing: ClassVar[int] = 2 * _SIZE

    def forward(self, gate: Tensor, up: Tensor, logits: Tensor | None = None) -> Tensor:
        """Combine two projections of equal shape by the weights of their token."""
        return _bi_moa(gate, up, logits)


def _bi_moa(gate: Tensor, up: Tensor, logits: Tensor | None) -> Tensor:
    def formula(gate: Tensor, up: Tensor, logits: Tensor | None) -> Tensor:
        a, b = wide(gate), wide(up)
        left = _combined(a, _shares(logits, a, 0))
        return (left * _combined(b, _shares(logits, b, _SIZE))).to(gate.dtype)

    return recompute(formula, gate, up, logits)
