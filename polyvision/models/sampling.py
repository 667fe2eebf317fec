"""The next token from its logits: temperature, top-k and nucleus (top-p).

Source: Fan et al. 2018 (top-k), https://arxiv.org/abs/1805.04833; Holtzman et al. 2019 (nucleus),
https://arxiv.org/abs/1904.09751.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from polyvision.errors import PolyvisionError

__all__ = ["Sampling", "next_token_probabilities"]


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How a token is drawn.

    Attributes:
        temperature: divides the logits; 0 takes the most likely token.
        top_k: draw from the k most likely tokens only; None for all.
        top_p: draw from the smallest set of most likely tokens that holds this probability (after
            ``top_k``), greater than 0 and at most 1; None for all.

    Raises:
        PolyvisionError: a value is out of range; the text names it.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise PolyvisionError(
                f"generate: temperature must be 0 (most likely token) or more, "
                f"got {self.temperature}"
            )
        if self.top_k is not None and self.top_k < 1:
            raise PolyvisionError(
                f"generate: top_k must be 1 or more, or None for all, got {self.top_k}"
            )
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise PolyvisionError(
                f"generate: top_p must be greater than 0 and at most 1, or None for all, "
                f"got {self.top_p}"
            )

    def draw(self, logits: Tensor, generator: torch.Generator) -> Tensor:
        """Return a token (B,) for each row of logits (B, V)."""
        if self.temperature == 0:
            return logits.argmax(-1)
        p = next_token_probabilities(logits, self.temperature, self.top_k, self.top_p)
        return torch.multinomial(p, 1, generator=generator)[:, 0]


def next_token_probabilities(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None
) -> Tensor:
    """Return the distribution that ``generate`` draws from, in fp32 or wider.

    Args:
        logits: (B, V).
        temperature: greater than 0.
        top_k: keep the k most likely tokens; ties at the border stay in.
        top_p: keep tokens in falling order of probability until their sum reaches this value.

    Returns:
        (B, V) probabilities; each row sums to 1.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature  # no overflow near 0
    if top_k is not None and top_k < logits.shape[-1]:
        smallest_kept = logits.topk(top_k).values[:, -1:]  # (B, 1)
        logits = logits.masked_fill(logits < smallest_kept, -math.inf)
    if top_p is not None and top_p < 1:
        ordered, index = logits.softmax(-1).sort(descending=True, stable=True)  # (B, V)
        likelier = ordered.cumsum(-1) - ordered  # probability of all tokens before this one
        dropped = torch.zeros_like(index, dtype=torch.bool).scatter(-1, index, likelier >= top_p)
        logits = logits.masked_fill(dropped, -math.inf)
    return logits.softmax(-1)
