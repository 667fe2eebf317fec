"""The baselines of the paper: pointwise activations, and gated ones for feed-forward networks."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from polyvision.activations.registry import register_activation

__all__ = ["GEGLU", "GELU", "GLU", "ReGLU", "ReLU", "ReLU2", "SiLU", "SwiGLU"]

_SHAZEER = "Shazeer 2020, https://arxiv.org/abs/2002.05202"


class _Pointwise(nn.Module):
    """A module without parameters that never works in place, whatever timm asks for."""

    def __init__(self, inplace: bool = False) -> None:
        super().__init__()


@register_activation(
    "relu",
    kind="pointwise",
    source="Nair and Hinton 2010, https://www.cs.toronto.edu/~hinton/absps/reluICML.pdf",
    formula="max(x, 0)",
)
class ReLU(_Pointwise):
    """Rectifier, max(x, 0)."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply the activation to ``x``."""
        return F.relu(x)


@register_activation(
    "relu2",
    kind="pointwise",
    source="So et al. 2021, https://arxiv.org/abs/2109.08668",
    formula="max(x, 0)^2",
)
class ReLU2(_Pointwise):
    """Squared rectifier, max(x, 0)^2."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply the activation to ``x``."""
        return F.relu(x).square()


@register_activation(
    "gelu",
    kind="pointwise",
    source="Hendrycks and Gimpel 2016, https://arxiv.org/abs/1606.08415",
    formula="x Phi(x)",
)
class GELU(_Pointwise):
    """Gaussian error linear unit in its exact form, x Phi(x)."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply the activation to ``x``."""
        return F.gelu(x)


@register_activation(
    "silu",
    kind="pointwise",
    source="Elfwing et al. 2017, https://arxiv.org/abs/1702.03118",
    formula="x sigmoid(x)",
)
class SiLU(_Pointwise):
    """Sigmoid-weighted linear unit, x sigmoid(x)."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply the activation to ``x``."""
        return F.silu(x)


@register_activation("glu", kind="gated", source=_SHAZEER, formula="sigmoid(gate) * up")
class GLU(nn.Module):
    """Gated linear unit, sigmoid(gate) * up."""

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        """Combine two projections of equal shape."""
        return gate.sigmoid() * up


@register_activation("reglu", kind="gated", source=_SHAZEER, formula="max(gate, 0) * up")
class ReGLU(nn.Module):
    """Gated unit with ReLU, max(gate, 0) * up."""

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        """Combine two projections of equal shape."""
        return F.relu(gate) * up


@register_activation("geglu", kind="gated", source=_SHAZEER, formula="gelu(gate) * up")
class GEGLU(nn.Module):
    """Gated unit with GELU, gelu(gate) * up."""

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        """Combine two projections of equal shape."""
        return F.gelu(gate) * up


@register_activation("swiglu", kind="gated", source=_SHAZEER, formula="silu(gate) * up")
class SwiGLU(nn.Module):
    """Gated unit with SiLU, silu(gate) * up."""

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        """Combine two projections of equal shape."""
        return F.silu(gate) * up
