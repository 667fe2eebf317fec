"""Decoder-only language model in the style of Llama 2, with any activation in its FFN.

Pre-norm blocks, RMSNorm, rotary positions, no biases, input and output embeddings untied, every
matrix drawn from a normal distribution of standard deviation 1/sqrt(2.5 width). With experts in
the place of the FFNs, and normalised queries and keys, it is OLMoE's model.

Source: Zhuo et al. 2024, https://arxiv.org/abs/2411.03884 (section 4, Tables 5 to 7); Touvron et
al. 2023, https://arxiv.org/abs/2307.09288; Muennighoff et al. 2024,
https://arxiv.org/abs/2409.02060.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from polyvision.activations import activation_info
from polyvision.errors import PolyvisionError
from polyvision.models.language.attention import (
    Attention,
    Extend,
    KeyValueCache,
    Rotation,
    rotary_table,
)
from polyvision.models.language.ffn import FeedForward
from polyvision.models.language.loss import IGNORED, linear_cross_entropy
from polyvision.models.language.moe import MoE
from polyvision.models.language.norm import RMSNorm
from polyvision.models.language.router import Routing
from polyvision.models.language.shape import MoEShape, TransformerShape

__all__ = ["Block", "Losses", "MoEShape", "Transformer", "TransformerShape"]


class Losses(NamedTuple):
    """What a forward pass with targets returns.

    Attributes:
        total: () what is minimised: mean cross-entropy and z-loss per token, plus the weighted
            router losses.
        nats: () cross-entropy summed over the tokens. No gradient.
        tokens: () number of tokens that count.
        routing: the routers' records, with a first dimension of layers; None in a dense model.
        z: () z-loss summed over the tokens, with its weight. No gradient.
    """

    total: Tensor
    nats: Tensor
    tokens: Tensor
    routing: Routing | None
    z: Tensor


class Block(nn.Module):
    """One layer: x + attention(norm(x)), then x + ffn(norm(x)).

    Shape:
        (B, T, width) -> (B, T, width), and the router's record, None for a dense layer.
    """

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(shape.width, eps=shape.norm_eps)
        self.attention = Attention(shape)
        self.ffn_norm = RMSNorm(shape.width, eps=shape.norm_eps)
        activation = shape.activation, shape.activation_options
        self.ffn: FeedForward | MoE = (
            FeedForward(shape.width, shape.ffn_hidden, *activation)
            if shape.moe is None
            else MoE(shape.width, shape.ffn_hidden, shape.moe, *activation)
        )

    def forward(
        self,
        x: Tensor,
        rotation: Rotation,
        extend: Extend | None = None,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Routing | None]:
        """Apply the layer; ``extend`` and ``mask`` are those of ``Attention``."""
        x = x + self.attention(self.attention_norm(x), rotation, extend, mask)
        y, routing = self.ffn(self.ffn_norm(x)), None
        if isinstance(self.ffn, MoE):
            y, routing = y
        return x + y, routing


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
        self._random = activation_info(shape.activation).kind == "stochastic"
        self.embedding = nn.Embedding(shape.vocab_size, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.width, eps=shape.norm_eps)
        self.head = nn.Linear(shape.width, shape.vocab_size, bias=False)
        if shape.tie_embeddings:
            self.head.weight = self.embedding.weight
        self.init_matrices()

    def init_matrices(self) -> None:
        """Draw all matrices, embeddings included, as the shape says."""
        draw = self.shape.draw
        draw(self.embedding.weight, False)
        if not self.shape.tie_embeddings:
            draw(self.head.weight, False)
        for module in self.modules():
            if isinstance(module, Attention | FeedForward | MoE):
                module.init_matrices(draw)

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, z_weight: float = 0.0
    ) -> Tensor | Losses:
        """Return the logits of the token that follows each prefix, or the losses against targets.

        With targets the logits never exist all at once (see ``linear_cross_entropy``). One call
        holds the whole forward pass, so that DDP, FSDP and ``torch.compile`` see all of it.

        Args:
            tokens: (B, T).
            targets: (B, T) the token that does follow, -100 where it does not count; None for
                logits.
            z_weight: weight of the z-loss.
        """
        x, records = self._states(tokens)  # (B, T, width)
        if targets is None:
            logits: Tensor = self.head(x)  # (B, T, V)
            return logits
        return self._losses(x, targets, z_weight, records)

    def logits_at(self, tokens: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """Return the logits (N, V) after the tokens at (``rows``, ``columns``), (N,) int64 each."""
        x, _ = self._states(tokens)  # (B, T, width)
        logits: Tensor = self.head(x[rows, columns])
        return logits

    def _states(self, tokens: Tensor) -> tuple[Tensor, list[Routing]]:
        """Return what enters the output matrix, and the routers' records."""
        length = tokens.shape[1]
        if length > self.shape.context:
            raise PolyvisionError(
                f"a sequence of {length} tokens is longer than the model's context of "
                f"{self.shape.context}; crop it, or build the model with a longer context"
            )
        positions = torch.arange(length, device=tokens.device)
        rotation = self._rotation(positions)
        x = self.embedding(tokens)  # (B, T, width)
        records = []
        keep = not (self.shape.checkpointing and torch.is_grad_enabled())
        for block in self.blocks:
            run = block if keep else functools.partial(_checkpointed, block, self._random)
            x, routing = run(x, rotation)
            records.append(routing)
        return self.norm(x), [r for r in records if r is not None]

    def _losses(
        self, x: Tensor, targets: Tensor, z_weight: float, records: list[Routing]
    ) -> Losses:
        loss, nats = linear_cross_entropy(
            x.flatten(0, 1), self.head.weight, targets.flatten(), z_weight=z_weight
        )
        count = (targets != IGNORED).sum()
        total, z = loss / count.clamp(min=1), loss.detach() - nats
        if not records:
            return Losses(total, nats, count, None, z)
        moe = self.shape.moe
        assert moe is not None
        routing = Routing(*(torch.stack(values) for values in zip(*records, strict=True)))
        total = total + moe.load_balance * routing.balance.mean() + moe.router_z * routing.z.mean()
        return Losses(total, nats, count, routing, z)

    def new_cache(self, starts: Tensor, capacity: int) -> KeyValueCache:
        """Return an empty cache for ``decode``; the arguments are those of ``KeyValueCache``."""
        return KeyValueCache(self.shape, starts, capacity)

    def decode(self, tokens: Tensor, cache: KeyValueCache) -> Tensor:
        """Return the logits after the last of the next tokens, and add them to the cache.

        Args:
            tokens: (B, T) the tokens that follow those in the cache.
            cache: keys and values of all tokens before.

        Returns:
            (B, vocab_size).
        """
        new = tokens.shape[1]
        rotation, mask = self._rotation(cache.positions(new)), cache.mask(new)
        x = self.embedding(tokens)  # (B, T, width)
        for layer, block in enumerate(self.blocks):
            x, _ = block(x, rotation, functools.partial(cache.extend, layer), mask)
        cache.advance(new)
        logits: Tensor = self.head(self.norm(x[:, -1]))  # (B, V)
        return logits

    def _rotation(self, positions: Tensor) -> Rotation:
        wide = self.embedding.weight.dtype == torch.float64
        dtype = torch.float64 if wide else torch.float32
        return rotary_table(positions, self.shape.head_dim, self.shape.rope_theta, dtype)

    @property
    def num_parameters(self) -> int:
        """Number of trainable values, both embeddings included."""
        return sum(p.numel() for p in self.parameters())

    @property
    def num_active_parameters(self) -> int:
        """Number of values that one token meets: of the experts, those that it visits."""
        idle = 0
        if self.shape.moe is not None:
            share = 1 - self.shape.moe.top_k / self.shape.moe.experts
            for module in self.modules():
                if isinstance(module, MoE):
                    matrices = (module.gate, module.up, module.down)
                    idle += round(share * sum(m.numel() for m in matrices if m is not None))
        return self.num_parameters - idle


def _checkpointed(
    block: nn.Module, random: bool, x: Tensor, rotation: Rotation
) -> tuple[Tensor, Routing | None]:
    """Run a block that is run again in the backward pass, with the same random numbers if any."""
    result: tuple[Tensor, Routing | None] = checkpoint(
        block, x, rotation, use_reentrant=False, preserve_rng_state=random
    )
    return result
