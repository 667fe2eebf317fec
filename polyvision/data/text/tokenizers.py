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

from polyvision.errors import PolyvisionError, did_you_mean, some

__all__ = [
    "END_TOKEN",
    "LONGEST_PIECE",
    "BPETokenizer",
    "ByteTokenizer",
    "Tokenizer",
    "next_cut",
    "tokenizer_from_json",
]

# A run of more characters than this without a border between words is cut all the same, and may
# lose a token boundary there: encoding holds about a hundred bytes a character.
LONGEST_PIECE = 1 << 20
# What a tokenizer that is trained here calls the token after each document.
END_TOKEN = "<|endoftext|>"
# The names of that token in other tokenizers, in the order they are looked for.
_END_TOKENS = (END_TOKEN, "<|end_of_text|>", "</s>", "<eos>")
# Merges are learned from runs without white space, or of it, of at most this many characters: the
# trainer's time grows with the square of a word's length.
_LEARN_RUN = 256


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

    @property
    def end_name(self) -> str | None:
        """The name of the token ``end``."""
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
        names = (_template_end(parts), *_END_TOKENS)
        self._end_name = next((name for name in names if name in special), None)
        self._end = None if self._end_name is None else special[self._end_name]
        self.special = tuple(special)
        if self.decode(self.encode(_PROBE)) != _PROBE:
            raise PolyvisionError(
                f"tokenizer definition: {_PROBE!r} comes back as "
                f"{self.decode(self.encode(_PROBE))!r}; text must be restored exactly"
            )

    @classmethod
    def train(
        cls, texts: Iterable[str], vocab_size: int, *, end_token: bool | str = False
    ) -> BPETokenizer:
        """Learn merges from ``texts``; the same texts give the same tokenizer.

        A run of more than 256 characters without white space, or of white space, is learned from in
        parts of that length, so no token becomes longer. Encoding takes such a run as a whole.

        Args:
            texts: what the merges are learned from.
            vocab_size: tokens wanted, at least 256. Little text gives fewer: a pair must occur
                twice to be merged.
            end_token: one of the tokens stands after each document: True for ``END_TOKEN``, or
                its name.
        """
        end = END_TOKEN if end_token is True else end_token or None
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=2,
            initial_alphabet=sorted(_BYTE_OF_SYMBOL),
            special_tokens=[end] if end else [],
            show_progress=False,
        )
        parts = (part for text in texts for piece in _pieces(text) for part in _learnable(piece))
        tokenizer.train_from_iterator(parts, trainer)
        learned = cls(tokenizer.to_str())
        return learned.ending_with(end) if end else learned

    def ending_with(self, name: str) -> BPETokenizer:
        """Return this tokenizer with another token after each document.

        The definition says so in the library's own terms, as a template of a whole text, unless the
        name is found anyway.

        Args:
            name: a special token of the definition.

        Raises:
            PolyvisionError: it is not.
        """
        if name not in self.special:
            valid = some(self.special, 20) or "none"
            hint = did_you_mean(name, self.special)
            raise PolyvisionError(
                f"end token {name!r}: not a special token of this tokenizer.{hint} Valid: {valid}"
            )
        if name == self._end_name:
            return self
        changed = tokenizers.Tokenizer.from_str(self._definition)
        changed.post_processor = tokenizers.processors.TemplateProcessing(
            single=["$A", name], special_tokens=[(name, changed.token_to_id(name))]
        )
        return BPETokenizer(changed.to_str())

    @property
    def vocabulary(self) -> tuple[bytes, ...]:
        """The 256 bytes and the merged strings."""
        return self._vocabulary

    @property
    def end(self) -> int | None:
        """The id of what the definition's template puts last, else of the first usual name."""
        return self._end

    @property
    def end_name(self) -> str | None:
        """The name of the token ``end``."""
        return self._end_name

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


def next_cut(text: str, start: int, end: int | None = None) -> int | None:
    """Return the first place from ``start`` on where cutting ``text`` does not change its tokens.

    Args:
        text: the text.
        start: the first place that may be returned.
        end: nothing is looked at from here on; None for the whole text.

    Example:
        >>> next_cut("white whale", 2)
        5
    """
    found = _CUT.search(text, start, len(text) if end is None else end)
    return found.start() if found else None


def _pieces(text: str, size: int = 1 << 16) -> Iterator[str]:
    """Cut ``text`` into pieces of about ``size`` characters that encode to the same tokens."""
    start = 0
    while start < len(text):
        longest = min(start + LONGEST_PIECE, len(text))
        end = next_cut(text, start + size, longest) or longest
        yield text[start:end]
        start = end


# Runs that are too long to learn from; a look behind keeps the search linear.
_LONG_RUN = re.compile(rf"(?<!\S)\S{{{_LEARN_RUN + 1},}}|(?<!\s)\s{{{_LEARN_RUN + 1},}}")


def _learnable(text: str) -> Iterator[str]:
    """Cut ``text`` inside runs of more than 256 characters, after each 256 of them."""
    start = 0
    for run in _LONG_RUN.finditer(text):
        for end in range(run.start() + _LEARN_RUN, run.end(), _LEARN_RUN):
            yield text[start:end]
            start = end
    yield text[start:]


def _template_end(definition: dict[str, Any]) -> str | None:
    """Return the special token that the definition's template puts after a single text."""
    processor = definition.get("post_processor")
    found = processor if isinstance(processor, dict) else {}
    template = found.get("single") if found.get("type") == "TemplateProcessing" else None
    last = template[-1] if template and isinstance(template, list) else None
    if not isinstance(last, dict) or "SpecialToken" not in last:
        return None
    return str(last["SpecialToken"]["id"])


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
