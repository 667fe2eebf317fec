"""Text for language models: a built-in book or any UTF-8 file, as fixed windows of tokens."""

from __future__ import annotations

import hashlib
import lzma
import sys
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from polyvision.data.text.cache import Arrays, cache_folder, cached_arrays
from polyvision.data.text.split import nearest_border
from polyvision.data.text.tokenizer_spec import TokenizerSpec, parse_tokenizer
from polyvision.data.text.tokenizers import Tokenizer, tokenizer_from_json
from polyvision.data.text.utf8 import decode_text
from polyvision.errors import PolyvisionError, unknown

__all__ = ["TextData", "TokenWindows", "load_book", "load_text_data", "pack_tokens", "read_text"]

# Learning from more characters than this takes some seconds.
_LONG_TO_LEARN = 4 << 20


class TokenWindows(Dataset[tuple[Tensor, Tensor]]):
    """Consecutive windows of a token array, without copying it.

    Item i is ``(inputs, targets)``, both (context,) int64: the tokens from ``i * context`` on, and
    the same shifted by one. Targets of neighbouring windows meet and do not overlap. What is left
    at the end, less than a window, is not used.

    Args:
        tokens: (N,) of any integer dtype, N greater than ``context``.
        context: tokens per window.

    Example:
        >>> inputs, targets = TokenWindows(np.arange(10), 4)[1]
        >>> inputs.tolist(), targets.tolist()
        ([4, 5, 6, 7], [5, 6, 7, 8])
    """

    def __init__(self, tokens: np.ndarray, context: int) -> None:
        assert tokens.ndim == 1
        assert 0 < context < len(tokens)
        self.tokens = tokens
        self.context = context

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index * self.context
        window = torch.from_numpy(
            self.tokens[start : start + self.context + 1].astype(np.int64)
        )  # (context + 1,)
        return window[:-1], window[1:]

    def fingerprint(self) -> str:
        """Return a hash of the tokens and the context."""
        return f"{self._hash}-{self.context}"

    @cached_property
    def _hash(self) -> str:
        return hashlib.blake2b(np.ascontiguousarray(self.tokens).data, digest_size=8).hexdigest()

    @property
    def targets(self) -> np.ndarray:
        """All predicted tokens in order, a view of shape (len * context,)."""
        return self.tokens[1 : len(self) * self.context + 1]


@dataclass(frozen=True)
class TextData:
    """A corpus that is ready for training.

    Attributes:
        title: what the text is.
        train: windows of the first part of the text.
        val: windows of the last part.
        tokenizer: made from the first part only.
        val_bytes: UTF-8 bytes that the targets of ``val`` stand for. Bits per byte are the summed
            loss of all targets in nats, divided by ``ln 2 * val_bytes``.
        text_bytes: UTF-8 bytes of the whole text.
    """

    title: str
    train: TokenWindows
    val: TokenWindows
    tokenizer: Tokenizer
    val_bytes: int
    text_bytes: int

    def describe(self) -> dict[str, str]:
        """Return labelled lines for the plan of a run."""
        tokens = len(self.train.tokens) + len(self.val.tokens)
        return {
            "data": f"{self.title}, {self.text_bytes:,} bytes",
            "tokenizer": f"{self.tokenizer.vocab_size:,} tokens, "
            f"{self.text_bytes / tokens:.2f} bytes per token",
            "train": _describe(self.train),
            "val": f"{_describe(self.val)}, {self.val_bytes:,} bytes predicted",
        }


def _describe(part: TokenWindows) -> str:
    return f"{len(part.tokens):,} tokens, {len(part):,} windows of {part.context:,}"


def load_text_data(
    name: str,
    *,
    context: int,
    tokenizer: str = "bpe:1024",
    path: str | Path | None = None,
    val_fraction: float = 0.1,
    cache: Path | None = None,
) -> TextData:
    """Load a text, split it, make its tokenizer and encode it; the work is cached.

    The last part of the text is held out, cut at the paragraph (else line, else word) nearest to
    ``val_fraction``. The tokenizer sees the first part only.

    Args:
        name: ``book`` for the built-in one, ``text`` for the file at ``path``.
        context: tokens per window.
        tokenizer: ``bytes`` or ``bpe:<vocabulary size>``.
        path: UTF-8 text file, for ``text`` only.
        val_fraction: share of the characters that is held out, between 0 and 1.
        cache: folder of the results; None for the user's cache folder.

    Raises:
        PolyvisionError: a value is out of range, the file cannot be used, or a part of the text is
            shorter than one window.
    """
    spec = parse_tokenizer(tokenizer)
    if not 0 < val_fraction < 1:
        raise PolyvisionError(f"data.val_fraction must lie between 0 and 1, got {val_fraction}")
    if context < 1:
        raise PolyvisionError(f"context must be a positive number of tokens, got {context}")
    title, text = _load(name, path)
    cut = _split_point(text, 1 - val_fraction)
    file = (cache or cache_folder()) / "text" / f"{_key(text, cut, spec)}.npz"
    arrays = cached_arrays(file, lambda: _encode(text, cut, spec))
    trained = tokenizer_from_json(bytes(arrays["tokenizer"]).decode())
    train = _windows(arrays["train"], context, "training")
    val = _windows(arrays["val"], context, "validation")
    val_bytes = int(trained.byte_lengths[val.targets].sum())
    return TextData(title, train, val, trained, val_bytes, len(text.encode()))


def load_book() -> str:
    """Return *Moby-Dick* by Herman Melville (1851), which ships with the package.

    See ``polyvision/data/assets/README.md`` for its source and licence.

    Example:
        >>> load_book()[22:38]
        'Call me Ishmael.'
    """
    asset = resources.files("polyvision.data.assets") / "moby-dick.txt.xz"
    return lzma.decompress(asset.read_bytes()).decode()


def read_text(path: str | Path) -> str:
    """Return the text of a UTF-8 file, without a byte order mark, line ends as they are.

    Raises:
        PolyvisionError: the file is missing, unreadable, empty or not UTF-8.
    """
    file = Path(path).expanduser()
    place = f"data.path={str(path)!r}"
    if file.is_dir():
        raise PolyvisionError(f"{place} is a folder; name one UTF-8 text file")
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        raise PolyvisionError(f"{place}: no such file; looked for {file.absolute()}") from None
    except OSError as error:
        raise PolyvisionError(f"{place} cannot be read: {error.strerror}") from None
    if not content:
        raise PolyvisionError(f"{place} is empty; name a UTF-8 text file with some text")
    return decode_text(content, place)


def pack_tokens(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """Return ``tokens`` in the smallest unsigned dtype that holds every id of the vocabulary.

    Raises:
        PolyvisionError: an id is not in the vocabulary.

    Example:
        >>> pack_tokens(np.array([3, 1000]), 1024).dtype
        dtype('uint16')
    """
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        raise PolyvisionError(
            f"token ids reach from {tokens.min()} to {tokens.max()}, "
            f"outside the vocabulary of {vocab_size} tokens"
        )
    return tokens.astype(np.min_scalar_type(vocab_size - 1))


def _load(name: str, path: str | Path | None) -> tuple[str, str]:
    if name == "book":
        if path is not None:
            raise PolyvisionError("data=book is built in and takes no data.path; use data=text")
        return "Moby-Dick (built in)", load_book()
    if name == "text":
        if path is None:
            raise PolyvisionError("data=text needs a UTF-8 text file: data.path=<file>")
        return str(path), read_text(path)
    raise unknown("text data", name, ["book", "text"])


def _split_point(text: str, fraction: float) -> int:
    """Return where the held-out part begins: after the border nearest to ``fraction``.

    A border may move the cut by at most half of the smaller part.
    """
    target = round(len(text) * fraction)
    return nearest_border(text, target, min(target, len(text) - target) // 2)


def _key(text: str, cut: int, spec: TokenizerSpec) -> str:
    """Return a hash of all that the encoded arrays depend on."""
    recipe = f"3 {version('tokenizers')} {spec} {cut} "
    return hashlib.sha256(recipe.encode() + text.encode()).hexdigest()


def _encode(text: str, cut: int, spec: TokenizerSpec) -> Arrays:
    if spec.kind == "bpe" and cut > _LONG_TO_LEARN:
        print(
            f"learning a vocabulary of {spec.vocab_size:,} tokens from {cut:,} characters; later "
            "runs find it in the cache",
            file=sys.stderr,
            flush=True,
        )
    tokenizer = spec.make([text[:cut]])
    return {
        "tokenizer": np.frombuffer(tokenizer.to_json().encode(), dtype=np.uint8),
        "train": pack_tokens(tokenizer.encode(text[:cut]), tokenizer.vocab_size),
        "val": pack_tokens(tokenizer.encode(text[cut:]), tokenizer.vocab_size),
    }


def _windows(tokens: np.ndarray, context: int, part: str) -> TokenWindows:
    if len(tokens) <= context:
        raise PolyvisionError(
            f"the {part} split of the text has {len(tokens)} tokens, one window needs "
            f"{context + 1} (the context and one more); use a longer text, a smaller context"
            " or another data.val_fraction"
        )
    return TokenWindows(tokens, context)
