"""How a text longer than the context is cut, so that each of its tokens is predicted once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

__all__ = ["Span", "spans"]


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
