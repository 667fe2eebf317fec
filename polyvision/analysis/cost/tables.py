"""Tables 8 and 9 of the PolyCom paper: FLOPs and memory of an FFN's activation, by its formulas.

Source: Zhuo et al. 2024, https://arxiv.org/abs/2411.03884 (appendix F). One feed-forward network on
an input of shape (B, S, H); its hidden layer has 4H features, a gated one 8H/3.
"""

from __future__ import annotations

import dataclasses
from fractions import Fraction

from polyvision.analysis.cost.flops import flops_per_element

__all__ = ["PAPER_METHODS", "CostRow", "paper_row"]

# Saved elements in units of BSH, as Table 8 prints them for order 3.
_MEMORY = {
    "relu": Fraction(4),
    "gelu": Fraction(10),
    "swiglu": Fraction(8),
    "relu2": Fraction(8),
    "polynorm": Fraction(12),
    "polyrelu": Fraction(8),
}
PAPER_METHODS = tuple(_MEMORY)


@dataclasses.dataclass(frozen=True)
class CostRow:
    """One row of Table 8 or 9.

    Attributes:
        name: registered name of the activation.
        hidden: features of the hidden layer, in units of H.
        flops: FLOPs of the activation, in units of BSH.
        ratio: FLOPs over 24 B S H^2, exactly.
        memory: bytes that the activation adds to what is kept for the backward pass.
    """

    name: str
    hidden: Fraction
    flops: Fraction
    ratio: Fraction
    memory: int


def paper_row(
    name: str,
    *,
    width: int = 1024,
    batch: int = 4,
    length: int = 4096,
    bytes_per_value: int = 2,
    checkpointing: bool = False,
) -> CostRow:
    """Compute one row of Table 8, or of Table 9 with ``checkpointing``.

    With f FLOPs per hidden element (``flops_per_element``) and a hidden layer of cH features the
    activation takes f c BSH FLOPs, twice that when it is computed again in the backward pass, and

        FLOPs ratio = activation FLOPs / (24 B S H^2)

    24BSH^2 is the forward matrix work of a whole transformer layer, with attention's projections;
    the paper calls it that of the FFN, which alone is 16BSH^2. Memory is the printed multiple of
    BSH times the size of a value; under checkpointing the paper counts 0.

    Args:
        name: one of ``PAPER_METHODS``.
        width: H.
        batch: B.
        length: S.
        bytes_per_value: 2 for bf16.
        checkpointing: Table 9 instead of Table 8.
    """
    hidden = Fraction(8, 3) if name == "swiglu" else Fraction(4)
    flops = flops_per_element(name) * hidden * (2 if checkpointing else 1)
    tokens = batch * length
    memory = 0 if checkpointing else int(_MEMORY[name] * tokens * width * bytes_per_value)
    return CostRow(name, hidden, flops, flops / (24 * width), memory)
