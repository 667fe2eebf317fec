"""Tokenizers without loss: every text is restored exactly.

Both kinds map a token to a fixed string of bytes, so the bytes that a token stands for can be
counted and a model's loss compared across vocabularies as bits per byte.

Source: Sennrich et al. 2015 (byte-pair encoding), https://arxiv.org/abs/1508.07909; Radford et al.
2019 (on bytes, with GPT-2's pre-tokenization), https://github.com/openai/gpt-2.
"""

from __future__ import annotations

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import tokenizers

from polyvision.errors import PolyvisionError

__all__ = [
    "END_TOKEN",
    "BPETokenizer",
    "ByteTokenizer",
    "Tokenizer",
    "next_cut",
    "tokenizer_from_json",
]

# What a tokenizer that is trained here calls the token after each document.
END_TOKEN = "<|endoftext|>"
# The names of that token in other tokenizers, in the order they are looked for.
_END_TOKENS = (END_TOKEN, "<|end_of_text|>", "</s>", "<eos>")


class Tokenizer(ABC):
    """What every tokenizer offers."""

    @property
    @abstractmethod
    def vocabulary(self) -> tuple[bytes, ...]:
        """The bytes that each token id stands for; none for ids that are no text."""

    @property
    def end(self) -> int | None:
        """The id of the token after each document, where there is one; it stands for no text."""
        return None

    @abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """Return the token ids of ``text``, int64 of shape (tokens,)."""

    @abstractmethod
    def to_json(self) -> str:
        """Return the tokenizer as text, for ``tokenizer_from_json``."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens; ids are 0 to ``vocab_size - 1``."""
        return len(self.vocabulary)

    @cached_property
    def byte_lengths(self) -> np.ndarray:
        """Number of bytes that each token stands for, int64 of shape (vocab_size,)."""
        return np.array([len(token) for token in self.vocabulary], dtype=np.int64)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the tokenizer, in hexadecimal; equal ones give equal ids."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids; bytes that are not UTF-8 become U+FFFD.

        Raises:
            PolyvisionError: an id is not in the vocabulary.
        """
        tokens = [int(i) for i in ids]
        for token in tokens:
            if not 0 <= token < self.vocab_size:
                raise PolyvisionError(
                    f"token id {token} is outside the vocabulary of {self.vocab_size} tokens"
                )
        return b"".join(self.vocabulary[t] for t in tokens).decode("utf-8", errors="replace")


class ByteTokenizer(Tokenizer):
    """One token per byte of the UTF-8 text.

    Example:
        >>> ByteTokenizer().encode("sea").tolist()
        [115, 101, 97]
    """

    @property
    def vocabulary(self) -> tuple[bytes, ...]:
        """All 256 bytes."""
        return _BYTES

    def encode(self, text: str) -> np.ndarray:
        """Return the bytes of ``text``."""
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)

    def to_json(self) -> str:
        """Return the kind, which is all there is to know."""
        return json.dumps({"type": "bytes"})


class BPETokenizer(Tokenizer):
    """Byte-pair encoding on bytes: frequent strings of bytes are one token, any text is covered.

    Names of special tokens in a text are text: only ``end`` marks the end of a document. A
    definition may normalise texts (to NFC, say); its tokens then stand for the normalised text.

    Args:
        definition: a ``tokenizer.json`` of the Hugging Face ``tokenizers`` library with a
            byte-level BPE model, for example from ``BPETokenizer.train(...).to_json()``.

    Raises:
        PolyvisionError: not such a definition.

    Example:
        >>> tokenizer = BPETokenizer.train(["the whale, the whale, the white whale"], 260)
        >>> tokenizer.decode(tokenizer.encode("a whale!"))
        'a whale!'
    """

    def __init__(self, definition: str) -> None:
        self._definition = definition
        parts = _parse_object(definition)
        model, decoder = parts.get("model"), parts.get("decoder")
        if (
            not isinstance(model, dict)
            or not isinstance(decoder, dict)
            or model.get("type", "BPE") != "BPE"  # old files leave it out
            or decoder.get("type") != "ByteLevel"
        ):
            raise PolyvisionError("tokenizer definition: the model must be a byte-level BPE")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(definition)
            self._tokenizer.encode_special_tokens = True
            self._vocabulary = _vocabulary(self._tokenizer)
        except Exception as error:  # the library raises nothing narrower
            raise PolyvisionError(f"tokenizer definition: not usable ({error!r})") from None
        added = self._tokenizer.get_added_tokens_decoder()
        special = {token.content: i for i, token in added.items() if token.special}
        self._end = next((special[name] for name in _END_TOKENS if name in special), None)
        if self.decode(self.encode(_PROBE)) != _PROBE:
            raise PolyvisionError(
                f"tokenizer definition: {_PROBE!r} comes back as "
                f"{self.decode(self.encode(_PROBE))!r}; text must be restored exactly"
            )

    @classmethod
    def train(
        cls, texts: Iterable[str], vocab_size: int, *, end_token: bool = False
    ) -> BPETokenizer:
        """Learn merges from ``texts``; the same texts give the same tokenizer.

        Args:
            texts: what the merges are learned from.
            vocab_size: tokens wanted, at least 256. Little text gives fewer: a pair must occur
                twice to be merged.
            end_token: one of the tokens is ``END_TOKEN``.
        """
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=2,
            initial_alphabet=sorted(_BYTE_OF_SYMBOL),
            special_tokens=[END_TOKEN] if end_token else [],
            show_progress=False,
        )
        tokenizer.train_from_iterator((p for text in texts for p in _pieces(text)), trainer)
        return cls(tokenizer.to_str())

    @property
    def vocabulary(self) -> tuple[bytes, ...]:
        """The 256 bytes and the merged strings."""
        return self._vocabulary

    @property
    def end(self) -> int | None:
        """The id of the first of the usual names of this token that the definition has."""
        return self._end

    def encode(self, text: str) -> np.ndarray:
        """Return the token ids of ``text``, using all cores for a long one."""
        pieces = _pieces(text)
        arrays = [np.empty(0, dtype=np.int64)]
        while batch := list(islice(pieces, 64)):  # bounds the memory of the intermediate records
            for encoding in self._tokenizer.encode_batch_fast(batch, add_special_tokens=False):
                arrays.append(np.array(encoding.ids, dtype=np.int64))
        return np.concatenate(arrays)

    def to_json(self) -> str:
        """Return the definition the tokenizer was made from."""
        return self._definition


def tokenizer_from_json(text: str) -> Tokenizer:
    """Restore a tokenizer from the text that ``to_json`` gave.

    Raises:
        PolyvisionError: the text is not a tokenizer.
    """
    if _parse_object(text).get("type") == "bytes":
        return ByteTokenizer()
    return BPETokenizer(text)


def _parse_object(text: str) -> dict[str, Any]:
    try:
        parts = json.loads(text)
    except ValueError as error:
        raise PolyvisionError(f"tokenizer definition: not JSON ({error})") from None
    if not isinstance(parts, dict):
        raise PolyvisionError("tokenizer definition: not a JSON object")
    return parts


# A single space between words begins a token in the pre-tokenization of GPT-2, GPT-4 and their
# descendants, whatever surrounds it.
_CUT = re.compile(r"(?<=\w) (?=\w)")


def next_cut(text: str, start: int) -> int | None:
    """Return the first place from ``start`` on where cutting ``text`` does not change its tokens.

    Example:
        >>> next_cut("white whale", 2)
        5
    """
    found = _CUT.search(text, start)
    return found.start() if found else None


def _pieces(text: str, size: int = 1 << 16) -> Iterator[str]:
    """Cut ``text`` into pieces of about ``size`` characters that encode to the same tokens."""
    start = 0
    while start < len(text):
        end = next_cut(text, start + size) or len(text)
        yield text[start:end]
        start = end


def _byte_symbols() -> dict[str, int]:
    """Return GPT-2's printable symbol of each byte: itself, or the next character from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF_SYMBOL = _byte_symbols()
_BYTES = tuple(bytes([b]) for b in range(256))
_PROBE = "A b, c\n\u00e9"


def _vocabulary(tokenizer: Any) -> tuple[bytes, ...]:
    """Return the bytes of each id of a byte-level tokenizer; none for special tokens and holes."""
    ids = tokenizer.get_vocab(with_added_tokens=False)
    added = tokenizer.get_added_tokens_decoder()
    found = [b""] * (max([*ids.values(), *added]) + 1)
    for token, i in ids.items():
        if i not in added:
            found[i] = bytes(_BYTE_OF_SYMBOL[symbol] for symbol in token)
    for i, token in added.items():  # written as they are, not in symbols
        found[i] = b"" if token.special else token.content.encode()
    return tuple(found)
