"""The pointwise baselines of the paper.

What torch has is torch's own class, since other tools look for it: captum's DeepLift, quantization
and fusion know ``nn.ReLU`` by its type. Only ``inplace`` is ignored, whatever timm asks for.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from polyvision.activations.registry import register_activation

__all__ = ["ReLU2"]


@register_activation(
    "relu",
    kind="pointwise",
    source="Nair and Hinton 2010, https://www.cs.toronto.edu/~hinton/absps/reluICML.pdf",
    formula="max(x, 0)",
)
def _relu(inplace: bool = False) -> nn.ReLU:
    """Rectifier, max(x, 0): ``torch.nn.ReLU``, never in place."""
    return nn.ReLU()


@register_activation(
    "relu2",
    kind="pointwise",
    source="So et al. 2021, https://arxiv.org/abs/2109.08668",
    formula="max(x, 0)^2",
)
class ReLU2(nn.Module):
    """Squared rectifier, max(x, 0)^2; ``inplace`` is accepted and ignored."""

    def __init__(self, inplace: bool = False) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        """Apply the activation to ``x``."""
        return F.relu(x).square()


@register_activation(
    "gelu",
    kind="pointwise",
    source="Hendrycks and Gimpel 2016, https://arxiv.org/abs/1606.08415",
    formula="x Phi(x)",
)
def _gelu(inplace: bool = False) -> nn.GELU:
    """Gaussian error linear unit in its exact form, x Phi(x): ``torch.nn.GELU``, never in place."""
    return nn.GELU()


@register_activation(
    "silu",
    kind="pointwise",
    source="Elfwing et al. 2017, https://arxiv.org/abs/1702.03118",
    formula="x sigmoid(x)",
)
def _silu(inplace: bool = False) -> nn.SiLU:
    """Sigmoid-weighted linear unit, x sigmoid(x): ``torch.nn.SiLU``, never in place."""
    return nn.SiLU()
