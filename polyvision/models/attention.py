"""Causal self-attention with rotary positions, grouped-query ready.

Source: Vaswani et al. 2017, https://arxiv.org/abs/1706.03762; Su et al. 2021 (rotary positions),
https://arxiv.org/abs/2104.09864; Ainslie et al. 2023 (grouped queries),
https://arxiv.org/abs/2305.13245.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyvision.models.initial import Draw
from polyvision.models.shape import TransformerShape

__all__ = ["Attention", "Rotation", "apply_rotary", "rotary_table"]

Extend = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
Rotation = tuple[Tensor, Tensor]


def rotary_table(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Rotation:
    r"""Return cosine and sine of the angles :math:`p\,\theta^{-2j/head\_dim}`.

    Computed in ``dtype`` and never stored in the model, so that casting a model to a narrow dtype,
    or building it on the meta device, cannot spoil the angles.

    Args:
        positions: (T,) token positions p, or (B, T) where rows differ.
        head_dim: even size of a head; j runs over its half.
        theta: base of the wavelengths.
        dtype: float32 or float64.

    Returns:
        Two tensors of shape (T, head_dim / 2), or (B, T, head_dim / 2).
    """
    exponent = torch.arange(0, head_dim, 2, device=positions.device, dtype=dtype) / head_dim
    angles = positions.to(dtype)[..., None] * theta**-exponent  # (..., T, head_dim / 2)
    return angles.cos(), angles.sin()


def apply_rotary(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate feature pairs (j, j + head_dim / 2) of ``x`` by the angles of their position.

    The pairing is that of GPT-NeoX and Hugging Face; the neighbouring pairs of the paper are the
    same function after a permutation of the projection's rows.

    Args:
        x: (B, T, H, head_dim), any float dtype; the result has it too.
        rotation: cosine and sine of shape (T, head_dim / 2) or (B, T, head_dim / 2).
    """
    cos, sin = (t.unsqueeze(-2) for t in rotation)  # (..., T, 1, head_dim / 2)
    a, b = x.chunk(2, dim=-1)  # (B, T, H, head_dim / 2)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Multi-head causal attention without biases.

    Args:
        shape: width, heads and ``qk_norm``. Each key and value head serves ``heads / kv_heads``
            neighbouring query heads. With ``qk_norm``, queries and keys are divided by the root
            mean square over all heads together, as in OLMoE (Muennighoff et al. 2024,
            https://arxiv.org/abs/2409.02060), not over each head.

    Shape:
        (B, T, width) -> (B, T, width).
    """

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.kv_heads = shape.kv_heads or shape.heads
        self.head_dim = shape.head_dim
        kv_width = self.kv_heads * self.head_dim
        self.qkv = nn.Linear(shape.width, shape.width + 2 * kv_width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        self.query_norm = nn.RMSNorm(shape.width, eps=shape.norm_eps) if shape.qk_norm else None
        self.key_norm = nn.RMSNorm(kv_width, eps=shape.norm_eps) if shape.qk_norm else None

    def forward(
        self,
        x: Tensor,
        rotation: Rotation,
        extend: Extend | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Attend from each token to itself and the tokens before it.

        Args:
            x: (B, T, width).
            rotation: cosine and sine of the tokens' positions.
            extend: stores keys and values, (B, KV, T, head_dim) each, in a cache, and returns those
                of all S tokens so far; None without a cache.
            mask: (B or 1, 1, T, S), true where a token may look; None where the plain causal form
                serves, or a single token that sees all.
        """
        qkv = self._normalised(self.qkv(x))
        qkv = qkv.view(*x.shape[:2], -1, self.head_dim)  # (B, T, H + 2 KV, head_dim)
        qk, v = torch.tensor_split(qkv, (self.heads + self.kv_heads,), dim=2)
        q, k = torch.tensor_split(apply_rotary(qk, rotation), (self.heads,), dim=2)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, H or KV, T, head_dim)
        if extend is not None:
            k, v = extend(k, v)  # (B, KV, S, head_dim)
        y = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            # Without a cache no lengths are compared: torch.export may not know them.
            is_causal=mask is None and (extend is None or q.shape[2] == k.shape[2]),
            enable_gqa=self.kv_heads != self.heads,
        )  # (B, H, T, head_dim)
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))  # (B, T, width)
        return out

    def _normalised(self, qkv: Tensor) -> Tensor:
        if self.query_norm is None or self.key_norm is None:
            return qkv
        places = self.heads * self.head_dim, (self.heads + self.kv_heads) * self.head_dim
        q, k, v = torch.tensor_split(qkv, places, dim=-1)
        return torch.cat((_norm(self.query_norm, q), _norm(self.key_norm, k), v), dim=-1)

    def init_matrices(self, draw: Draw) -> None:
        """Draw the matrices."""
        draw(self.qkv.weight, False)
        draw(self.out.weight, True)

    def extra_repr(self) -> str:
        """Show the head layout."""
        return f"heads={self.heads}, kv_heads={self.kv_heads}, head_dim={self.head_dim}"


def _norm(norm: nn.RMSNorm, x: Tensor) -> Tensor:
    """Normalise in one kernel, which takes no fp32 weights for the bf16 that autocast makes."""
    return F.rms_norm(x, norm.normalized_shape, norm.weight.to(x.dtype), norm.eps)
