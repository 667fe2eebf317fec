"""Splits, windows and byte counts of text; every error a user can meet."""

from __future__ import annotations

import hashlib
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from polyvision.data.text.file import (
    TokenWindows,
    _split_point,
    load_book,
    load_text_data,
    pack_tokens,
    read_text,
)
from polyvision.errors import PolyvisionError

STORY = "".join(f"Line {i} \u2014 of the tale\nand its end.\n\n" for i in range(60))


@pytest.fixture
def story(tmp_path: Path) -> Path:
    file = tmp_path / "story.txt"
    file.write_bytes(STORY.encode())
    return file


def test_the_book_is_the_one_its_readme_names(root: Path) -> None:
    assets = root / "polyvision" / "data" / "assets"
    text = load_book()
    content = text.encode()
    readme = (assets / "README.md").read_text(encoding="utf-8")
    packed = (assets / "moby-dick.txt.xz").read_bytes()
    for data in (packed, content):
        assert hashlib.sha256(data).hexdigest() in readme
        assert f"{len(data):,} bytes" in readme
    assert text.startswith("CHAPTER 1. Loomings.\n\nCall me Ishmael.")
    assert len(re.findall("^CHAPTER ", text, re.MULTILINE)) == 135
    assert "public domain" in readme


@pytest.mark.parametrize("n", [5, 8, 9, 12, 13, 40])
def test_windows_cover_the_tokens_once_and_shift_by_one(n: int) -> None:
    tokens = np.arange(100, 100 + n, dtype=np.uint16)
    windows = TokenWindows(tokens, 4)
    assert len(windows) == (n - 1) // 4
    items = [windows[i] for i in range(len(windows))]
    inputs = np.concatenate([x.numpy() for x, _ in items])
    targets = np.concatenate([y.numpy() for _, y in items])
    assert inputs.tolist() == list(range(100, 100 + 4 * len(windows)))
    assert targets.tolist() == (inputs + 1).tolist() == windows.targets.tolist()
    assert inputs.dtype == targets.dtype == np.int64
    assert np.shares_memory(windows.targets, tokens)
    assert windows.tokens is tokens
    for outside in (len(windows), -1):
        with pytest.raises(IndexError):
            windows[outside]


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_the_parts_make_up_the_text_and_the_targets_their_bytes(
    story: Path, tokenizer: str, tmp_path: Path
) -> None:
    data = load_text_data(
        "text", path=story, context=16, tokenizer=tokenizer, val_fraction=0.3, cache=tmp_path
    )
    train, val = (data.tokenizer.decode(part.tokens) for part in (data.train, data.val))
    assert train + val == STORY
    assert train.endswith("end.\n\n")
    assert len(val) / len(STORY) == pytest.approx(0.3, abs=0.01)
    targets = np.concatenate([data.val[i][1].numpy() for i in range(len(data.val))])
    covered = b"".join(data.tokenizer.vocabulary[t] for t in targets)
    assert data.val_bytes == len(covered)
    first = len(data.tokenizer.vocabulary[data.val.tokens[0]])
    assert val.encode()[first:].startswith(covered)
    assert data.text_bytes == len(STORY.encode())


def test_bits_per_byte_of_a_uniform_model_over_bytes_are_eight(story: Path, tmp_path: Path) -> None:
    data = load_text_data("text", path=story, context=16, tokenizer="bytes", cache=tmp_path)
    nats = len(data.val) * 16 * math.log(256)
    assert nats / (math.log(2) * data.val_bytes) == pytest.approx(8)


def test_the_tokenizer_does_not_see_the_validation_part(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("alpha beta gamma. " * 60 + "\n\n" + "zyzzyva quux. " * 20, encoding="utf-8")
    data = load_text_data(
        "text", path=file, context=8, tokenizer="bpe:300", val_fraction=0.2, cache=tmp_path
    )
    assert b" beta" in data.tokenizer.vocabulary
    assert not any(b"zy" in token or b"qu" in token for token in data.tokenizer.vocabulary)
    assert "zyzzyva" in data.tokenizer.decode(data.val.tokens)


def test_description(story: Path, tmp_path: Path) -> None:
    data = load_text_data("text", path=story, context=16, tokenizer="bytes", cache=tmp_path)
    lines = data.describe()
    assert lines["data"] == f"{story}, {len(STORY.encode()):,} bytes"
    assert lines["tokenizer"] == "256 tokens, 1.00 bytes per token"
    assert lines["train"] == f"{len(data.train.tokens):,} tokens, {len(data.train)} windows of 16"
    assert lines["val"].endswith(f"{len(data.val) * 16} bytes predicted")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a" * 88 + "\n\n" + "b" * 12, 90),  # the paragraph before the target
        ("a" * 90 + "\n\n" + "b" * 10, 92),
        ("a" * 93 + "\n\n" + "b" * 10, 95),  # the one after it, on both sides of the target
        ("a" * 96 + "\n\n" + "b" * 11, 98),
        ("a b\n\n" + "c" * 40 + "\n" + "d" * 6, 46),  # no paragraph within reach: a line
        ("a\n\n" + "c" * 40 + " " + "d" * 6, 44),  # nor a line: a word
        ("\n" + "a" * 99, 90),  # nor a word: right at the target
    ],
)
def test_split_prefers_paragraphs_then_lines_then_words(text: str, expected: int) -> None:
    assert _split_point(text, 0.9) == expected


@given(text=st.text("ab \n"), fraction=st.floats(0.01, 0.99))
@example(text="", fraction=0.5)
def test_split_stays_near_the_target(text: str, fraction: float) -> None:
    target = round(len(text) * fraction)
    cut = _split_point(text, fraction)
    assert abs(cut - target) <= min(target, len(text) - target) / 2


@pytest.mark.parametrize(
    ("vocab", "dtype"),
    [(256, np.uint8), (257, np.uint16), (65536, np.uint16), (65537, np.uint32)],
)
def test_tokens_take_the_smallest_dtype_that_holds_the_vocabulary(vocab: int, dtype: type) -> None:
    ids = np.array([0, vocab - 1], dtype=np.int64)
    packed = pack_tokens(ids, vocab)
    assert packed.dtype == dtype
    assert packed.tolist() == ids.tolist()
    for wrong in (vocab, -1):
        with pytest.raises(PolyvisionError, match=f"outside the vocabulary of {vocab} tokens"):
            pack_tokens(np.array([0, wrong]), vocab)
    assert pack_tokens(ids[:0], vocab).dtype == dtype


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    for name, mark in (("plain", b""), ("marked", b"\xef\xbb\xbf")):
        (tmp_path / name).write_bytes(mark + STORY.encode())
    texts = [read_text(tmp_path / name) for name in ("plain", "marked")]
    assert texts == [STORY, STORY]
    (tmp_path / "bad").write_bytes(b"\xef\xbb\xbfgood \xff")
    with pytest.raises(PolyvisionError, match="byte 0xff at offset 8"):
        read_text(tmp_path / "bad")


def test_learning_from_a_long_text_is_announced(
    story: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr("polyvision.data.text.file._LONG_TO_LEARN", 100)
    arguments: dict[str, Any] = {"path": story, "context": 4, "cache": tmp_path / "cache"}
    for _ in range(2):  # the second time it is in the cache
        load_text_data("text", tokenizer="bpe:300", **arguments)
    load_text_data("text", tokenizer="bytes", **arguments)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("learning a vocabulary of 300 tokens from 1,934 characters; ")


def test_line_ends_and_a_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\rthree")
    assert read_text("~/a.txt") == "one\r\ntwo\rthree"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "no such file; looked for /"),
        (b"", "is empty"),
        (b"good \xff bad", "is not UTF-8: byte 0xff at offset 5; convert it first"),
        ("\u4e00".encode()[:2], "is not UTF-8: byte 0xe4 at offset 0"),
    ],
)
def test_files_that_cannot_be_used(content: bytes | None, text: str, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(PolyvisionError, match=re.escape(text)) as error:
        load_text_data("text", path=file, context=4)
    assert f"data.path='{file}'" in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"name": "boook"}, "unknown text data 'boook'. Did you mean 'book'? Valid: book, text."),
        ({"name": "book", "path": "x"}, "data=book is built in and takes no data.path"),
        ({"name": "text"}, "data=text needs a UTF-8 text file: data.path=<file>"),
        ({"val_fraction": 0.0}, "data.val_fraction must lie between 0 and 1, got 0.0"),
        ({"val_fraction": 1.0}, "got 1.0"),
        ({"val_fraction": math.nan}, "got nan"),
        ({"context": 0}, "context must be a positive number of tokens, got 0"),
        ({"tokenizer": "bpe:12"}, "tokenizer 'bpe:12'"),
    ],
)
def test_errors_of_arguments(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(PolyvisionError, match=re.escape(text)):
        load_text_data(**({"name": "book", "context": 16} | arguments))


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PolyvisionError, match="is a folder; name one UTF-8 text file"):
        read_text(tmp_path)


@pytest.mark.parametrize(
    ("length", "fraction", "text"),
    [
        (100, 0.1, "the validation split of the text has 10 tokens, one window needs 17"),
        (100, 0.9, "the training split of the text has 10 tokens, one window needs 17"),
        (160, 0.1, "the validation split of the text has 16 tokens"),
        (1, 0.1, "the training split of the text has 1 tokens"),
    ],
)
def test_a_part_shorter_than_a_window(
    length: int, fraction: float, text: str, tmp_path: Path
) -> None:
    file = tmp_path / "text.txt"
    file.write_text("x" * length, encoding="utf-8")
    with pytest.raises(PolyvisionError, match=text):
        load_text_data(
            "text",
            path=file,
            context=16,
            tokenizer="bytes",
            val_fraction=fraction,
            cache=tmp_path,
        )
