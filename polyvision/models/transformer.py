"""Dense decoder-only language model in the style of Llama 2, with any activation in its FFN.

Pre-norm blocks, RMSNorm, rotary positions, no biases, input and output embeddings untied, every
matrix drawn from a normal distribution of standard deviation 1/sqrt(2.5 width).

Source: Zhuo et al. 2024, https://arxiv.org/abs/2411.03884 (section 4, Tables 5 and 7); Touvron et
al. 2023, https://arxiv.org/abs/2307.09288.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from polyvision.errors import PolyvisionError
from polyvision.models.attention import Attention, Rotation, rotary_table
from polyvision.models.ffn import FeedForward

__all__ = ["Block", "Transformer", "TransformerShape"]


_COUNTS = ("vocab_size", "context", "width", "layers", "heads", "ffn_hidden")


@dataclass(frozen=True)
class TransformerShape:
    """Everything that determines the model.

    Attributes:
        vocab_size: number of tokens V.
        context: longest sequence, in tokens.
        width: size of the residual stream.
        layers: number of blocks.
        heads: number of query heads; ``width / heads`` must be an even integer.
        kv_heads: number of key and value heads, a divisor of ``heads``; None for ``heads``.
        ffn_hidden: hidden size of an ungated FFN; a gated one takes 2/3 (see ``FeedForward``).
        activation: registered name of the FFN's activation.
        activation_options: keywords of its constructor.
        rope_theta: base of the rotary wavelengths.
        norm_eps: eps of every RMSNorm.

    Raises:
        PolyvisionError: values that do not fit; the text lists all of them.
    """

    vocab_size: int
    context: int
    width: int
    layers: int
    heads: int
    ffn_hidden: int
    kv_heads: int | None = None
    activation: str = "polynorm"
    activation_options: Mapping[str, Any] = field(default_factory=dict)
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        problems = self._bad_values() or self._bad_heads()
        if problems:
            raise PolyvisionError("transformer shape: " + "; ".join(problems))

    def _bad_values(self) -> list[str]:
        problems = []
        for name in (*_COUNTS, *(["kv_heads"] if self.kv_heads is not None else [])):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                problems.append(f"{name} must be a positive integer, got {value!r}")
        for name in ("rope_theta", "norm_eps"):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not 0 < value < math.inf:
                problems.append(f"{name} must be a number greater than 0, got {value!r}")
        return problems

    def _bad_heads(self) -> list[str]:
        problems = []
        if self.width % self.heads or self.width // self.heads % 2:
            problems.append(
                f"width / heads must be an even integer, got {self.width} / {self.heads}; "
                f"take a width that is a multiple of {2 * self.heads}"
            )
        if self.kv_heads is not None and self.heads % self.kv_heads:
            problems.append(f"kv_heads={self.kv_heads} must divide heads={self.heads}")
        return problems


class Block(nn.Module):
    """One layer: x + attention(norm(x)), then x + ffn(norm(x)).

    Shape:
        (B, T, width) -> (B, T, width).
    """

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.width, eps=shape.norm_eps)
        self.attention = Attention(shape.width, shape.heads, shape.kv_heads or shape.heads)
        self.ffn_norm = nn.RMSNorm(shape.width, eps=shape.norm_eps)
        self.ffn = FeedForward(
            shape.width, shape.ffn_hidden, shape.activation, shape.activation_options
        )

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Apply the layer."""
        x = x + self.attention(self.attention_norm(x), rotation)
        y: Tensor = x + self.ffn(self.ffn_norm(x))
        return y


class Transformer(nn.Module):
    """The language model: tokens in, logits of the next token out.

    Args:
        shape: sizes and activation.

    Shape:
        (B, T) int64 with T up to ``shape.context`` -> (B, T, vocab_size).

    Raises:
        PolyvisionError: the activation is unknown or refuses its options.

    Example:
        >>> shape = TransformerShape(
        ...     vocab_size=256, context=64, width=32, layers=2, heads=4, ffn_hidden=96
        ... )
        >>> Transformer(shape)(torch.zeros(1, 8, dtype=torch.int64)).shape
        torch.Size([1, 8, 256])
    """

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab_size, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, eps=shape.norm_eps)
        self.head = nn.Linear(shape.width, shape.vocab_size, bias=False)
        self.init_matrices(std=1 / math.sqrt(2.5 * shape.width))

    def init_matrices(self, std: float) -> None:
        """Draw all matrices, embeddings included, from a normal distribution."""
        for matrix in (self.embedding, self.head):
            nn.init.normal_(matrix.weight, std=std)
        for module in self.modules():
            if isinstance(module, Attention | FeedForward):
                module.init_matrices(std)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the token that follows each prefix."""
        length = tokens.shape[1]
        if length > self.shape.context:
            raise PolyvisionError(
                f"a sequence of {length} tokens is longer than the model's context of "
                f"{self.shape.context}; crop it, or build the model with a longer context"
            )
        x = self.embedding(tokens)  # (B, T, width)
        rotation = self._rotation(length)
        for block in self.blocks:
            x = block(x, rotation)
        logits: Tensor = self.head(self.norm(x))  # (B, T, V)
        return logits

    def _rotation(self, length: int) -> Rotation:
        weight = self.embedding.weight
        dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        positions = torch.arange(length, device=weight.device)
        head_dim = self.shape.width // self.shape.heads
        return rotary_table(positions, head_dim, self.shape.rope_theta, dtype)

    @property
    def num_parameters(self) -> int:
        """Number of trainable values, both embeddings included."""
        return sum(p.numel() for p in self.parameters())
