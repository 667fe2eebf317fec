"""What determines a language model: sizes, activation, initial values, experts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from polyvision.errors import PolyvisionError

__all__ = ["Draw", "MoEShape", "TransformerShape"]

# Fills a matrix; the second argument tells whether it writes to the residual stream.
Draw = Callable[[Tensor, bool], None]

_COUNTS = ("vocab_size", "context", "width", "layers", "heads", "ffn_hidden")


def _count(value: Any) -> bool:
    return type(value) is int and value >= 1


def _number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf


def _positive(value: Any) -> bool:
    return _number(value) and value > 0


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


_WORDS: dict[Callable[[Any], bool], str] = {
    _count: "a positive integer",
    _number: "a number of at least 0",
    _positive: "a number greater than 0",
    _flag: "true or false",
}


def _problems(owner: Any, valid: Callable[[Any], bool], *names: str) -> list[str]:
    """Return a sentence for each of the attributes whose value is not valid."""
    return [
        f"{name} must be {_WORDS[valid]}, got {getattr(owner, name)!r}"
        for name in names
        if not valid(getattr(owner, name))
    ]


@dataclass(frozen=True)
class MoEShape:
    """The mixture of experts in the place of each FFN (see ``MoE``).

    Attributes:
        experts: number of experts E.
        top_k: experts that each token visits, at most E.
        load_balance: weight of the load-balance loss.
        router_z: weight of the router's z-loss.
        normalise: divide the chosen experts' probabilities by their sum.
        expert_coefficients: each expert has its own coefficients of PolyNorm or PolyReLU; else one
            set serves all experts of a layer.

    Raises:
        PolyvisionError: values that do not fit; the text lists all of them.
    """

    experts: int
    top_k: int
    load_balance: float = 0.01
    router_z: float = 0.001
    normalise: bool = False
    expert_coefficients: bool = False

    def __post_init__(self) -> None:
        problems = _problems(self, _count, "experts", "top_k")
        if not problems and self.top_k > self.experts:
            problems.append(f"top_k={self.top_k} must be at most experts={self.experts}")
        problems += _problems(self, _number, "load_balance", "router_z")
        problems += _problems(self, _flag, "normalise", "expert_coefficients")
        if problems:
            raise PolyvisionError("mixture of experts: " + "; ".join(problems))


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
        ffn_hidden: hidden size of an ungated FFN, or of one expert; a gated one takes 2/3 (see
            ``FeedForward``).
        activation: registered name of the FFN's activation.
        activation_options: keywords of its constructor.
        rope_theta: base of the rotary wavelengths.
        norm_eps: eps of every RMSNorm.
        qk_norm: normalise queries and keys over all their heads, before they are rotated.
        tie_embeddings: the input embedding serves as output matrix too.
        init_std: standard deviation of the initial matrices; None for 1/sqrt(2.5 width).
        init_cutoff: redraw initial values beyond this many standard deviations; None for never.
        init_depth_scaled: divide the standard deviation of the matrices that write to the residual
            stream (attention's output, FFN's down) by sqrt(2 layers).
        checkpointing: keep only the input of each block for the backward pass, and run the block
            again there.
        moe: experts instead of the FFN; None for a dense model.

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
    qk_norm: bool = False
    tie_embeddings: bool = False
    init_std: float | None = None
    init_cutoff: float | None = None
    init_depth_scaled: bool = False
    checkpointing: bool = False
    moe: MoEShape | None = None

    def __post_init__(self) -> None:
        problems = self._bad_values() or self._bad_heads()
        if problems:
            raise PolyvisionError("transformer shape: " + "; ".join(problems))

    def _bad_values(self) -> list[str]:
        given = [n for n in ("kv_heads", "init_std", "init_cutoff") if getattr(self, n) is not None]
        counts = [name for name in given if name == "kv_heads"]
        numbers = [name for name in given if name != "kv_heads"]
        return [
            *_problems(self, _count, *_COUNTS, *counts),
            *_problems(self, _positive, "rope_theta", "norm_eps", *numbers),
            *_problems(
                self, _flag, "qk_norm", "tie_embeddings", "init_depth_scaled", "checkpointing"
            ),
        ]

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
        std = self.matrix_std
        if writes_residual and self.init_depth_scaled:
            std /= math.sqrt(2 * self.layers)
        if self.init_cutoff is None:
            nn.init.normal_(matrix, std=std)
        else:
            cutoff = self.init_cutoff * std
            nn.init.trunc_normal_(matrix, std=std, a=-cutoff, b=cutoff)
