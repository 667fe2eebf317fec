"""Gated units for feed-forward networks: two inputs, a gate and what it lets through."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from polyvision.activations.registry import register_activation

__all__ = ["GEGLU", "GLU", "ReGLU", "SwiGLU"]

_SHAZEER = "Shazeer 2020, https://arxiv.org/abs/2002.05202"


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
