"""Token shards: files of token ids with a header, written once and memory-mapped.

All numbers are little-endian. A shard holds whole documents, one after the other:

    0      8   magic ``PVTOKENS``
    8      4   version, 1
    12     4   bytes per token: 1, 2 or 4 (unsigned)
    16     8   vocabulary size
    24     8   number of tokens
    32     8   number of documents
    40     8   bytes of UTF-8 text that the tokens stand for
    48     8   largest token id
    56    32   SHA-256 of the tokenizer
    88    32   SHA-256 of everything after the header
    120    4   zero
    124    4   CRC-32 of the 124 bytes before
    128        the tokens, then zeros up to a multiple of 8 bytes
    ...        where each document begins, as a token number, and the number of tokens: 8 bytes each

Opening a shard reads the header alone and compares the file's size with it, which takes the same
time for any size and finds what was cut off, grew or is something else. ``verify_shard`` reads all.
"""

from __future__ import annotations

import dataclasses
import hashlib
import struct
import zlib
from pathlib import Path

import numpy as np

from polyvision.errors import PolyvisionError, looked_for

__all__ = ["HEADER_BYTES", "Shard", "ShardHeader", "open_shard", "token_dtype", "verify_shard"]

HEADER_BYTES = 128
_MAGIC = b"PVTOKENS"
_VERSION = 1
_FIELDS = struct.Struct("<8sIIQQQQQ32s32s4x")
_CRC = struct.Struct("<I")
_CHUNK = 1 << 24


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """Return the smallest unsigned dtype, of 1, 2 or 4 bytes, that holds the vocabulary.

    Raises:
        PolyvisionError: 4 bytes are too few.

    Example:
        >>> token_dtype(65536), token_dtype(65537)
        (dtype('uint16'), dtype('uint32'))
    """
    for size in (1, 2, 4):
        if vocab_size <= 1 << 8 * size:
            return np.dtype(f"<u{size}")
    raise PolyvisionError(f"a vocabulary of {vocab_size:,} tokens does not fit 4 bytes per token")


@dataclasses.dataclass(frozen=True)
class ShardHeader:
    """What the first 128 bytes of a shard say.

    Attributes:
        itemsize: bytes per token.
        vocab_size: size of the tokenizer's vocabulary.
        tokens: number of tokens.
        documents: number of documents.
        text_bytes: UTF-8 bytes of the text.
        largest: largest token id.
        tokenizer: fingerprint of the tokenizer, in hexadecimal.
        checksum: SHA-256 of what follows the header, in hexadecimal.
    """

    itemsize: int
    vocab_size: int
    tokens: int
    documents: int
    text_bytes: int
    largest: int
    tokenizer: str
    checksum: str

    @property
    def offsets_at(self) -> int:
        """Where in the file the document offsets begin."""
        return HEADER_BYTES + -(-self.tokens * self.itemsize // 8) * 8

    @property
    def file_bytes(self) -> int:
        """The size of the whole file."""
        return self.offsets_at + 8 * (self.documents + 1)

    def pack(self) -> bytes:
        """Return the header's 128 bytes."""
        numbers = dataclasses.astuple(self)[:6]
        hashes = bytes.fromhex(self.tokenizer), bytes.fromhex(self.checksum)
        start = _FIELDS.pack(_MAGIC, _VERSION, *numbers, *hashes)
        return start + _CRC.pack(zlib.crc32(start))

    @classmethod
    def unpack(cls, content: bytes, path: Path) -> ShardHeader:
        """Read a header.

        Raises:
            PolyvisionError: not a header, one of another version, or a damaged one.
        """
        if content[: len(_MAGIC)] != _MAGIC:
            raise PolyvisionError(
                f"{path} is not a token shard: it begins with {content[:8]!r} instead of "
                f"{_MAGIC!r}; polyvision prepare-text writes shards"
            )
        if len(content) < HEADER_BYTES:
            raise PolyvisionError(
                f"{path} is cut off: {len(content)} bytes, the header alone has {HEADER_BYTES}"
            )
        start, crc = content[: _FIELDS.size], content[_FIELDS.size : HEADER_BYTES]
        _, version, *values, tokenizer, checksum = _FIELDS.unpack(start)
        if version != _VERSION:
            raise PolyvisionError(
                f"{path} has format version {version}, this polyvision reads {_VERSION}: "
                "prepare the text again"
            )
        if zlib.crc32(start) != _CRC.unpack(crc)[0]:
            raise PolyvisionError(f"{path}: the header is damaged; prepare the text again")
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**dict(zip(names, [*values, tokenizer.hex(), checksum.hex()], strict=True)))


@dataclasses.dataclass(frozen=True)
class Shard:
    """A shard file whose header was checked; nothing else of it was read."""

    path: Path
    header: ShardHeader

    def map_tokens(self) -> np.memmap[tuple[int], np.dtype[np.unsignedinteger]]:
        """Map the token ids, (tokens,), without reading them."""
        return np.memmap(
            self.path,
            dtype=f"<u{self.header.itemsize}",
            mode="r",
            offset=HEADER_BYTES,
            shape=(self.header.tokens,),
        )

    def offsets(self) -> np.ndarray:
        """Read where the documents begin and the last one ends: int64, (documents + 1,).

        Raises:
            PolyvisionError: the offsets do not cover the tokens in order.
        """
        head = self.header
        found = np.fromfile(self.path, "<u8", head.documents + 1, offset=head.offsets_at)
        offsets = found.astype(np.int64)
        if (
            len(offsets) != head.documents + 1
            or offsets[0] != 0
            or offsets[-1] != head.tokens
            or (np.diff(offsets) <= 0).any()
        ):
            raise PolyvisionError(
                f"{self.path} was altered: its document offsets do not cover its "
                f"{head.tokens:,} tokens in order; prepare the text again"
            )
        return offsets


def open_shard(path: Path) -> Shard:
    """Check a shard's header and size.

    Raises:
        PolyvisionError: the file is missing, unreadable, cut off, too long, damaged in its header,
            has ids outside its vocabulary, or a vocabulary that its dtype cannot hold.
    """
    try:
        with path.open("rb") as file:
            content = file.read(HEADER_BYTES)
            size = file.seek(0, 2)
    except FileNotFoundError:
        raise PolyvisionError(
            f"{path} is missing{looked_for(path)}; prepare the text again"
        ) from None
    except OSError as error:
        raise PolyvisionError(f"{path} cannot be read: {error.strerror}") from None
    header = ShardHeader.unpack(content, path)
    if size != header.file_bytes:
        what = "is cut off" if size < header.file_bytes else "has grown"
        raise PolyvisionError(
            f"{path} {what}: {size:,} bytes instead of {header.file_bytes:,}; "
            "copy it again, or prepare the text again"
        )
    if header.itemsize not in (1, 2, 4) or header.vocab_size > 1 << 8 * header.itemsize:
        raise PolyvisionError(
            f"{path}: a vocabulary of {header.vocab_size:,} tokens does not fit "
            f"{header.itemsize} bytes per token; prepare the text again"
        )
    if header.largest >= header.vocab_size:
        raise PolyvisionError(
            f"{path}: token id {header.largest} is outside the vocabulary of "
            f"{header.vocab_size:,} tokens; prepare the text again"
        )
    if not 0 < header.documents <= header.tokens:
        raise PolyvisionError(
            f"{path}: {header.documents:,} documents cannot share {header.tokens:,} tokens; "
            "prepare the text again"
        )
    return Shard(path, header)


def verify_shard(path: Path) -> Shard:
    """Read a whole shard: checksum, every token id, every document offset.

    Raises:
        PolyvisionError: anything is not as it was written.
    """
    shard = open_shard(path)
    checksum = hashlib.sha256()
    with path.open("rb") as file:
        file.seek(HEADER_BYTES)
        while chunk := file.read(_CHUNK):
            checksum.update(chunk)
    if checksum.hexdigest() != shard.header.checksum:
        raise PolyvisionError(
            f"{path} was altered: its content has another checksum than its header says; "
            "copy it again, or prepare the text again"
        )
    shard.offsets()
    tokens = shard.map_tokens()
    largest = max(int(tokens[i : i + _CHUNK].max()) for i in range(0, len(tokens), _CHUNK))
    if largest != shard.header.largest:
        raise PolyvisionError(
            f"{path}: the largest token id is {largest}, its header says {shard.header.largest}; "
            "prepare the text again"
        )
    return shard
