"""Loss, perplexity and bits per byte of a language model on a text of any length.

A text longer than the context is cut so that each of its tokens is predicted once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from itertools import islice

import numpy as np
import torch

from polyvision.analysis.language.trained import TrainedModel
from polyvision.errors import PolyvisionError
from polyvision.models.language.loss import IGNORED

__all__ = ["Score", "Span", "score_tokens", "spans"]


@dataclasses.dataclass(frozen=True)
class Span:
    """One pass of the model.

    Attributes:
        start: the first token that it sees.
        scored: the first token whose prediction counts.
        end: after the last token whose prediction counts, which it does not see itself.
    """

    start: int
    scored: int
    end: int


def spans(first: int, total: int, context: int, stride: int | None = None) -> Iterator[Span]:
    """Yield spans that predict the tokens from ``first`` to ``total``, each once.

    Each span is as long as the context and the tokens allow: what does not fit is cut on the left.
    A later one predicts ``stride`` tokens, which have at least ``context - stride`` tokens before
    them; the last has a full context too.

    Args:
        first: the first token to predict, at least 1.
        total: number of tokens.
        context: tokens that the model sees at most.
        stride: from 1 to ``context``; None for ``context``, which takes the fewest passes.

    Example:
        >>> [(s.start, s.scored, s.end) for s in spans(1, 11, context=4)]
        [(0, 1, 5), (4, 5, 9), (6, 9, 11)]
        >>> [(s.start, s.scored, s.end) for s in spans(1, 8, context=4, stride=2)]
        [(0, 1, 5), (2, 5, 7), (3, 7, 8)]
        >>> list(spans(9, 11, context=4))  # a long beginning that is only seen
        [Span(start=6, scored=9, end=11)]
    """
    assert first >= 1
    assert stride is None or 1 <= stride <= context
    scored, step = first, context
    while scored < total:
        end = min(scored + step, total)
        yield Span(max(0, end - 1 - context), scored, end)
        scored, step = end, stride or context


@dataclasses.dataclass(frozen=True)
class Score:
    """What a model makes of a text.

    Attributes:
        nats: cross-entropy summed over the predicted tokens.
        tokens: number of predicted tokens.
        text_bytes: bytes of text that they stand for.
    """

    nats: float
    tokens: int
    text_bytes: int

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """``exp(loss)``; per token, so it depends on the tokenizer."""
        return math.exp(min(self.loss, 700.0))

    @property
    def bits_per_byte(self) -> float:
        """``nats / (ln 2 bytes)``, which compares across tokenizers."""
        return self.nats / (math.log(2) * self.text_bytes)


@torch.no_grad()
def score_tokens(
    trained: TrainedModel,
    read: Callable[[int, int], np.ndarray],
    total: int,
    *,
    context: int,
    stride: int | None = None,
    batch_size: int = 8,
    progress: Callable[[int], None] | None = None,
) -> Score:
    """Predict every token but the first from those before it, in windows.

    Args:
        trained: the language model.
        read: gives ``count`` token ids from ``start`` on, (count,).
        total: number of tokens, at least 2.
        context: tokens of a window.
        stride: how far the window moves; see ``spans``.
        batch_size: windows at a time.
        progress: is called with the number of tokens done since the last call.

    Raises:
        PolyvisionError: the loss is not finite.
    """
    lengths = trained.tokenizer.byte_lengths
    nats, tokens, text_bytes = 0.0, 0, 0
    left = spans(1, total, context, stride)  # all of one length
    while batch := list(islice(left, batch_size)):
        windows = np.stack([read(s.start, s.end - s.start) for s in batch]).astype(np.int64)
        targets = windows[:, 1:].copy()
        for row, span in zip(targets, batch, strict=True):
            text_bytes += int(lengths[row[span.scored - span.start - 1 :]].sum())
            row[: span.scored - span.start - 1] = IGNORED
        inputs, wanted = (
            torch.from_numpy(np.ascontiguousarray(each)).to(trained.device)
            for each in (windows[:, :-1], targets)
        )
        with trained.autocast():
            found = trained.model(inputs, wanted).nats.item()
        if not math.isfinite(found):
            raise PolyvisionError(
                f"{trained.source}: the loss is {found} at tokens {batch[0].scored:,} to "
                f"{batch[-1].end:,}; try --precision 32"
            )
        done = sum(span.end - span.scored for span in batch)
        nats, tokens = nats + found, tokens + done
        if progress:
            progress(done)
    return Score(nats, tokens, text_bytes)
