"""What determines a language model: sizes, activation, initial values, experts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from polyvision.errors import PolyvisionError

__all__ = ["MoEShape", "TransformerShape"]

_COUNTS = ("vocab_size", "context", "width", "layers", "heads", "ffn_hidden")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _count_problems(owner: Any, names: tuple[str, ...]) -> list[str]:
    values = {name: getattr(owner, name) for name in names}
    return [
        f"{name} must be a positive integer, got {value!r}"
        for name, value in values.items()
        if not _is_count(value)
    ]


def _flag_problems(owner: Any, names: tuple[str, ...]) -> list[str]:
    values = {name: getattr(owner, name) for name in names}
    return [
        f"{name} must be true or false, got {value!r}"
        for name, value in values.items()
        if not isinstance(value, bool)
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
        problems = _count_problems(self, ("experts", "top_k"))
        if not problems and self.top_k > self.experts:
            problems.append(f"top_k={self.top_k} must be at most experts={self.experts}")
        for name in ("load_balance", "router_z"):
            value = getattr(self, name)
            if not _is_number(value) or not 0 <= value < math.inf:
                problems.append(f"{name} must be a number of at least 0, got {value!r}")
        problems += _flag_problems(self, ("normalise", "expert_coefficients"))
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
        names = (*_COUNTS, *(["kv_heads"] if self.kv_heads is not None else []))
        problems = _count_problems(self, names)
        numbers = ["rope_theta", "norm_eps"]
        numbers += [n for n in ("init_std", "init_cutoff") if getattr(self, n) is not None]
        for name in numbers:
            value = getattr(self, name)
            if not _is_number(value) or not 0 < value < math.inf:
                problems.append(f"{name} must be a number greater than 0, got {value!r}")
        flags = ("qk_norm", "tie_embeddings", "init_depth_scaled", "checkpointing")
        problems += _flag_problems(self, flags)
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

    @property
    def head_dim(self) -> int:
        """Size of a head."""
        return self.width // self.heads

    @property
    def matrix_std(self) -> float:
        """Standard deviation of the initial matrices."""
        return 1 / math.sqrt(2.5 * self.width) if self.init_std is None else self.init_std
