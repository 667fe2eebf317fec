"""Writing the shards of one part of a corpus, so that a killed process can go on exactly."""

from __future__ import annotations

import hashlib
import os
import re
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from polyvision.data.text.shards import HEADER_BYTES, ShardHeader, open_shard, token_dtype
from polyvision.errors import PolyvisionError

__all__ = ["PartWriter"]


class PartWriter:
    """Appends documents to a shard until it has ``shard_tokens``, then begins the next one.

    A shard that is not complete lies in two files, ``<name>.bin.partial`` (room for the header,
    then tokens) and ``<name>.ends.partial`` (where its documents end). ``state`` says how much of
    them counts; a writer made from that state cuts off what was written later. A complete shard
    gets its header and, last, its name.

    Args:
        folder: where the shards go.
        part: ``train`` or ``val``, the first word of the file names.
        vocab_size: size of the vocabulary.
        tokenizer: fingerprint of the tokenizer.
        shard_tokens: a shard ends with the document that reaches this many tokens.
        state: what ``state`` returned; None to begin.

    Raises:
        PolyvisionError: files lack what ``state`` counted.
    """

    def __init__(
        self,
        folder: Path,
        part: str,
        *,
        vocab_size: int,
        tokenizer: str,
        shard_tokens: int,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder = folder
        self.part = part
        self.vocab_size = vocab_size
        self.tokenizer = tokenizer
        self.shard_tokens = shard_tokens
        self.dtype = token_dtype(vocab_size)
        state = state or {}
        self.shards: list[dict[str, Any]] = list(state.get("shards", []))
        self._tokens = int(state.get("tokens", 0))
        self._documents = int(state.get("documents", 0))
        self._text_bytes = int(state.get("text_bytes", 0))
        self._largest = int(state.get("largest", 0))
        self._ends = array("Q")  # since the ends were last written
        self._delete_later(everything=not state)
        if self._name.exists():  # completed after the state was taken
            ends = open_shard(self._name).offsets()[1 : self._documents + 1]
            self._ends_file.write_bytes(ends.astype("<u8").tobytes())
            self._name.rename(self._partial)
        self._partial.touch()
        self._ends_file.touch()
        tokens_end = HEADER_BYTES + self._tokens * self.dtype.itemsize
        for path, size in ((self._ends_file, 8 * self._documents), (self._partial, tokens_end)):
            if state and path.stat().st_size < size:
                raise PolyvisionError(
                    f"{path} is not whole: less than {size:,} bytes are there, so the preparation "
                    "cannot go on; --overwrite starts it again"
                )
            _cut(path, size)
        self._file = self._partial.open("ab")

    @property
    def _name(self) -> Path:
        return self.folder / f"{self.part}-{len(self.shards):05}.bin"

    @property
    def _partial(self) -> Path:
        return self._name.with_suffix(".bin.partial")

    @property
    def _ends_file(self) -> Path:
        return self._name.with_suffix(".ends.partial")

    def _delete_later(self, *, everything: bool) -> None:
        """Delete the files of shards that were begun after the state was taken."""
        for path in self.folder.glob(f"{self.part}-*"):
            number = re.fullmatch(rf"{self.part}-(\d+)\..*", path.name)
            if number and (everything or int(number[1]) > len(self.shards)):
                path.unlink()

    def add(self, tokens: np.ndarray, text_bytes: int) -> None:
        """Append tokens (n,) of the current document, which stand for ``text_bytes``."""
        if not len(tokens):
            return
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self.vocab_size:
            raise PolyvisionError(
                f"token ids reach from {low} to {high}, outside the vocabulary of "
                f"{self.vocab_size:,} tokens"
            )
        self._file.write(tokens.astype(self.dtype).tobytes())
        self._tokens += len(tokens)
        self._text_bytes += text_bytes
        self._largest = max(self._largest, high)

    def end_document(self) -> None:
        """Note that a document ends here, and complete the shard when it is full."""
        self._ends.append(self._tokens)
        self._documents += 1
        if self._tokens >= self.shard_tokens:
            self._complete()
            self._ends_file.unlink(missing_ok=True)  # of a process that was killed
            self._file = self._partial.open("wb")
            self._file.write(bytes(HEADER_BYTES))

    def state(self) -> dict[str, Any]:
        """Write everything to the disk, and return what tells how much that is."""
        with self._ends_file.open("ab") as file:
            file.write(_little_endian(self._ends))
            _to_disk(file)
        self._ends = array("Q")
        _to_disk(self._file)
        return self.mark() | {"shards": list(self.shards)}

    def mark(self) -> dict[str, Any]:
        """Return a state without the shards' entries, but their number, and write nothing.

        Those that ``state`` gives later begin with the ones that are left out.
        """
        return {"shards": len(self.shards)} | self._counts()

    def _counts(self) -> dict[str, int]:
        return {
            "tokens": self._tokens,
            "documents": self._documents,
            "text_bytes": self._text_bytes,
            "largest": self._largest,
        }

    def finish(self) -> dict[str, Any]:
        """Complete the last shard; return the counts of the part and of its shards."""
        if self._documents:
            self._complete()
        else:
            self.close()
            self._partial.unlink()
            self._ends_file.unlink(missing_ok=True)
        keys = ("documents", "tokens", "text_bytes")
        return {k: sum(s[k] for s in self.shards) for k in keys} | {"shards": self.shards}

    def close(self) -> None:
        """Close the file; what ``state`` counted stays."""
        self._file.close()

    def _complete(self) -> None:
        padding = -self._tokens * self.dtype.itemsize % 8
        ends = self._ends_file.read_bytes() if self._ends_file.exists() else b""
        self._file.write(bytes(padding) + bytes(8) + ends + _little_endian(self._ends))
        _to_disk(self._file)
        self._file.close()
        counts = self._counts()
        header = ShardHeader(
            itemsize=self.dtype.itemsize,
            vocab_size=self.vocab_size,
            tokenizer=self.tokenizer,
            checksum=_checksum(self._partial),
            **counts,
        )
        with self._partial.open("r+b") as file:
            file.write(header.pack())
            _to_disk(file)
        self._partial.rename(self._name)
        self._ends_file.unlink(missing_ok=True)
        self.shards.append({"file": self._name.name, **counts, "sha256": header.checksum})
        self._tokens = self._documents = self._text_bytes = self._largest = 0
        self._ends = array("Q")


def _cut(path: Path, size: int) -> None:
    """Cut a file off at ``size``, or fill it with zeros up to there (the room for the header)."""
    with path.open("r+b") as file:
        file.truncate(size)


def _to_disk(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _little_endian(numbers: array[int]) -> bytes:
    return np.frombuffer(numbers, "=u8").astype("<u8").tobytes()


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(HEADER_BYTES)
        return hashlib.file_digest(file, "sha256").hexdigest()
