"""Activations that are trained with another derivative than their own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from polyvision.activations.base.pointwise import Pointwise, Stepped
from polyvision.activations.registry import register_activation
from polyvision.kernels.steps import Steps, straight_through

__all__ = ["HeLU", "ReGELU2", "ReSiLU2", "SUGARBSiLU"]

_APPROX_BP = "Yang et al. 2024, https://arxiv.org/abs/2406.16282"


@register_activation(
    "helu",
    kind="pointwise",
    source="Kimhi et al. 2024, https://arxiv.org/abs/2411.10573",
    formula="max(x, 0), trained with the derivative 1[x > -alpha]",
    surrogate=True,
)
class HeLU(Stepped):
    """Rectifier with hysteresis: max(x, 0), trained with the derivative 1[x > -alpha].

    alpha = 0.05, fixed. In [0, inf). One bit an element is kept. Kimhi et al. 2024,
    https://arxiv.org/abs/2411.10573.
    """

    @staticmethod
    def formula(x: Tensor, *, alpha: float = 0.05) -> Tensor:
        """Compute the function."""
        return torch.relu(x)

    @staticmethod
    def steps(*, alpha: float) -> Steps:
        """Return the derivative it is trained with."""
        return Steps(0.0, (-alpha,), (1.0,))


@register_activation(
    "regelu2",
    kind="pointwise",
    source=_APPROX_BP,
    formula="x Phi(x), trained with the derivative sum_j a_j 1[x > c_j]",
    surrogate=True,
)
class ReGELU2(Stepped):
    """GELU, trained with the derivative of three ReLUs, sum over j of a_j 1[x > c_j].

    a = (-0.04922261, 1.09796321, -0.04874060), c = (-3.18588100, -0.00117882, 3.19083261), fixed.
    In [-0.17, inf). Two bits an element are kept. Yang et al. 2024 (Approx-BP),
    https://arxiv.org/abs/2406.16282.
    """

    @staticmethod
    def formula(x: Tensor) -> Tensor:
        """Compute the function."""
        return F.gelu(x)

    @staticmethod
    def steps() -> Steps:
        """Return the derivative it is trained with."""
        at = (-3.18588100, -0.00117882, 3.19083261)
        return Steps(0.0, at, (-0.04922261, 1.09796321, -0.04874060))


@register_activation(
    "resilu2",
    kind="pointwise",
    source=_APPROX_BP,
    formula="x sigmoid(x), trained with the derivative sum_j a_j 1[x > c_j]",
    surrogate=True,
)
class ReSiLU2(Stepped):
    """SiLU, trained with the derivative of three ReLUs, sum over j of a_j 1[x > c_j].

    a = (-0.04060357, 1.08092543, -0.04032186), c = (-6.30504610, -0.00086849, 6.32581524), fixed.
    In [-0.28, inf). Two bits an element are kept. Yang et al. 2024 (Approx-BP),
    https://arxiv.org/abs/2406.16282.
    """

    @staticmethod
    def formula(x: Tensor) -> Tensor:
        """Compute the function."""
        return F.silu(x)

    @staticmethod
    def steps() -> Steps:
        """Return the derivative it is trained with."""
        at = (-6.30504610, -0.00086849, 6.32581524)
        return Steps(0.0, at, (-0.04060357, 1.08092543, -0.04032186))


@register_activation(
    "sugar_bsilu",
    kind="pointwise",
    source="Horuz et al. 2025, https://arxiv.org/abs/2505.22074",
    formula="max(x, 0), trained with the derivative of (x + alpha) sigmoid(x) - alpha / 2",
    surrogate=True,
)
class SUGARBSiLU(Pointwise):
    """Rectifier, trained with the derivative of B-SiLU, (x + alpha) sigmoid(x) - alpha / 2.

    alpha = 1.67, fixed. In [0, inf). Horuz et al. 2025, https://arxiv.org/abs/2505.22074.
    """

    @staticmethod
    def formula(x: Tensor, *, alpha: float = 1.67) -> Tensor:
        """Compute the function."""
        smooth = (x + alpha) * torch.sigmoid(x) - alpha / 2
        return straight_through(torch.relu(x), smooth)
