"""A tokenizer by its name: ``bytes``, ``bpe:<vocabulary>``, or files of one that exists."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path

import tokenizers

from polyvision.data.text.tokenizers import (
    END_TOKEN,
    BPETokenizer,
    ByteTokenizer,
    Tokenizer,
    tokenizer_from_json,
)
from polyvision.errors import PolyvisionError, did_you_mean, looked_for

__all__ = ["TokenizerSpec", "parse_tokenizer"]

_MAX_VOCAB = 1 << 20
_VALID = "bytes, bpe:<vocabulary>, a tokenizer.json, or a folder with GPT-2's files"
# The two names that GPT-2's vocabulary and merges go by.
_GPT2_FILES = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))


@dataclasses.dataclass(frozen=True)
class TokenizerSpec:
    """A tokenizer that is still to be made.

    Attributes:
        kind: ``bytes``, ``bpe`` or ``file``.
        vocab_size: number of tokens wanted, for ``bpe``.
        definition: the tokenizer itself, for ``file``.
    """

    kind: str
    vocab_size: int
    definition: str = ""

    def make(self, texts: Iterable[str], *, end_token: bool | str = False) -> Tokenizer:
        """Return the tokenizer; only ``bpe`` looks at the texts, and adds the end token."""
        if self.kind == "bytes":
            return ByteTokenizer()
        if self.kind == "bpe":
            return BPETokenizer.train(texts, self.vocab_size, end_token=end_token)
        return tokenizer_from_json(self.definition)

    def ending_with(self, name: str) -> TokenizerSpec:
        """Return the specification with another token after each document.

        Raises:
            PolyvisionError: the tokenizer has no such special token.
        """
        if self.kind == "bpe":  # named when it is learned
            return self
        tokenizer = self.make(())
        if not isinstance(tokenizer, BPETokenizer):
            raise PolyvisionError(
                f"end token {name!r}: the tokenizer bytes has no special tokens; take "
                "bpe:<vocabulary> or a tokenizer.json"
            )
        return dataclasses.replace(self, definition=tokenizer.ending_with(name).to_json())


def parse_tokenizer(spec: str) -> TokenizerSpec:
    """Read ``bytes``, ``bpe:<vocabulary size>`` or the path of tokenizer files.

    Files are a ``tokenizer.json`` (Hugging Face's, with a byte-level BPE, or that of a run or a
    prepared corpus), or a folder with one or with GPT-2's two files: ``encoder.json`` and
    ``vocab.bpe``, also named ``vocab.json`` and ``merges.txt``.

    Raises:
        PolyvisionError: anything else; the text says what to write.

    Example:
        >>> parse_tokenizer("bpe:1024")
        TokenizerSpec(kind='bpe', vocab_size=1024, definition='')
    """
    kind, colon, size = spec.partition(":")
    if spec == "bytes":
        return TokenizerSpec(spec, 256)
    if kind == "bpe":
        if not re.fullmatch("[0-9]+", size) or not 256 < int(size) <= _MAX_VOCAB:
            raise PolyvisionError(
                f"tokenizer {spec!r}: write bpe:<vocabulary> with a vocabulary of 257 to "
                f"{_MAX_VOCAB} tokens (the 256 bytes and the merges), for example bpe:1024"
            )
        return TokenizerSpec(kind, int(size))
    path = Path(spec).expanduser()
    if not colon and spec and (path.exists() or "/" in spec or path.suffix == ".json"):
        tokenizer = _read(path)
        return TokenizerSpec("file", tokenizer.vocab_size, tokenizer.to_json())
    hint = did_you_mean(kind, ["bytes", "bpe"])
    raise PolyvisionError(f"unknown tokenizer {spec!r}.{hint} Valid: {_VALID}.")


def _read(path: Path) -> Tokenizer:
    place = f"tokenizer {str(path)!r}"
    try:
        if not path.is_dir():
            return tokenizer_from_json(path.read_text(encoding="utf-8"))
        names = {p.name for p in path.iterdir()}
        if "tokenizer.json" in names:
            return tokenizer_from_json((path / "tokenizer.json").read_text(encoding="utf-8"))
        for vocabulary, merges in _GPT2_FILES:
            if {vocabulary, merges} <= names:
                return _gpt2(path / vocabulary, path / merges)
    except FileNotFoundError:
        near = [str(p) for p in path.parent.glob("*")]
        raise PolyvisionError(
            f"{place}: no such file{looked_for(path)}.{did_you_mean(str(path), near)}"
        ) from None
    except OSError as error:
        raise PolyvisionError(f"{place} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise PolyvisionError(f"{place} is not UTF-8 text; valid: {_VALID}") from None
    except PolyvisionError as error:
        raise PolyvisionError(f"{place}: {error}") from None
    pairs = " or ".join(f"{v} + {m}" for v, m in _GPT2_FILES)
    raise PolyvisionError(f"{place}: the folder has neither a tokenizer.json nor {pairs}")


def _gpt2(vocabulary: Path, merges: Path) -> Tokenizer:
    """Build GPT-2's tokenizer from its two files."""
    try:
        model = tokenizers.models.BPE.from_file(str(vocabulary), str(merges))
    except Exception as error:  # the library raises nothing narrower
        raise PolyvisionError(f"{vocabulary.name} and {merges.name}: {error}") from None
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    if END_TOKEN in tokenizer.get_vocab():
        tokenizer.add_special_tokens([END_TOKEN])
    return BPETokenizer(tokenizer.to_str())
