"""Keys and values of the tokens seen so far, so that each new token costs one token's work.

Rows may hold sequences of different lengths. They end at the same slot, so a shorter one begins
later; positions count from each row's own beginning.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyvision.models.language.shape import TransformerShape

__all__ = ["KeyValueCache"]


class KeyValueCache:
    """Room for ``capacity`` tokens of each row, for every layer.

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
