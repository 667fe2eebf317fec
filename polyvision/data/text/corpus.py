"""A prepared corpus: a folder with token shards, their tokenizer and an index."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from polyvision.data.text.shards import Shard, open_shard, verify_shard
from polyvision.data.text.tokenizers import Tokenizer, tokenizer_from_json
from polyvision.errors import PolyvisionError, did_you_mean, looked_for

__all__ = ["INDEX", "INDEX_VERSION", "PROGRESS", "TOKENIZER", "Corpus", "Part", "verify_corpus"]

INDEX = "index.json"
PROGRESS = "progress.json"
TOKENIZER = "tokenizer.json"
INDEX_VERSION = 1

# Mapped pages count as memory of the process until they are unmapped, so maps are dropped after
# this many bytes. A read maps up to 64 KiB around each end beside what it asks for.
_MAPPED_BYTES = 16 << 20
_AROUND = 128 << 10
_MAPS = 64  # each holds a file descriptor


class Part:
    """The tokens of one part of a corpus, ``train`` or ``val``, read where they are asked for.

    Args:
        shards: in order; all of one tokenizer.
        vocab_size: size of its vocabulary.
    """

    def __init__(self, shards: Sequence[Shard], vocab_size: int) -> None:
        self.shards = list(shards)
        self.vocab_size = vocab_size
        self._maps: OrderedDict[int, np.ndarray] = OrderedDict()
        self._mapped = 0

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return sum(shard.header.tokens for shard in self.shards)

    @property
    def documents(self) -> int:
        """Number of documents."""
        return sum(shard.header.documents for shard in self.shards)

    @property
    def text_bytes(self) -> int:
        """UTF-8 bytes of the text."""
        return sum(shard.header.text_bytes for shard in self.shards)

    def read(self, shard: int, start: int, count: int) -> np.ndarray:
        """Return ``count`` tokens of a shard from ``start`` on: int64, (count,).

        Raises:
            PolyvisionError: one of them is not in the vocabulary.
        """
        window = self._map(shard, count)[start : start + count].astype(np.int64)
        assert len(window) == count, (shard, start, count)
        if count and window.max() >= self.vocab_size:
            raise PolyvisionError(
                f"{self.shards[shard].path} was altered: token id {window.max()} at tokens {start} "
                f"to {start + count} is outside the vocabulary of {self.vocab_size:,} tokens; "
                "polyvision verify-text checks all shards"
            )
        return window

    def _map(self, shard: int, count: int) -> np.ndarray:
        self._mapped += count * self.shards[shard].header.itemsize + _AROUND
        if self._mapped > _MAPPED_BYTES:
            self._maps.clear()
            self._mapped = 0
        if shard in self._maps:
            self._maps.move_to_end(shard)
        else:
            if len(self._maps) == _MAPS:
                self._maps.popitem(last=False)
            self._maps[shard] = self.shards[shard].map_tokens()
        return self._maps[shard]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_maps": OrderedDict(), "_mapped": 0}


class Corpus:
    """A folder that ``polyvision prepare-text`` wrote.

    Opening it reads the index and each shard's header: what is missing, cut off, of another
    tokenizer or inconsistent is found, in a time that depends on the number of shards only.

    Args:
        folder: the folder.
        place: what it is called in errors, such as ``data.path``.

    Raises:
        PolyvisionError: the folder is not a prepared corpus, or not whole.
    """

    def __init__(self, folder: str | Path, place: str) -> None:
        self.folder = Path(folder).expanduser()
        self.index = _read_index(self.folder, f"{place}={str(folder)!r}")
        described = self.index["tokenizer"]
        self.tokenizer = _read_tokenizer(self.folder, described["sha256"])
        self.parts = {name: self._part(name) for name in self.index["parts"]}

    def _part(self, name: str) -> Part:
        shards = []
        for entry in self.index["parts"][name]["shards"]:
            shard = open_shard(self.folder / entry["file"])
            head = shard.header
            if head.tokenizer != self.tokenizer.fingerprint:
                raise PolyvisionError(
                    f"{shard.path} was made with another tokenizer ({head.tokenizer[:12]}) than "
                    f"{self.folder / TOKENIZER} ({self.tokenizer.fingerprint[:12]}): "
                    "prepare the text again"
                )
            for key, found in (
                ("tokens", head.tokens),
                ("documents", head.documents),
                ("sha256", head.checksum),
            ):
                if entry[key] != found:
                    raise PolyvisionError(
                        f"{shard.path} is not the shard that {self.folder / INDEX} names: {key} is "
                        f"{found} instead of {entry[key]}; prepare the text again"
                    )
            shards.append(shard)
        return Part(shards, self.tokenizer.vocab_size)


def _read_index(folder: Path, place: str) -> dict[str, Any]:
    if not folder.is_dir():
        what = "is a file" if folder.is_file() else "does not exist"
        near = [str(p) for p in folder.parent.glob("*") if p.is_dir()]
        raise PolyvisionError(
            f"{place} {what}{looked_for(folder)}; name a folder that polyvision prepare-text wrote."
            f"{did_you_mean(str(folder), near)}"
        )
    path = folder / INDEX
    if not path.is_file():
        if (folder / PROGRESS).is_file():
            raise PolyvisionError(
                f"{place} is not complete: run the same polyvision prepare-text command again, it "
                "goes on where it stopped"
            )
        raise PolyvisionError(
            f"{place} has no {INDEX}, so it is not a prepared corpus: write one with polyvision "
            f"prepare-text <files> --out {folder}"
        )
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        version = index["version"]
        if version != INDEX_VERSION:
            raise PolyvisionError(
                f"{path} has format version {version}, this polyvision reads {INDEX_VERSION}: "
                "prepare the text again"
            )
        for part in index["parts"].values():
            for shard in part["shards"]:
                _ = shard["file"], shard["tokens"], shard["documents"], shard["sha256"]
        _ = index["tokenizer"]["sha256"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, PolyvisionError):
            raise
        raise PolyvisionError(f"{path} is damaged ({error!r}): prepare the text again") from None
    return dict(index)


def _read_tokenizer(folder: Path, expected: str) -> Tokenizer:
    path = folder / TOKENIZER
    try:
        tokenizer = tokenizer_from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PolyvisionError(f"{path} cannot be read: {error}") from None
    if tokenizer.fingerprint != expected:
        raise PolyvisionError(
            f"{path} is another tokenizer ({tokenizer.fingerprint[:12]}) than the one the text was "
            f"prepared with ({expected[:12]}): prepare the text again"
        )
    return tokenizer


def verify_corpus(folder: str | Path) -> Corpus:
    """Read every byte of a corpus and compare it with its checksums.

    Raises:
        PolyvisionError: anything is not as it was written; the text names the file.
    """
    corpus = Corpus(folder, "folder")
    for part in corpus.parts.values():
        for shard in part.shards:
            verify_shard(shard.path)
    return corpus
