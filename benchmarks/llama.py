"""A textbook Llama in plain modules, and litgpt's: what our language model is measured against.

Source: Touvron et al. 2023, https://arxiv.org/abs/2302.13971; litgpt,
https://github.com/Lightning-AI/litgpt.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyvision.models.language.ffn import gated_hidden
from polyvision.models.language.transformer import TransformerShape

__all__ = ["TextbookFFN", "TextbookLlama", "litgpt_llama"]


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps), times a weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


class SwiGLU(nn.Module):
    """silu(x) times y."""

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        """Multiply."""
        return F.silu(gate) * up


class PaperPolyNorm(nn.Module):
    """PolyNorm in torch operations, as in Algorithm 2 of https://arxiv.org/abs/2411.03884."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3) / 3)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """Sum the three normalised powers."""
        powers = (x, x**2, x**3)
        terms = (p * torch.rsqrt(p.pow(2).mean(-1, keepdim=True) + 1e-6) for p in powers)
        return sum((w * t for w, t in zip(self.weight, terms, strict=True)), self.bias)


class TextbookFFN(nn.Module):
    """Two matrices, or three with a gate."""

    def __init__(self, width: int, hidden: int, gated: bool) -> None:
        super().__init__()
        inner = gated_hidden(hidden) if gated else hidden
        self.gate = nn.Linear(width, inner, bias=False) if gated else None
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)
        self.act: nn.Module = SwiGLU() if gated else PaperPolyNorm()

    def forward(self, x: Tensor) -> Tensor:
        """Apply the network to the last dimension."""
        h = self.act(self.up(x)) if self.gate is None else self.act(self.gate(x), self.up(x))
        return self.down(h)


class TextbookBlock(nn.Module):
    """Attention and feed-forward network, each after a norm, with residuals."""

    def __init__(self, shape: TransformerShape, gated: bool) -> None:
        super().__init__()
        self.heads, self.dim = shape.heads, shape.head_dim
        self.norm1, self.norm2 = RMSNorm(shape.width), RMSNorm(shape.width)
        self.q, self.k, self.v, self.out = (
            nn.Linear(shape.width, shape.width, bias=False) for _ in range(4)
        )
        self.ffn = TextbookFFN(shape.width, shape.ffn_hidden, gated)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Apply the block to (B, T, width)."""
        h = self.norm1(x)
        q, k, v = (
            part(h).view(*h.shape[:2], self.heads, self.dim).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )  # (B, H, T, head_dim)
        q, k = (t * cos + _half_turned(t) * sin for t in (q, k))
        y = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.ffn(self.norm2(x))


def _half_turned(x: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


class TextbookLlama(nn.Module):
    """The whole model; the angles are computed once."""

    def __init__(self, shape: TransformerShape, gated: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab_size, shape.width)
        self.blocks = nn.ModuleList(TextbookBlock(shape, gated) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocab_size, bias=False)
        exponent = torch.arange(0, shape.head_dim, 2) / shape.head_dim
        angles = torch.arange(shape.context)[:, None] * shape.rope_theta**-exponent
        angles = torch.cat((angles, angles), dim=-1)  # (T, head_dim)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]])
        return self.head(self.norm(x))


def litgpt_llama(shape: TransformerShape) -> nn.Module:
    """Build litgpt's model of the same sizes, with SwiGLU."""
    from litgpt import GPT, Config

    return GPT(
        Config(
            block_size=shape.context,
            vocab_size=shape.vocab_size,
            padded_vocab_size=shape.vocab_size,
            n_layer=shape.layers,
            n_head=shape.heads,
            n_embd=shape.width,
            intermediate_size=gated_hidden(shape.ffn_hidden),
            mlp_class_name="LLaMAMLP",
            norm_class_name="RMSNorm",
            norm_eps=shape.norm_eps,
            rotary_percentage=1.0,
            parallel_residual=False,
            bias=False,
        )
    )
