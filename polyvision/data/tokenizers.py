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
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import tokenizers

from polyvision.errors import PolyvisionError, did_you_mean

__all__ = [
    "BPETokenizer",
    "ByteTokenizer",
    "Tokenizer",
    "TokenizerSpec",
    "parse_tokenizer",
    "tokenizer_from_json",
]

_MAX_VOCAB = 1 << 20


class Tokenizer(ABC):
    """What every tokenizer offers."""

    @property
    @abstractmethod
    def vocabulary(self) -> tuple[bytes, ...]:
        """The bytes that each token id stands for."""

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

    Args:
        definition: a ``tokenizer.json`` of the Hugging Face ``tokenizers`` library with a
            byte-level BPE model, for example from ``BPETokenizer.train(...).to_json()``.

    Raises:
        PolyvisionError: not such a definition.

    Example:
        >>> tokenizer = BPETokenizer.train("the whale, the whale, the white whale", 260)
        >>> tokenizer.decode(tokenizer.encode("a whale!"))
        'a whale!'
    """

    def __init__(self, definition: str) -> None:
        self._definition = definition
        parts = _parse_object(definition)
        if (
            parts.get("model", {}).get("type") != "BPE"
            or (parts.get("decoder") or {}).get("type") != "ByteLevel"
        ):
            raise PolyvisionError("tokenizer definition: the model must be a byte-level BPE")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(definition)
            ids = self._tokenizer.get_vocab()
            self._vocabulary = tuple(_to_bytes(token) for token in sorted(ids, key=ids.__getitem__))
        except Exception as error:  # the library raises nothing narrower
            raise PolyvisionError(f"tokenizer definition: not usable ({error!r})") from None

    @classmethod
    def train(cls, text: str, vocab_size: int) -> BPETokenizer:
        """Learn merges from ``text``; the same text gives the same tokenizer.

        Args:
            text: what the merges are learned from.
            vocab_size: tokens wanted, at least 256. A short text gives fewer: a pair must occur
                twice to be merged.
        """
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=2,
            initial_alphabet=sorted(_BYTE_OF_SYMBOL),
            special_tokens=[],
            show_progress=False,
        )
        tokenizer.train_from_iterator(_pieces(text), trainer)
        return cls(tokenizer.to_str())

    @property
    def vocabulary(self) -> tuple[bytes, ...]:
        """The 256 bytes and the merged strings."""
        return self._vocabulary

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


@dataclass(frozen=True)
class TokenizerSpec:
    """A tokenizer that is still to be made from the training text.

    Attributes:
        kind: ``bytes`` or ``bpe``.
        vocab_size: number of tokens wanted.
    """

    kind: str
    vocab_size: int

    def train(self, text: str) -> Tokenizer:
        """Make the tokenizer."""
        return (
            ByteTokenizer() if self.kind == "bytes" else BPETokenizer.train(text, self.vocab_size)
        )


def parse_tokenizer(spec: str) -> TokenizerSpec:
    """Read ``bytes`` or ``bpe:<vocabulary size>``.

    Raises:
        PolyvisionError: anything else; the text says what to write.

    Example:
        >>> parse_tokenizer("bpe:1024")
        TokenizerSpec(kind='bpe', vocab_size=1024)
    """
    kind, colon, size = spec.partition(":")
    if kind == "bytes" and not colon:
        return TokenizerSpec(kind, 256)
    if kind != "bpe":
        hint = did_you_mean(kind, ["bytes", "bpe"])
        raise PolyvisionError(f"unknown tokenizer {spec!r}.{hint} Valid: bytes, bpe:<vocabulary>.")
    if not re.fullmatch("[0-9]+", size) or not 256 < int(size) <= _MAX_VOCAB:
        raise PolyvisionError(
            f"tokenizer {spec!r}: write bpe:<vocabulary> with a vocabulary of 257 to {_MAX_VOCAB} "
            "tokens (the 256 bytes and the merges), for example bpe:1024"
        )
    return TokenizerSpec(kind, int(size))


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


# A line break before a word is a token border in GPT-2's pre-tokenization, whatever surrounds it.
_CUT = re.compile(r"\n(?=\S)")


def _pieces(text: str, size: int = 1 << 16) -> Iterator[str]:
    """Cut ``text`` into pieces of about ``size`` characters that encode to the same tokens."""
    start = 0
    while start < len(text):
        cut = _CUT.search(text, start + size)
        end = cut.start() if cut else len(text)
        yield text[start:end]
        start = end


def _byte_symbols() -> dict[str, int]:
    """Return GPT-2's printable symbol of each byte: itself, or the next character from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF_SYMBOL = _byte_symbols()
_BYTES = tuple(bytes([b]) for b in range(256))


def _to_bytes(token: str) -> bytes:
    """Return the bytes of a token that is written in symbols."""
    return bytes(_BYTE_OF_SYMBOL[symbol] for symbol in token)
