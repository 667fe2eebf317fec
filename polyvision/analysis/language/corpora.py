"""What ``polyvision evaluate --data`` names: text files, folders of them, or prepared shards."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np

from polyvision.data.text.corpus import INDEX, PROGRESS, Corpus, Part
from polyvision.data.text.shards import token_dtype
from polyvision.data.text.sources import find_sources, read_pieces
from polyvision.data.text.tokenizers import Tokenizer
from polyvision.errors import PolyvisionError

__all__ = ["Tokens", "open_tokens"]


@dataclasses.dataclass(frozen=True)
class Tokens:
    """A row of token ids.

    Attributes:
        title: where it comes from.
        count: number of tokens.
        read: gives ``count`` ids from ``start`` on, (count,).
    """

    title: str
    count: int
    read: Callable[[int, int], np.ndarray]


def open_tokens(place: str, tokenizer: Tokenizer, *, text_key: str = "text") -> Tokens:
    """Open a data set as one row of tokens: documents, each followed by the end token if any.

    With an end token, one comes first of all, so that the whole text is predicted; without, the
    first token of all is only seen.

    Args:
        place: a prepared folder (its validation split is taken, or everything where there is none),
            or what ``polyvision prepare-text`` reads: a file, a folder or a pattern.
        tokenizer: encodes text; shards must have been made with it.
        text_key: of JSON lines and parquet.

    Raises:
        PolyvisionError: nothing there, not readable, empty, or of another tokenizer.
    """
    folder = Path(place).expanduser()
    prepared = any((folder / name).is_file() for name in (INDEX, PROGRESS))
    opened = _shards(place, tokenizer) if prepared else _text(place, tokenizer, text_key)
    if opened.count < 2:
        single = opened.count == 1 and tokenizer.end is None
        what = "a single token, with none before it" if single else "no text"
        raise PolyvisionError(f"--data {place}: there is {what} in it")
    return opened


def _shards(place: str, tokenizer: Tokenizer) -> Tokens:
    corpus = Corpus(place, "--data")
    if corpus.tokenizer.fingerprint != tokenizer.fingerprint:
        raise PolyvisionError(
            f"--data {place} was prepared with another tokenizer ({corpus.tokenizer.vocab_size:,} "
            f"tokens, {corpus.tokenizer.fingerprint[:12]}) than the model's "
            f"({tokenizer.vocab_size:,} tokens, {tokenizer.fingerprint[:12]}): give the text itself"
        )
    name = "val" if "val" in corpus.parts else "train"
    part = corpus.parts[name]
    ahead = _ahead(tokenizer)
    starts = np.cumsum([0, *(shard.header.tokens for shard in part.shards)])

    def read(start: int, count: int) -> np.ndarray:
        row = ahead[start : start + count]
        start, count = max(0, start - len(ahead)), count - len(row)
        return np.concatenate([row, *_across(part, starts, start, count)])

    title = name if name == "val" else "train: it has no validation split"
    return Tokens(f"{place} ({title})", len(ahead) + part.tokens, read)


def _across(part: Part, starts: np.ndarray, start: int, count: int) -> list[np.ndarray]:
    """Read tokens that may lie in several shards."""
    rows: list[np.ndarray] = []
    shard = int(np.searchsorted(starts, start, "right")) - 1
    while count:
        inside = start - int(starts[shard])
        taken = min(count, int(starts[shard + 1]) - start)
        rows.append(part.read(shard, inside, taken))
        start, count, shard = start + taken, count - taken, shard + 1
    return rows


def _text(place: str, tokenizer: Tokenizer, text_key: str) -> Tokens:
    dtype = token_dtype(tokenizer.vocab_size)
    ahead = _ahead(tokenizer).astype(dtype)
    rows = [ahead]
    for source in find_sources([place]):
        for piece in read_pieces(source, text_key=text_key, separator=None):
            rows.append(tokenizer.encode(piece.text).astype(dtype))
            if piece.ends:
                rows.append(ahead)
    tokens = np.concatenate(rows)
    return Tokens(place, len(tokens), lambda start, count: tokens[start : start + count])


def _ahead(tokenizer: Tokenizer) -> np.ndarray:
    return np.array([] if tokenizer.end is None else [tokenizer.end], dtype=np.int64)
