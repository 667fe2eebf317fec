"""The text of a continuation while its tokens come, and where it stops."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from polyvision.data.text.tokenizers import Tokenizer

__all__ = ["Continuation"]


class Continuation:
    """Turn the tokens of one continuation into text, and find its end.

    A character whose bytes come in several tokens is shown when it is whole; text that may turn
    out to begin one of ``stops`` is held back until it is known.

    Args:
        tokenizer: what the tokens are of. Its end token ends the text.
        stops: the text ends before the first of them.

    Attributes:
        text: what is shown so far.
        tokens: number of tokens so far, the one that ended it included.
        ended: why it ended: ``end token`` or ``stop text``; None while it goes on.

    Example:
        >>> from polyvision.data.text.tokenizers import ByteTokenizer
        >>> said = Continuation(ByteTokenizer(), stops=["es"])
        >>> [said.add(byte) for byte in b"yes!"]
        ['y', '', '', '']
        >>> said.text, said.tokens, said.ended
        ('y', 3, 'stop text')
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        assert all(stops)
        self.text, self.tokens = "", 0
        self.ended: str | None = None
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""

    def add(self, token: int) -> str:
        """Take the next token and return the text that can be shown now."""
        if self.ended:
            return ""
        self.tokens += 1
        if token == self._tokenizer.end:
            self.ended = "end token"
            return self.close()
        self._held += self._decoder.decode(self._tokenizer.vocabulary[token])
        return self._show()

    def close(self) -> str:
        """Return what was held back; no token comes after."""
        self._held += self._decoder.decode(b"", final=True)
        return self._show(final=True)

    def _show(self, *, final: bool = False) -> str:
        found = [i for s in self._stops if (i := self._held.find(s)) >= 0]
        if found:
            self.ended = "stop text"
            shown, self._held = self._held[: min(found)], ""
        else:
            keep = 0 if final else self._open_stop()
            cut = len(self._held) - keep
            shown, self._held = self._held[:cut], self._held[cut:]
        self.text += shown
        return shown

    def _open_stop(self) -> int:
        """Return the length of the longest end of the held text that begins a stop."""
        lengths = [
            n
            for stop in self._stops
            for n in range(1, min(len(stop), len(self._held) + 1))
            if self._held.endswith(stop[:n])
        ]
        return max(lengths, default=0)
