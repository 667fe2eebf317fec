"""Gated activations, of two projections: for the feed-forward networks of language models.

``gate`` and ``up`` have one shape. A feed-forward network with one has three matrices, so its
hidden size is 2/3 of that of an ungated one (``gated_hidden``), and it computes the activation
again in the backward pass; by themselves these modules keep what autograd keeps.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyvision import functional
from polyvision.activations.base.coefficients import Coefficients, Polynomial
from polyvision.activations.base.shared import Device, Dtype, number, parameter, wide
from polyvision.activations.polynomial import PolyNorm
from polyvision.activations.registry import register_activation

__all__ = [
    "GEGLU",
    "GLU",
    "XATGLU",
    "XGEGLU",
    "Bilinear",
    "DReLU",
    "PolyNormGLU",
    "PolyReLUGLU",
    "PowLU",
    "ReGLU",
    "SwiGLU",
    "SwiGLUClip",
    "XSwiGLU",
]

torch.fx.wrap("wide")

_SHAZEER = "Shazeer 2020, https://arxiv.org/abs/2002.05202"
_POLYCOM = "Zhuo et al. 2024, https://arxiv.org/abs/2411.03884"
_EXPANDED = "Huang 2024, https://arxiv.org/abs/2405.20768"


@register_activation(
    "glu",
    kind="gated",
    source="Dauphin et al. 2017, https://arxiv.org/abs/1612.08083",
    formula="sigmoid(gate) * up",
)
class GLU(nn.Module):
    """Gated linear unit, sigmoid(gate) * up.

    No parameters. The gate is in (0, 1), so the output is smaller than ``up``: finite in fp16 and
    bf16 for every input. Computed in the dtype of the inputs.

    Dauphin et al. 2017, https://arxiv.org/abs/1612.08083; in feed-forward networks Shazeer 2020,
    https://arxiv.org/abs/2002.05202.
    """

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        """Combine two projections of equal shape."""
        return gate.sigmoid() * up


@register_activation("bilinear", kind="gated", source=_SHAZEER, formula="gate * up")
class Bilinear(nn.Module):
    """Bilinear unit, gate * up: no activation but the product.

    No parameters. Range: all numbers; finite in fp16 for inputs up to 255. The product is rounded
    once, to the dtype of the inputs.

    Shazeer 2020, https://arxiv.org/abs/2002.05202.
    """

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        """Combine two projections of equal shape."""
        return gate * up


@register_activation("reglu", kind="gated", source=_SHAZEER, formula="max(gate, 0) * up")
class ReGLU(nn.Module):
    """Gated unit with ReLU, max(gate, 0) * up.

    No parameters. Range: all numbers; finite in fp16 for inputs up to 255. Computed in the dtype of
    the inputs.

    Shazeer 2020, https://arxiv.org/abs/2002.05202.
    """

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        """Combine two projections of equal shape."""
        return F.relu(gate) * up


@register_activation("geglu", kind="gated", source=_SHAZEER, formula="gelu(gate) * up")
class GEGLU(nn.Module):
    """Gated unit with GELU in its exact form, gelu(gate) * up.

    No parameters. Range: all numbers; finite in fp16 for inputs up to 255. Computed in the dtype of
    the inputs.

    Shazeer 2020, https://arxiv.org/abs/2002.05202.
    """

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        """Combine two projections of equal shape."""
        return F.gelu(gate) * up


@register_activation("swiglu", kind="gated", source=_SHAZEER, formula="silu(gate) * up")
class SwiGLU(nn.Module):
    """Gated unit with SiLU, silu(gate) * up.

    No parameters. Range: all numbers; finite in fp16 for inputs up to 255. Computed in the dtype of
    the inputs.

    Shazeer 2020, https://arxiv.org/abs/2002.05202.
    """

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        """Combine two projections of equal shape."""
        return F.silu(gate) * up


@register_activation(
    "drelu",
    kind="gated",
    source="Song et al. 2024, https://arxiv.org/abs/2406.05955",
    formula="max(gate, 0) * max(up, 0)",
)
class DReLU(nn.Module):
    """Gated unit with ReLU on both sides, max(gate, 0) * max(up, 0): sparser than ReGLU.

    No parameters. Range: [0, inf); finite in fp16 for inputs up to 255. The product is rounded
    once, to the dtype of the inputs.

    Song et al. 2024 (Turbo Sparse), https://arxiv.org/abs/2406.05955.
    """

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        """Combine two projections of equal shape."""
        return F.relu(gate) * F.relu(up)


@register_activation(
    "swiglu_clip",
    kind="gated",
    source="OpenAI 2025 (gpt-oss), https://arxiv.org/abs/2508.10925",
    formula="g sigmoid(alpha g) (clip(up, -limit, limit) + shift), g = min(gate, limit)",
)
class SwiGLUClip(nn.Module):
    r"""SwiGLU with clipped inputs, as in the gpt-oss models.

    .. math::
        y = g\, \sigma(\alpha g)\, (\mathrm{clip}(up, -L, L) + s), \quad g = \min(gate, L)

    Nothing is learned. The output lies within L (L + |s|), 56 by default, so it is finite in fp16
    and bf16 for every input. fp16 and bf16 are computed in fp32 and rounded once.

    Args:
        limit: L, greater than 0.
        alpha: factor inside the sigmoid; 1 makes the gate SiLU.
        shift: s, added to the clipped ``up``; 0 for a SwiGLU that is only clipped.

    OpenAI 2025, https://arxiv.org/abs/2508.10925 and the code of gpt-oss.

    Raises:
        ValueError: a value is out of range.

    Example:
        >>> SwiGLUClip(alpha=0.0)(torch.tensor([9.0]), torch.tensor([-20.0])).tolist()
        [-21.0]
    """

    def __init__(self, *, limit: float = 7.0, alpha: float = 1.702, shift: float = 1.0) -> None:
        super().__init__()
        self.limit = number(self, "limit", limit, above=0)
        self.alpha, self.shift = number(self, "alpha", alpha), number(self, "shift", shift)

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        """Combine two projections of equal shape."""
        g = wide(gate).clamp(max=self.limit)
        linear = wide(up).clamp(-self.limit, self.limit) + self.shift
        return (g * torch.sigmoid(self.alpha * g) * linear).to(gate.dtype)

    def extra_repr(self) -> str:
        """Show the settings that the function depends on."""
        return f"limit={self.limit}, alpha={self.alpha}, shift={self.shift}"


@register_activation(
    "powlu",
    kind="gated",
    source="Jiang et al. 2026, https://arxiv.org/abs/2605.25704",
    formula="f(gate) * up, f(t) = t^(m / (sqrt(t) + 1)) sigmoid(t) for t > 0, else silu(t)",
)
class PowLU(nn.Module):
    r"""Power linear unit: the gate grows by a power that falls from m to 0, so it stays bounded.

    .. math::
        y = f(gate)\, up, \quad
        f(t) = t^{m / (\sqrt{t} + 1)} \sigma(t) \text{ for } t > 0, \quad
        f(t) = t\, \sigma(t) \text{ otherwise}

    Nothing is learned. f is within [-0.28, 5.33] for m = 3 and tends to 1, so the output is finite
    in fp16 for every gate and ``up`` up to 12,000. At 0 the derivative of f is 1/2, that from the
    left; from the right it is 0 for m > 1. fp16 and bf16 are computed in fp32 and rounded once.

    Args:
        m: the power near 0, greater than 0 and less than 10; beyond, x f(x) is not monotone.

    Jiang et al. 2026, equation 1, https://arxiv.org/abs/2605.25704.

    Raises:
        ValueError: ``m`` is out of range.

    Example:
        >>> PowLU()(torch.tensor([100.0]), torch.tensor([1.0])).round(decimals=2)
        tensor([3.5100])
    """

    def __init__(self, *, m: float = 3.0) -> None:
        super().__init__()
        self.m = number(self, "m", m, above=0, below=10)

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        """Combine two projections of equal shape."""
        t = wide(gate)
        above = torch.where(t > 0, t, 1.0)  # no roots and logarithms of what is not positive
        power = torch.exp(above.log() * self.m / (above.sqrt() + 1))
        return (torch.where(t > 0, power, t) * torch.sigmoid(t) * wide(up)).to(gate.dtype)

    def extra_repr(self) -> str:
        """Show the settings that the function depends on."""
        return f"m={self.m}"


class _Expanded(Coefficients):
    """A gated unit whose gate reaches from -alpha to 1 + alpha, with alpha learned."""

    def __init__(
        self,
        *,
        alpha: float = 0.0,
        second_order: bool = False,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__()
        self._initial = number(self, "alpha", alpha)
        self.second_order = second_order
        self.alpha = parameter(self, [alpha], device, dtype)

    def function_name(self) -> str:
        """Name the function that alpha belongs to."""
        return type(self).__name__ + ("2" if self.second_order else "")

    def reset_parameters(self) -> None:
        """Set alpha to its initial value."""
        nn.init.constant_(self.alpha, self._initial)

    def gating(self, x: Tensor) -> Tensor:
        """Compute the gate before it is expanded, within (0, 1)."""
        raise NotImplementedError

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        """Combine two projections of equal shape."""
        x, alpha = wide(gate), wide(self.alpha)
        y = (self.gating(x) * (1 + 2 * alpha) - alpha) * wide(up)
        return (y * x if self.second_order else y).to(gate.dtype)

    def extra_repr(self) -> str:
        """Show the settings that the function depends on."""
        return f"alpha={self._initial}, second_order={self.second_order}"


@register_activation(
    "xatglu",
    kind="gated",
    source=_EXPANDED,
    formula="((arctan(gate) / pi + 1/2) (1 + 2 alpha) - alpha) * up",
)
class XATGLU(_Expanded):
    """Gated unit with arctan, expanded: (g(gate) (1 + 2 alpha) - alpha) * up.

    Here g(x) = arctan(x) / pi + 1/2.

    The gate lies within (-alpha, 1 + alpha), where alpha is learned, one for each module, shape
    (1,). The output is finite in fp16 for every gate and ``up`` up to 65,504 / (1 + |alpha|); of
    second order for inputs up to 255 at alpha = 0. fp16 and bf16 are computed in fp32 and rounded
    once.

    Args:
        alpha: initial value; 0 for a gate that is not expanded (ATGLU).
        second_order: multiply by the gate's input too. The author found that expanding the gate
            helps the first order only.
        device: where alpha lives.
        dtype: dtype of alpha.

    Huang 2024, https://arxiv.org/abs/2405.20768.

    Raises:
        ValueError: a value is out of range.
    """

    def gating(self, x: Tensor) -> Tensor:
        """Compute the gate before it is expanded, within (0, 1)."""
        return torch.atan(x) / math.pi + 0.5


@register_activation(
    "xgeglu",
    kind="gated",
    source=_EXPANDED,
    formula="(Phi(gate) (1 + 2 alpha) - alpha) * up",
)
class XGEGLU(_Expanded):
    """Gated unit with the gate of GELU, expanded: (g(gate) (1 + 2 alpha) - alpha) * up.

    Here g(x) = Phi(x).

    The gate lies within (-alpha, 1 + alpha), where alpha is learned, one for each module, shape
    (1,). The output is finite in fp16 for every gate and ``up`` up to 65,504 / (1 + |alpha|); of
    second order for inputs up to 255 at alpha = 0. fp16 and bf16 are computed in fp32 and rounded
    once.

    Args:
        alpha: initial value; 0 for a gate that is not expanded (GEGLU, with ``second_order``).
        second_order: multiply by the gate's input too. The author found that expanding the gate
            helps the first order only.
        device: where alpha lives.
        dtype: dtype of alpha.

    Huang 2024, https://arxiv.org/abs/2405.20768.

    Raises:
        ValueError: a value is out of range.
    """

    def gating(self, x: Tensor) -> Tensor:
        """Compute the gate before it is expanded, within (0, 1)."""
        return (1 + torch.erf(x / math.sqrt(2))) / 2


@register_activation(
    "xswiglu",
    kind="gated",
    source=_EXPANDED,
    formula="(sigmoid(gate) (1 + 2 alpha) - alpha) * up",
)
class XSwiGLU(_Expanded):
    """Gated unit with the gate of SiLU, expanded: (g(gate) (1 + 2 alpha) - alpha) * up.

    Here g(x) = sigmoid(x).

    The gate lies within (-alpha, 1 + alpha), where alpha is learned, one for each module, shape
    (1,). The output is finite in fp16 for every gate and ``up`` up to 65,504 / (1 + |alpha|); of
    second order for inputs up to 255 at alpha = 0. fp16 and bf16 are computed in fp32 and rounded
    once.

    Args:
        alpha: initial value; 0 for a gate that is not expanded (GLU; SwiGLU with ``second_order``).
        second_order: multiply by the gate's input too. The author found that expanding the gate
            helps the first order only.
        device: where alpha lives.
        dtype: dtype of alpha.

    Huang 2024, https://arxiv.org/abs/2405.20768.

    Raises:
        ValueError: a value is out of range.
    """

    def gating(self, x: Tensor) -> Tensor:
        """Compute the gate before it is expanded, within (0, 1)."""
        return torch.sigmoid(x)


@register_activation(
    "polynorm_glu",
    kind="gated",
    source=f"PolyNorm of {_POLYCOM}",
    formula="(sum_i w_i gate^i / rms(gate^i) + b) * up",
)
class PolyNormGLU(PolyNorm):
    r"""Gated unit with PolyNorm, polynorm(gate) * up, in one kernel.

    .. math::
        y = up \Big(\sum_{i=1}^{r} w_{i-1}\, gate^i / \sqrt{\mathrm{mean}_{dim}(gate^{2i}) +
        \epsilon} + b\Big)

    The product is taken in fp32, before the result is rounded. PolyNorm is at most
    sum_i |w_i| sqrt(n) + |b| for a row of n, so the output is finite in fp16 for every gate and
    ``up`` up to 65,504 divided by that. With ``groups`` each expert of a mixture has its own
    coefficients, and one call serves them all. The Motif models have this form; what they add to it
    is not certain (docs/activations-left-out.md).

    Arguments, parameters and errors are those of ``PolyNorm``: ``weight`` (order,), each 1/order,
    and ``bias`` (1,), 0; with ``groups`` (groups, order) and (groups, 1).

    Zhuo et al. 2024, https://arxiv.org/abs/2411.03884 (PolyNorm).

    Example:
        >>> gate, up = torch.tensor([[3.0, -3.0]]), torch.tensor([[2.0, 5.0]])
        >>> PolyNormGLU(order=1)(gate, up).round().tolist()
        [[2.0, -5.0]]
    """

    _function = "PolyNormGLU"

    def forward(  # type: ignore[override]
        self, gate: Tensor, up: Tensor, group: Tensor | None = None
    ) -> Tensor:
        """Combine two projections; ``group`` names the coefficients of each row."""
        weight, bias = self.coefficients(gate)
        return functional.poly_norm(gate, weight, bias, self.eps, dim=self.dim, mul=up, group=group)


@register_activation(
    "polyrelu_glu",
    kind="gated",
    source=f"PolyReLU of {_POLYCOM}",
    formula="(sum_i w_i max(gate, 0)^i + b) * up",
)
class PolyReLUGLU(Polynomial):
    r"""Gated unit with PolyReLU, polyrelu(gate) * up, in one kernel.

    .. math:: y = up \Big(\sum_{i=1}^{r} w_{i-1}\, \max(gate, 0)^i + b\Big)

    Parameters: ``weight`` (order,), each 1/order, and ``bias`` (1,), 0; with ``groups`` (groups,
    order) and (groups, 1). Nothing bounds the powers: with order 3 the output is finite in fp16 for
    inputs up to 20. The product is taken in fp32, before the result is rounded.

    Args:
        order: highest power r, 1 to 8.
        bias: learn a constant term.
        device: where the coefficients live.
        dtype: dtype of the coefficients.
        groups: a set of coefficients for each of so many groups of rows, such as the experts of a
            mixture; the call then takes the group of each row. None for one set.
        init: ``equal`` for coefficients 1/order; ``base`` for (1, 0, ..., 0), ReGLU.

    Zhuo et al. 2024, https://arxiv.org/abs/2411.03884 (PolyReLU).

    Raises:
        ValueError: a value is out of range.

    Example:
        >>> PolyReLUGLU(order=2)(torch.tensor([2.0]), torch.tensor([-1.0])).tolist()
        [-3.0]
    """

    _function = "PolyReLUGLU"

    def __init__(
        self,
        *,
        order: int = 3,
        bias: bool = True,
        device: Device = None,
        dtype: Dtype = None,
        groups: int | None = None,
        init: Literal["equal", "base"] = "equal",
    ) -> None:
        super().__init__(order, bias, device, dtype, groups, init)

    def forward(self, gate: Tensor, up: Tensor, group: Tensor | None = None) -> Tensor:
        """Combine two projections; ``group`` names the coefficients of each row."""
        return functional.poly_relu(gate, self.weight, self.bias, mul=up, group=group)

    def extra_repr(self) -> str:
        """Show the settings that the function depends on."""
        return f"order={self.order}" + ("" if self.bias is not None else ", bias=False")
