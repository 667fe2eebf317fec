"""Causal self-attention with rotary positions, grouped queries and a key-value cache.

Source: Vaswani et al. 2017, https://arxiv.org/abs/1706.03762; Su et al. 2021 (rotary positions),
https://arxiv.org/abs/2104.09864; Ainslie et al. 2023 (grouped queries),
https://arxiv.org/abs/2305.13245.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyvision.models.language.norm import RMSNorm
from polyvision.models.language.shape import Draw, TransformerShape

__all__ = ["Attention", "KeyValueCache", "Rotation", "apply_rotary", "rotary_table"]

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
        Two tensors of shape (T, head_dim), or (B, T, head_dim): each angle's cosine twice, and its
        sine with a minus and with a plus, as ``apply_rotary`` reads them.
    """
    exponent = torch.arange(0, head_dim, 2, device=positions.device, dtype=dtype) / head_dim
    angles = positions.to(dtype)[..., None] * theta**-exponent  # (..., T, head_dim / 2)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def apply_rotary(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate feature pairs (j, j + head_dim / 2) of ``x`` by the angles of their position.

    The pairing is that of GPT-NeoX and Hugging Face; the neighbouring pairs of the paper are the
    same function after a permutation of the projection's rows.

    Args:
        x: (B, T, H, head_dim), any float dtype; the result has it too.
        rotation: what ``rotary_table`` returns.
    """
    cos, sin = (t.unsqueeze(-2) for t in rotation)  # (..., T, 1, head_dim)
    halves = x.roll(x.shape[-1] // 2, dims=-1)  # exchanged
    return torch.addcmul(x * cos, halves, sin).to(x.dtype)  # (a cos - b sin, b cos + a sin)


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
        self.query_norm = RMSNorm(shape.width, eps=shape.norm_eps) if shape.qk_norm else None
        self.key_norm = RMSNorm(kv_width, eps=shape.norm_eps) if shape.qk_norm else None

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
        # The gradient of this split is one concatenation; that of slices a sum of padded tensors.
        heads = (self.heads, self.kv_heads, self.kv_heads)
        q, k, v = qkv.split_with_sizes(heads, dim=2)
        q, k = apply_rotary(q, rotation), apply_rotary(k, rotation)
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
        sizes = [heads * self.head_dim for heads in (self.heads, self.kv_heads, self.kv_heads)]
        q, k, v = qkv.split_with_sizes(sizes, dim=-1)
        return torch.cat((self.query_norm(q), self.key_norm(k), v), dim=-1)

    def init_matrices(self, draw: Draw) -> None:
        """Draw the matrices."""
        draw(self.qkv.weight, False)
        draw(self.out.weight, True)

    def extra_repr(self) -> str:
        """Show the head layout."""
        return f"heads={self.heads}, kv_heads={self.kv_heads}, head_dim={self.head_dim}"


class KeyValueCache:
    """Keys and values of the tokens seen so far, so that each new token costs one token's work.

    Rows may hold sequences of different lengths. They end at the same slot, so a shorter one begins
    later; positions count from each row's own beginning.

    Args:
        shape: the model's shape.
        starts: (B,) the slot where each row begins; all zero for rows of equal length.
        capacity: slots per row, at most ``shape.context``.

    Attributes:
        length: slots filled so far, in every row.
    """

    def __init__(self, shape: TransformerShape, starts: Tensor, capacity: int) -> None:
        assert capacity <= shape.context
        self.capacity = capacity
        self.starts = starts
        self.length = 0
        self._ragged = bool(starts.any())
        self._room: dict[int, Tensor] = {}  # by layer

    def positions(self, tokens: int) -> Tensor:
        """Return the positions of the next tokens: (tokens,), or (B, tokens) in ragged rows.

        Slots before a row's beginning get position 0; nothing looks at them.
        """
        slots = torch.arange(self.length, self.length + tokens, device=self.starts.device)
        return (slots - self.starts[:, None]).clamp(min=0) if self._ragged else slots

    def mask(self, tokens: int) -> Tensor | None:
        """Return which slots the next tokens may look at, or None where plain attention serves.

        Plain attention: causal over nothing but the new tokens, or one token that sees all.

        Returns:
            (B or 1, 1, tokens, length + tokens) bool, or None.
        """
        if not self._ragged and (tokens == 1 or self.length == 0):
            return None
        device = self.starts.device
        keys = torch.arange(self.length + tokens, device=device)
        queries = keys[self.length :, None]
        # A padding slot sees itself: a row of attention over nothing would be nan.
        begun = (keys >= self.starts[:, None, None]) | (keys == queries)  # (B, tokens, slots)
        return (begun & (keys <= queries))[:, None]

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new tokens' keys and values of a layer, (B, KV, T, head_dim); return all."""
        end = self.length + keys.shape[2]
        assert end <= self.capacity
        if layer not in self._room:  # in the dtype that keys turn out to have, under autocast too
            size = (2, *keys.shape[:2], self.capacity, keys.shape[3])
            self._room[layer] = keys.new_empty(size)
        seen = self._room[layer][:, :, :, :end]
        seen[0, :, :, self.length :] = keys
        seen[1, :, :, self.length :] = values
        return seen[0], seen[1]

    def advance(self, tokens: int) -> None:
        """Count the new tokens, once every layer has stored them."""
        self.length += tokens
