"""The shard format, byte by byte, and every way in which a shard can be wrong."""

from __future__ import annotations

import hashlib
import re
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from polyvision.data.text.prepare.part_writer import PartWriter
from polyvision.data.text.shards import open_shard, token_dtype, verify_shard
from polyvision.errors import PolyvisionError

TOKENIZER = "ab" * 32
DOCUMENTS = [[1, 299, 3], [7], [5, 6, 8, 9]]


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    writer = PartWriter(tmp_path, "train", vocab_size=300, tokenizer=TOKENIZER, shard_tokens=100)
    for tokens in DOCUMENTS:
        writer.add(np.array(tokens), 2 * len(tokens))
        writer.end_document()
    writer.finish()
    return tmp_path / "train-00000.bin"


def change(path: Path, at: int, new: bytes, *, sign: bool = False) -> None:
    content = bytearray(path.read_bytes())
    content[at : at + len(new)] = new
    if sign:  # a header that is wrong but whole
        content[124:128] = struct.pack("<I", zlib.crc32(content[:124]))
    path.write_bytes(content)


def test_every_byte_is_where_the_format_says(shard: Path) -> None:
    content = shard.read_bytes()
    body = struct.pack("<8H", 1, 299, 3, 7, 5, 6, 8, 9) + struct.pack("<4Q", 0, 3, 4, 8)
    head = struct.pack("<8sIIQQQQQ", b"PVTOKENS", 1, 2, 300, 8, 3, 16, 299)
    head += bytes.fromhex(TOKENIZER) + hashlib.sha256(body).digest() + bytes(4)
    assert content == head + struct.pack("<I", zlib.crc32(head)) + body
    assert [p.name for p in shard.parent.iterdir()] == [shard.name]


@pytest.mark.parametrize("vocab", [200, 300, 70_000])
@pytest.mark.parametrize("count", [1, 3, 8, 9])
def test_round_trip_of_every_width_and_padding(vocab: int, count: int, tmp_path: Path) -> None:
    writer = PartWriter(tmp_path, "val", vocab_size=vocab, tokenizer=TOKENIZER, shard_tokens=100)
    writer.add(np.array([vocab - 1] * count), 5)
    writer.end_document()
    assert writer.finish()["tokens"] == count
    found = verify_shard(tmp_path / "val-00000.bin")
    assert found.map_tokens().tolist() == [vocab - 1] * count
    assert found.map_tokens().dtype == token_dtype(vocab)
    assert found.offsets().tolist() == [0, count]
    assert found.header.text_bytes == 5
    assert found.header.largest == vocab - 1


def test_a_shard_ends_with_the_document_that_fills_it(tmp_path: Path) -> None:
    writer = PartWriter(tmp_path, "train", vocab_size=9, tokenizer=TOKENIZER, shard_tokens=4)
    for length in (3, 2, 4, 1):
        writer.add(np.arange(length), length)
        writer.end_document()
    counts = writer.finish()
    assert [s["tokens"] for s in counts["shards"]] == [5, 4, 1]
    assert [s["documents"] for s in counts["shards"]] == [2, 1, 1]
    for entry in counts["shards"]:
        assert verify_shard(tmp_path / entry["file"]).header.checksum == entry["sha256"]


@pytest.mark.parametrize("wrong", [300, -1, 70_000])
def test_the_writer_refuses_ids_outside_the_vocabulary(wrong: int, tmp_path: Path) -> None:
    writer = PartWriter(tmp_path, "train", vocab_size=300, tokenizer=TOKENIZER, shard_tokens=9)
    with pytest.raises(PolyvisionError, match="outside the vocabulary of 300 tokens"):
        writer.add(np.array([0, wrong]), 2)


def test_a_vocabulary_that_no_dtype_holds() -> None:
    with pytest.raises(PolyvisionError, match="does not fit 4 bytes per token"):
        token_dtype(2**32 + 1)


NUMBERS = {"itemsize": 12, "vocab_size": 16, "tokens": 24, "documents": 32, "largest": 48}


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("itemsize", 1, "has grown: 176 bytes instead of 168"),
        ("itemsize", 3, "is cut off|does not fit"),
        ("vocab_size", 70_000, "a vocabulary of 70,000 tokens does not fit 2 bytes per token"),
        ("largest", 300, "token id 300 is outside the vocabulary of 300 tokens"),
        ("documents", 0, "has grown"),
        ("tokens", 2**60, "is cut off"),
    ],
)
def test_a_header_that_is_inconsistent(field: str, value: int, text: str, shard: Path) -> None:
    change(shard, NUMBERS[field], struct.pack("<I", value & 0xFFFFFFFF), sign=True)
    if value > 2**32:
        change(shard, NUMBERS[field], struct.pack("<Q", value), sign=True)
    with pytest.raises(PolyvisionError, match=text) as error:
        open_shard(shard)
    assert str(shard) in str(error.value)


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda c: c[:-1], "is cut off: 175 bytes instead of 176"),
        (lambda c: c + b"x", "has grown: 177 bytes instead of 176"),
        (lambda c: c[:60], "is cut off: 60 bytes, the header alone has 128"),
        (lambda c: b"", "is not a token shard"),
        (lambda c: b"\x93NUMPY" + c[6:], r"is not a token shard: it begins with b'\x93NUMPYN"),
        (lambda c: c[:8] + b"\x02" + c[9:], "has format version 2, this polyvision reads 1"),
        (lambda c: c[:60] + b"?" + c[61:], "the header is damaged"),
    ],
)
def test_files_that_are_no_whole_shard(damage, text: str, shard: Path) -> None:
    shard.write_bytes(damage(shard.read_bytes()))
    with pytest.raises(PolyvisionError, match=re.escape(text)):
        open_shard(shard)


@pytest.mark.parametrize("at", [128, 143, 144, 175])
def test_verification_finds_any_changed_byte(at: int, shard: Path) -> None:
    verify_shard(shard)
    change(shard, at, bytes([shard.read_bytes()[at] ^ 1]))
    open_shard(shard)  # the header and the size are right
    with pytest.raises(PolyvisionError, match="was altered: its content has another checksum"):
        verify_shard(shard)


@pytest.mark.parametrize("offsets", [(0, 3, 3, 8), (1, 3, 4, 8), (0, 4, 3, 8), (0, 3, 4, 7)])
def test_offsets_that_do_not_cover_the_tokens(offsets: tuple[int, ...], shard: Path) -> None:
    change(shard, 144, struct.pack("<4Q", *offsets))
    with pytest.raises(PolyvisionError, match="do not cover its 8 tokens in order"):
        open_shard(shard).offsets()


def test_a_largest_id_that_the_header_hides(shard: Path) -> None:
    change(shard, 48, struct.pack("<Q", 7), sign=True)
    with pytest.raises(PolyvisionError, match="the largest token id is 299, its header says 7"):
        verify_shard(shard)


def test_a_missing_shard(tmp_path: Path) -> None:
    with pytest.raises(PolyvisionError, match="is missing; prepare the text again"):
        open_shard(tmp_path / "train-00000.bin")
    with pytest.raises(PolyvisionError, match="cannot be read"):
        open_shard(tmp_path)
