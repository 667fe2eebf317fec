"""What determines a language model: sizes, activation, initial values, experts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from polyvision.errors import PolyvisionError
from polyvision.typed import Count, NonNegative, Positive, misfits

if TYPE_CHECKING:  # the settings of a run are read without torch
    from torch import Tensor

__all__ = ["Draw", "MoEShape", "TransformerShape", "TransformerSizes"]

# Fills a matrix; the second argument tells whether it writes to the residual stream.
Draw = Callable[["Tensor", bool], None]


@dataclass(frozen=True)
class MoEShape:
    """The mixture of experts in the place of each feed-forward network (see ``MoE``).

    Raises:
        PolyvisionError: values that do not fit; the text lists all of them.
    """

    experts: Count
    """Experts in each layer."""
    top_k: Count
    """Experts that each token visits, at most `experts`."""
    load_balance: NonNegative = 0.01
    """Weight of the load-balancing loss."""
    router_z: NonNegative = 0.001
    """Weight of the router's z-loss."""
    normalise: bool = False
    """Divide the weights of the chosen experts by their sum."""
    expert_coefficients: bool = False
    """Give each expert its own coefficients of PolyNorm or PolyReLU; else one set serves all
    experts of a layer.
    """

    def __post_init__(self) -> None:
        problems = misfits(self)
        if not problems and self.top_k > self.experts:
            problems.append(f"top_k={self.top_k} must be at most experts={self.experts}")
        if problems:
            raise PolyvisionError("mixture of experts: " + "; ".join(problems))


@dataclass(frozen=True, kw_only=True)
class TransformerSizes:
    """What a configuration chooses of a decoder-only transformer: ``model.<key>=``.

    Raises:
        PolyvisionError: values that do not fit; the text lists all of them.
    """

    context: Count
    """Longest sequence, in tokens."""
    width: Count
    """Size of the hidden states."""
    layers: Count
    """Number of transformer blocks."""
    heads: Count
    """Attention heads; `width / heads` must be an even integer."""
    kv_heads: Count | None = None
    """Heads of keys and values (grouped-query attention), a divisor of `heads`; null: as many as
    `heads`.
    """
    ffn_hidden: Count
    """Hidden size of a feed-forward network or expert without a gate; a gated one is made
    narrower, to equal parameters.
    """
    rope_theta: Positive = 10000.0
    """Base of the rotary position embedding."""
    norm_eps: Positive = 1e-5
    """Epsilon of the RMS norms."""
    qk_norm: bool = False
    """Normalise queries and keys over all their heads, before they are rotated."""
    tie_embeddings: bool = False
    """Use the embedding as output matrix."""
    init_std: Positive | None = None
    """Standard deviation of the initial weights; null: 1 / sqrt(2.5 width)."""
    init_cutoff: Positive | None = None
    """Cut the initial weights off at this many standard deviations; null: nowhere."""
    init_depth_scaled: bool = False
    """Divide the standard deviation of what writes to the residual stream by sqrt(2 layers)."""
    checkpointing: bool = False
    """Keep only the inputs of each block for the backward pass, and compute the rest again."""
    moe: MoEShape | None = None
    """Mixture of experts in place of the feed-forward networks; null: none."""

    def __post_init__(self) -> None:
        problems = misfits(self)
        if not problems and (self.width % self.heads or self.width // self.heads % 2):
            problems.append(
                f"width / heads must be an even integer, got {self.width} / {self.heads}; "
                f"take a width that is a multiple of {2 * self.heads}"
            )
        if not problems and self.kv_heads is not None and self.heads % self.kv_heads:
            problems.append(f"kv_heads={self.kv_heads} must divide heads={self.heads}")
        if problems:
            raise PolyvisionError("transformer shape: " + "; ".join(problems))

    @property
    def head_dim(self) -> int:
        """Size of a head."""
        return self.width // self.heads

    @property
    def matrix_std(self) -> float:
        """Standard deviation of the initial matrices."""
        return 1 / math.sqrt(2.5 * self.width) if self.init_std is None else self.init_std

    def draw(self, matrix: Tensor, writes_residual: bool) -> None:
        """Fill a matrix with initial values.

        The paper's standard deviation is 1/sqrt(2.5 width), for the mixture of experts cut off at
        three standard deviations. Its released code differs: 0.02 for the mixture of experts, and
        1/sqrt(2 layers) less for the outputs of the dense model's layers.

        Source: Zhuo et al. 2024, https://arxiv.org/abs/2411.03884 (Table 7).

        Args:
            matrix: what is filled.
            writes_residual: it writes to the residual stream (see ``init_depth_scaled``).
        """
        from torch import nn

        std = self.matrix_std
        if writes_residual and self.init_depth_scaled:
            std /= math.sqrt(2 * self.layers)
        if self.init_cutoff is None:
            nn.init.normal_(matrix, std=std)
        else:
            cutoff = self.init_cutoff * std
            nn.init.trunc_normal_(matrix, std=std, a=-cutoff, b=cutoff)


@dataclass(frozen=True, kw_only=True)
class TransformerShape(TransformerSizes):
    """Everything that determines the model: its sizes, the vocabulary and the activation.

    Attributes:
        vocab_size: number of tokens V.
        activation: registered name of the activation in the feed-forward networks.
        activation_options: keywords of its constructor.
    """

    vocab_size: Count
    activation: str = "polynorm"
    activation_options: Mapping[str, Any] = field(default_factory=dict)
