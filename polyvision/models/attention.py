"""Causal self-attention with rotary positions, grouped-query ready.

Source: Vaswani et al. 2017, https://arxiv.org/abs/1706.03762; Su et al. 2021 (rotary positions),
https://arxiv.org/abs/2104.09864; Ainslie et al. 2023 (grouped queries),
https://arxiv.org/abs/2305.13245.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Attention", "Rotation", "apply_rotary", "rotary_table"]

Rotation = tuple[Tensor, Tensor]


def rotary_table(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Rotation:
    r"""Return cosine and sine of the angles :math:`p\,\theta^{-2j/head\_dim}`.

    Computed in ``dtype`` and never stored in the model, so that casting a model to a narrow dtype,
    or building it on the meta device, cannot spoil the angles.

    Args:
        positions: (T,) token positions p.
        head_dim: even size of a head; j runs over its half.
        theta: base of the wavelengths.
        dtype: float32 or float64.

    Returns:
        Two tensors of shape (T, head_dim / 2).
    """
    exponent = torch.arange(0, head_dim, 2, device=positions.device, dtype=dtype) / head_dim
    angles = torch.outer(positions.to(dtype), theta**-exponent)  # (T, head_dim / 2)
    return angles.cos(), angles.sin()


def apply_rotary(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate feature pairs (j, j + head_dim / 2) of ``x`` by the angles of their position.

    The pairing is that of GPT-NeoX and Hugging Face; the neighbouring pairs of the paper are the
    same function after a permutation of the projection's rows.

    Args:
        x: (B, T, H, head_dim), any float dtype; the result has it too.
        rotation: cosine and sine of shape (T, head_dim / 2).
    """
    cos, sin = (t[:, None] for t in rotation)  # (T, 1, head_dim / 2)
    a, b = x.chunk(2, dim=-1)  # (B, T, H, head_dim / 2)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Multi-head causal attention without biases.

    Args:
        width: size of the input and of the output, a multiple of ``heads``.
        heads: number of query heads; the size of a head is ``width / heads``.
        kv_heads: number of key and value heads, a divisor of ``heads``; each serves
            ``heads / kv_heads`` neighbouring query heads.

    Shape:
        (B, T, width) -> (B, T, width).
    """

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        assert width % heads == 0
        assert heads % kv_heads == 0
        self.heads = heads
        self.kv_heads = kv_heads
        self.head_dim = width // heads
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * self.head_dim, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Attend from each token to itself and the tokens before it."""
        qkv = self.qkv(x).unflatten(-1, (-1, self.head_dim))  # (B, T, H + 2 KV, head_dim)
        qk, v = torch.tensor_split(qkv, (self.heads + self.kv_heads,), dim=2)
        q, k = torch.tensor_split(apply_rotary(qk, rotation), (self.heads,), dim=2)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, H or KV, T, head_dim)
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=self.kv_heads != self.heads
        )  # (B, H, T, head_dim)
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))  # (B, T, width)
        return out

    def init_matrices(self, std: float) -> None:
        """Draw the matrices from a normal distribution."""
        for linear in (self.qkv, self.out):
            nn.init.normal_(linear.weight, std=std)

    def extra_repr(self) -> str:
        """Show the head layout."""
        return f"heads={self.heads}, kv_heads={self.kv_heads}, head_dim={self.head_dim}"
