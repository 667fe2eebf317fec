"""Smooth gates of their own input, x times something between 0 and 1, fixed and learned."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from polyvision.activations.base.pointwise import Pointwise, learned
from polyvision.activations.registry import register_activation

__all__ = [
    "ATLU",
    "SALU",
    "SAU",
    "XATLU",
    "XGELU",
    "APTx",
    "CRReLU",
    "DSiLU",
    "GoLU",
    "QuickGELU",
    "Swish",
    "SwishT",
    "SwishTA",
    "SwishTB",
    "SwishTC",
    "XSiLU",
]

_EXPANDED = "Huang 2024, https://arxiv.org/abs/2405.20768"
_SWISH_T = "Seo et al. 2024, https://arxiv.org/abs/2407.01012"


def _phi(x: Tensor) -> Tensor:
    """Return the distribution function of the standard normal distribution."""
    return (1 + torch.erf(x / math.sqrt(2))) / 2


def _arctan_gate(x: Tensor) -> Tensor:
    return (torch.atan(x) + math.pi / 2) / math.pi


@register_activation(
    "dsilu",
    kind="pointwise",
    source="Elfwing et al. 2017, https://arxiv.org/abs/1702.03118",
    formula="sigmoid(x) (1 + x (1 - sigmoid(x)))",
)
class DSiLU(Pointwise):
    """Derivative of SiLU, sigmoid(x) (1 + x (1 - sigmoid(x))), in [-0.1, 1.1].

    Elfwing et al. 2017, https://arxiv.org/abs/1702.03118.
    """

    @staticmethod
    def formula(x: Tensor) -> Tensor:
        """Compute the function."""
        return torch.sigmoid(x) * (1 + x * torch.sigmoid(-x))


@register_activation(
    "quick_gelu",
    kind="pointwise",
    source="Hendrycks and Gimpel 2016, https://arxiv.org/abs/1606.08415",
    formula="x sigmoid(1.702 x)",
)
class QuickGELU(Pointwise):
    """GELU by a sigmoid, x sigmoid(1.702 x), in [-0.17, inf).

    Hendrycks and Gimpel 2016, https://arxiv.org/abs/1606.08415.
    """

    @staticmethod
    def formula(x: Tensor) -> Tensor:
        """Compute the function."""
        return x * torch.sigmoid(1.702 * x)


@register_activation(
    "golu",
    kind="pointwise",
    source="Das et al. 2025, https://arxiv.org/abs/2502.03654",
    formula="x alpha exp(-beta exp(-gamma x))",
)
class GoLU(Pointwise):
    """Gompertz linear unit, x alpha exp(-beta exp(-gamma x)), alpha = beta = gamma = 1, fixed.

    In [-0.16, inf) with these. Das et al. 2025, https://arxiv.org/abs/2502.03654.
    """

    positive = frozenset({"alpha", "beta", "gamma"})

    @staticmethod
    def formula(x: Tensor, *, alpha: float = 1.0, beta: float = 1.0, gamma: float = 1.0) -> Tensor:
        """Compute the function; exp(80) is enough for a gate of 0, and its square is finite."""
        return x * alpha * torch.exp(-beta * torch.exp((-gamma * x).clamp(max=80.0)))


@register_activation(
    "atlu", kind="pointwise", source=_EXPANDED, formula="x (arctan(x) + pi / 2) / pi"
)
class ATLU(Pointwise):
    """Arctan linear unit, x (arctan(x) + pi / 2) / pi, in (-1 / pi, inf).

    Huang 2024, https://arxiv.org/abs/2405.20768.
    """

    @staticmethod
    def formula(x: Tensor) -> Tensor:
        """Compute the function."""
        return x * _arctan_gate(x)


@register_activation(
    "xatlu",
    kind="pointwise",
    source=_EXPANDED,
    formula="x (g (1 + 2 alpha) - alpha), g = (arctan(x) + pi / 2) / pi",
)
class XATLU(Pointwise):
    """ATLU whose gate g reaches from -alpha to 1 + alpha, x (g (1 + 2 alpha) - alpha).

    alpha = 0, learned. In (-inf, inf). Huang 2024, https://arxiv.org/abs/2405.20768.
    """

    @staticmethod
    def formula(x: Tensor, *, alpha: Tensor = learned(0.0)) -> Tensor:
        """Compute the function."""
        return x * (_arctan_gate(x) * (1 + 2 * alpha) - alpha)


@register_activation(
    "xgelu", kind="pointwise", source=_EXPANDED, formula="x (Phi(x) (1 + 2 alpha) - alpha)"
)
class XGELU(Pointwise):
    """GELU whose gate reaches from -alpha to 1 + alpha, x (Phi(x) (1 + 2 alpha) - alpha).

    alpha = 0, learned. In (-inf, inf). Huang 2024, https://arxiv.org/abs/2405.20768.
    """

    @staticmethod
    def formula(x: Tensor, *, alpha: Tensor = learned(0.0)) -> Tensor:
        """Compute the function."""
        return x * (_phi(x) * (1 + 2 * alpha) - alpha)


@register_activation(
    "xsilu", kind="pointwise", source=_EXPANDED, formula="x (sigmoid(x) (1 + 2 alpha) - alpha)"
)
class XSiLU(Pointwise):
    """SiLU whose gate reaches from -alpha to 1 + alpha, x (sigmoid(x) (1 + 2 alpha) - alpha).

    alpha = 0, learned. In (-inf, inf). Huang 2024, https://arxiv.org/abs/2405.20768.
    """

    @staticmethod
    def formula(x: Tensor, *, alpha: Tensor = learned(0.0)) -> Tensor:
        """Compute the function."""
        return x * (torch.sigmoid(x) * (1 + 2 * alpha) - alpha)


@register_activation(
    "swish",
    kind="pointwise",
    source="Ramachandran et al. 2017, https://arxiv.org/abs/1710.05941",
    formula="x sigmoid(beta x)",
)
class Swish(Pointwise):
    """SiLU with a slope of its gate, x sigmoid(beta x).

    beta = 1, learned; fixed with ``trainable=False``. In [-0.28 / beta, inf). Ramachandran et al.
    2017, https://arxiv.org/abs/1710.05941.
    """

    @staticmethod
    def formula(x: Tensor, *, beta: Tensor = learned(1.0)) -> Tensor:
        """Compute the function."""
        return x * torch.sigmoid(beta * x)


@register_activation(
    "swish_t",
    kind="pointwise",
    source=_SWISH_T,
    formula="x sigmoid(beta x) + alpha tanh(x)",
)
class SwishT(Pointwise):
    """Swish with a tanh added, x sigmoid(beta x) + alpha tanh(x).

    beta = 1, learned; alpha = 0.1, fixed. Bounded below. Seo et al. 2024,
    https://arxiv.org/abs/2407.01012.
    """

    @staticmethod
    def formula(x: Tensor, *, beta: Tensor = learned(1.0), alpha: float = 0.1) -> Tensor:
        """Compute the function."""
        return x * torch.sigmoid(beta * x) + alpha * torch.tanh(x)


@register_activation(
    "swish_t_a", kind="pointwise", source=_SWISH_T, formula="sigmoid(x) (x + 2 alpha) - alpha"
)
class SwishTA(Pointwise):
    """Swish-T with one sigmoid and no slope, sigmoid(x) (x + 2 alpha) - alpha.

    alpha = 0.1, fixed; no parameters. Bounded below. Seo et al. 2024,
    https://arxiv.org/abs/2407.01012.
    """

    @staticmethod
    def formula(x: Tensor, *, alpha: float = 0.1) -> Tensor:
        """Compute the function."""
        return torch.sigmoid(x) * (x + 2 * alpha) - alpha


@register_activation(
    "swish_t_b",
    kind="pointwise",
    source=_SWISH_T,
    formula="sigmoid(beta x) (x + 2 alpha) - alpha",
)
class SwishTB(Pointwise):
    """Swish-T with one sigmoid, sigmoid(beta x) (x + 2 alpha) - alpha.

    beta = 1, learned; alpha = 0.1, fixed. Bounded below. Seo et al. 2024,
    https://arxiv.org/abs/2407.01012.
    """

    @staticmethod
    def formula(x: Tensor, *, beta: Tensor = learned(1.0), alpha: float = 0.1) -> Tensor:
        """Compute the function."""
        return torch.sigmoid(beta * x) * (x + 2 * alpha) - alpha


@register_activation(
    "swish_t_c",
    kind="pointwise",
    source=_SWISH_T,
    formula="sigmoid(beta x) (x + 2 alpha / beta) - alpha / beta",
)
class SwishTC(Pointwise):
    """The recommended Swish-T, sigmoid(beta x) (x + 2 alpha / beta) - alpha / beta.

    beta = 1, learned; alpha = 0.1, fixed. Bounded below. Seo et al. 2024,
    https://arxiv.org/abs/2407.01012.
    """

    @staticmethod
    def formula(x: Tensor, *, beta: Tensor = learned(1.0), alpha: float = 0.1) -> Tensor:
        """Compute the function."""
        return torch.sigmoid(beta * x) * (x + 2 * alpha / beta) - alpha / beta


@register_activation(
    "aptx",
    kind="pointwise",
    source="Kumar 2022, https://arxiv.org/abs/2209.06119",
    formula="(alpha + tanh(beta x)) gamma x",
)
class APTx(Pointwise):
    """Alpha plus tanh times x, (alpha + tanh(beta x)) gamma x.

    alpha = 1, beta = 1, gamma = 0.5, fixed; learned with ``trainable=True``. Bounded below with
    these. Kumar 2022, https://arxiv.org/abs/2209.06119.
    """

    trainable = False

    @staticmethod
    def formula(
        x: Tensor,
        *,
        alpha: Tensor = learned(1.0),
        beta: Tensor = learned(1.0),
        gamma: Tensor = learned(0.5),
    ) -> Tensor:
        """Compute the function."""
        return (alpha + torch.tanh(beta * x)) * (gamma * x)


@register_activation(
    "crrelu",
    kind="pointwise",
    source="Sun et al. 2024, https://arxiv.org/abs/2405.12954",
    formula="max(x, 0) + eps x exp(-x^2 / 2)",
)
class CRReLU(Pointwise):
    """Correction regularised rectifier, max(x, 0) + eps x exp(-x^2 / 2).

    eps = 0.01, learned. In [-0.61 eps, inf). Sun et al. 2024, https://arxiv.org/abs/2405.12954.
    """

    @staticmethod
    def formula(x: Tensor, *, eps: Tensor = learned(0.01)) -> Tensor:
        """Compute the function."""
        return F.relu(x) + eps * x * torch.exp(-x * x / 2)


@register_activation(
    "sau",
    kind="pointwise",
    source="Biswas et al. 2021, https://arxiv.org/abs/2109.13210",
    formula="x ((1 + alpha) + (1 - alpha) erf(x / (sqrt(2) s))) / 2 "
    "+ (1 - alpha) s exp(-x^2 / (2 s^2)) / sqrt(2 pi)",
)
class SAU(Pointwise):
    """Smooth unit: leaky ReLU of slope alpha convolved with a normal density of deviation s.

    alpha = 0.15, learned; s = 5e-5, fixed. In (-inf, inf). Biswas et al. 2021,
    https://arxiv.org/abs/2109.13210.
    """

    positive = frozenset({"s"})

    @staticmethod
    def formula(x: Tensor, *, alpha: Tensor = learned(0.15), s: float = 5e-5) -> Tensor:
        """Compute the function; the density is 0 beyond 28 deviations in any dtype."""
        z = x / (math.sqrt(2) * s)
        near = z.clamp(-20.0, 20.0)
        slope = ((1 + alpha) + (1 - alpha) * torch.erf(z)) / 2
        return x * slope + (1 - alpha) * (s / math.sqrt(2 * math.pi)) * torch.exp(-near * near)


@register_activation(
    "salu",
    kind="pointwise",
    source="Zaied 2026, https://arxiv.org/abs/2606.02927",
    formula="a x / sqrt(1 + a b x^2)",
)
class SALU(Pointwise):
    """Saturated adaptive linear unit, a x / sqrt(1 + a b x^2) with a, b > 0.

    a = b = 1, learned; the source gives no initial values, these are ours. |a b| stands under the
    root, which keeps it defined if training changes a sign. In (-sqrt(a / b), sqrt(a / b)), finite
    for |x| <= 1e18. It replaces normalisation layers in its source: Zaied 2026,
    https://arxiv.org/abs/2606.02927.
    """

    positive = frozenset({"a", "b"})

    @staticmethod
    def formula(x: Tensor, *, a: Tensor = learned(1.0), b: Tensor = learned(1.0)) -> Tensor:
        """Compute the function."""
        product = torch.abs(torch.mul(a, b))
        return a * x / torch.sqrt(1 + product * x * x)
