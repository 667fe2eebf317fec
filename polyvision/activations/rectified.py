"""Rectifiers: their powers, shifted, clipped and smoothed forms, and a learned slope."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from polyvision.activations.base.pointwise import Pointwise, Stepped, learned
from polyvision.activations.registry import register_activation
from polyvision.kernels.steps import Steps

__all__ = [
    "ClippedReLU2",
    "ClippedShiftedReLU",
    "ClippedSoftThreshold",
    "FATReLU",
    "GSmeLU",
    "PReLU",
    "ReLU2",
    "RePU",
    "ShiftedReLU",
    "SmeLU",
    "TrReLU",
]

_SPARSE = "Price et al. 2024, https://arxiv.org/abs/2402.16184"


@register_activation(
    "relu2",
    kind="pointwise",
    source="So et al. 2021, https://arxiv.org/abs/2109.08668",
    formula="max(x, 0)^2",
)
class ReLU2(nn.Module):
    """Squared rectifier, max(x, 0)^2, in [0, inf); finite in fp16 for x < 256.

    ``inplace`` is accepted and ignored. So et al. 2021, https://arxiv.org/abs/2109.08668.
    """

    def __init__(self, inplace: bool = False) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        """Apply the activation to ``x``."""
        return torch.relu(x).square()


@register_activation(
    "repu",
    kind="pointwise",
    source="Li et al. 2019, https://arxiv.org/abs/1903.05858",
    formula="max(x, 0)^k",
)
class RePU(Pointwise):
    """Power of the rectifier, max(x, 0)^k with fixed k (3, the cubic one), in [0, inf).

    With k = 3 finite in fp16 for x <= 40. Li et al. 2019, https://arxiv.org/abs/1903.05858.
    """

    counts = frozenset({"k"})

    @staticmethod
    def formula(x: Tensor, *, k: int = 3) -> Tensor:
        """Compute the function."""
        return torch.relu(x) ** k


@register_activation(
    "clipped_relu2",
    kind="pointwise",
    source="Shvetsov et al. 2026, https://arxiv.org/abs/2605.17659",
    formula="min(max(x, 0)^2, limit)",
)
class ClippedReLU2(Pointwise):
    """Squared rectifier that stops growing, min(max(x, 0)^2, limit) with limit 50, in [0, limit].

    The derivative is 0 from where the square reaches the limit. Shvetsov et al. 2026,
    https://arxiv.org/abs/2605.17659.
    """

    positive = frozenset({"limit"})

    @staticmethod
    def formula(x: Tensor, *, limit: float = 50.0) -> Tensor:
        """Compute the function."""
        square = torch.relu(x) * torch.relu(x)
        return torch.where(square < limit, square, limit)


@register_activation(
    "trrelu",
    kind="pointwise",
    source="torch.nn.Hardtanh(0, 1), "
    "https://docs.pytorch.org/docs/stable/generated/torch.nn.Hardtanh.html",
    formula="min(max(x, 0), 1)",
)
class TrReLU(Stepped):
    """Rectifier truncated at 1, min(max(x, 0), 1), in [0, 1]; two bits an element are kept."""

    @staticmethod
    def formula(x: Tensor) -> Tensor:
        """Compute the function."""
        return x.clamp(0.0, 1.0)

    @staticmethod
    def steps() -> Steps:
        """Return the derivative."""
        return Steps(0.0, (0.0, 1.0), (1.0, -1.0))


@register_activation("shifted_relu", kind="pointwise", source=_SPARSE, formula="max(x - tau, 0)")
class ShiftedReLU(Stepped):
    """Rectifier with a higher threshold, max(x - tau, 0), tau = 1, in [0, inf).

    One bit an element is kept. tau = 1 is that of the paper's Figure 1; it is chosen for a share of
    zeros. Price et al. 2024, https://arxiv.org/abs/2402.16184.
    """

    @staticmethod
    def formula(x: Tensor, *, tau: float = 1.0) -> Tensor:
        """Compute the function."""
        return torch.relu(x - tau)

    @staticmethod
    def steps(*, tau: float) -> Steps:
        """Return the derivative."""
        return Steps(0.0, (tau,), (1.0,))


@register_activation(
    "clipped_srelu", kind="pointwise", source=_SPARSE, formula="min(max(x - tau, 0), m)"
)
class ClippedShiftedReLU(Stepped):
    """Shifted and clipped rectifier, min(max(x - tau, 0), m), tau = m = 1, in [0, m].

    Two bits an element are kept. tau = m = 1 are those of the paper's Figure 1; it chooses tau for
    a share of zeros and m for a stable variance. Price et al. 2024,
    https://arxiv.org/abs/2402.16184.
    """

    positive = frozenset({"m"})

    @staticmethod
    def formula(x: Tensor, *, tau: float = 1.0, m: float = 1.0) -> Tensor:
        """Compute the function."""
        return (x - tau).clamp(0.0, m)

    @staticmethod
    def steps(*, tau: float, m: float) -> Steps:
        """Return the derivative."""
        return Steps(0.0, (tau, tau + m), (1.0, -1.0))


@register_activation(
    "clipped_st", kind="pointwise", source=_SPARSE, formula="sign(x) min(max(|x| - tau, 0), m)"
)
class ClippedSoftThreshold(Pointwise):
    """Clipped soft threshold, sign(x) min(max(|x| - tau, 0), m), tau = m = 1, in [-m, m].

    Without the clip it is ``softshrink``. Price et al. 2024, https://arxiv.org/abs/2402.16184.
    """

    positive = frozenset({"tau", "m"})

    @staticmethod
    def formula(x: Tensor, *, tau: float = 1.0, m: float = 1.0) -> Tensor:
        """Compute the function."""
        return (x - tau).clamp(0.0, m) + (x + tau).clamp(-m, 0.0)


@register_activation(
    "fatrelu",
    kind="pointwise",
    source="Kurtz et al. 2020, https://proceedings.mlr.press/v119/kurtz20a.html; "
    "Song et al. 2024 (ProSparse), https://arxiv.org/abs/2402.13516",
    formula="x for x >= t, else 0",
)
class FATReLU(Stepped):
    """Forced-activation-threshold rectifier, x for x >= t, else 0, in {0} and [t, inf).

    t = 0.01 is our choice: the sources choose it for each layer of a trained network. One bit an
    element is kept. Kurtz et al. 2020, https://proceedings.mlr.press/v119/kurtz20a.html.
    """

    positive = frozenset({"t"})

    @staticmethod
    def formula(x: Tensor, *, t: float = 0.01) -> Tensor:
        """Compute the function."""
        return torch.where(x >= t, x, 0.0)

    @staticmethod
    def steps(*, t: float) -> Steps:
        """Return the derivative."""
        return Steps(0.0, (t,), (1.0,))


@register_activation(
    "smelu",
    kind="pointwise",
    source="Shamir et al. 2020, https://arxiv.org/abs/2010.09931",
    formula="0, (x + beta)^2 / (4 beta), x: below, within and above [-beta, beta]",
)
class SmeLU(Pointwise):
    """Smooth rectifier: (x + beta)^2 / (4 beta) within [-beta, beta], ReLU outside, in [0, inf).

    beta = 2, fixed. It is ReLU convolved with a box of half-width beta. Shamir et al. 2020,
    https://arxiv.org/abs/2010.09931.
    """

    positive = frozenset({"beta"})

    @staticmethod
    def formula(x: Tensor, *, beta: float = 2.0) -> Tensor:
        """Compute the function."""
        inside = x.clamp(-beta, beta) + beta
        return inside * inside / (4 * beta) + torch.relu(x - beta)


@register_activation(
    "gsmelu",
    kind="pointwise",
    source="Shamir et al. 2020, https://arxiv.org/abs/2010.09931",
    formula="b x, A x^2 + B x + C, x: below, within and above [-alpha, alpha]",
)
class GSmeLU(Pointwise):
    """Smooth leaky rectifier: slope b below -alpha, 1 above alpha, a parabola between.

    alpha = 0.5 and b = 0.01, fixed; A = (1 - b) / (4 alpha), B = (1 + b) / 2, C = alpha (1 - b) / 4
    make value and slope continuous. In (-inf, inf). Shamir et al. 2020,
    https://arxiv.org/abs/2010.09931.
    """

    positive = frozenset({"alpha"})

    @staticmethod
    def formula(x: Tensor, *, alpha: float = 0.5, b: float = 0.01) -> Tensor:
        """Compute the function."""
        inside = x.clamp(-alpha, alpha)
        parabola = (1 - b) / (4 * alpha) * inside * inside + (1 + b) / 2 * inside
        outside = torch.relu(x - alpha) - b * torch.relu(-x - alpha)
        return parabola + alpha * (1 - b) / 4 + outside


@register_activation(
    "prelu",
    kind="pointwise",
    source="He et al. 2015, https://arxiv.org/abs/1502.01852",
    formula="max(x, 0) + weight min(x, 0)",
)
class PReLU(Pointwise):
    """Rectifier with a learned slope for negative inputs, max(x, 0) + weight min(x, 0).

    weight = 0.25, one or one for each channel, under the name it has in ``torch.nn.PReLU``. In
    (-inf, inf). He et al. 2015, https://arxiv.org/abs/1502.01852.
    """

    @staticmethod
    def formula(x: Tensor, *, weight: Tensor = learned(0.25)) -> Tensor:
        """Compute the function."""
        return torch.where(x > 0, x, weight * x)
