"""A single document is divided by position; what cannot be divided is said before any work."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sample_texts import content

from polyvision.cli import main
from polyvision.data.text import sources, split
from polyvision.data.text.corpus import Corpus, Part
from polyvision.data.text.file import load_text_data
from polyvision.data.text.prepare import prepare as module
from polyvision.errors import PolyvisionError

Prepare = Callable[..., Corpus]
STORY = "".join(f"Line {i} \u2014 of the tale\nand its end.\n\n" for i in range(200))


@pytest.fixture
def story(tmp_path: Path) -> Path:
    file = tmp_path / "story.txt"
    file.write_text(STORY, encoding="utf-8")
    return file


def text(corpus: Corpus, name: str) -> str:
    part: Part = corpus.parts[name]
    return "".join(corpus.tokenizer.decode(shard.map_tokens()) for shard in part.shards)


@pytest.mark.parametrize("fraction", [0.05, 0.3])
def test_one_file_is_divided_where_data_text_divides_it(
    fraction: float, story: Path, prepared: Prepare, tmp_path: Path
) -> None:
    corpus = prepared(story, val_fraction=fraction)
    train, val = text(corpus, "train"), text(corpus, "val")
    data = load_text_data(
        "text", path=story, context=8, tokenizer="bytes", val_fraction=fraction, cache=tmp_path
    )
    assert train == data.tokenizer.decode(data.train.tokens)
    assert val == data.tokenizer.decode(data.val.tokens)
    assert train + val == STORY
    assert train.endswith("end.\n\n")
    assert len(val) == pytest.approx(fraction * len(STORY), abs=40)
    assert corpus.index["split"] == {"character": len(train), "border": "paragraph"}


def test_the_summary_says_so(story: Path, tmp_path: Path, capsys: Any) -> None:
    command = ["prepare-text", str(story), "--tokenizer", "bpe:300", "--out", f"{tmp_path}/out"]
    assert main(command) == 0
    shown = capsys.readouterr()
    cut = Corpus(f"{tmp_path}/out", "--out").index["split"]["character"]
    assert (
        f"  split      the only document is divided at character {cut:,}, after a paragraph"
        in shown.out
    )
    assert "  end token  <|endoftext|> (id 0) after each document" in shown.out
    assert shown.err == "learning a vocabulary of 300 tokens from the training split\n"


@pytest.mark.parametrize(
    ("content", "border", "end"),
    [
        ("a line of it\n" * 99, "line", "of it\n"),
        ("word " * 300, "word", "word "),
        ("x" * 999, "character", "x"),
    ],
)
def test_without_paragraphs_a_line_then_a_word_ends_the_first_part(
    content: str, border: str, end: str, tmp_path: Path, prepared: Prepare
) -> None:
    (tmp_path / "a.txt").write_text(content)
    corpus = prepared(tmp_path / "a.txt")
    assert corpus.index["split"]["border"] == border
    assert text(corpus, "train").endswith(end)
    assert text(corpus, "train") + text(corpus, "val") == content


def test_pieces_files_and_processes_change_nothing(
    story: Path, prepared: Prepare, tmp_path: Path, monkeypatch: Any
) -> None:
    settings: dict[str, Any] = {"tokenizer": "bpe:300", "shard_tokens": 400}
    prepared(story, out="one", **settings)
    monkeypatch.setattr(sources, "_PIECE", 64)
    monkeypatch.setattr(sources, "_LONGEST", 128)
    monkeypatch.setattr(sources, "_CHUNK", 50)
    prepared(story, out="two", **settings)
    (tmp_path / "blank.txt").write_text("\n \n")
    line = json.dumps({"text": STORY}) + "\n" + json.dumps({"text": None})
    (tmp_path / "story.jsonl.gz").write_bytes(gzip.compress(line.encode()))
    prepared(tmp_path / "blank.txt", tmp_path / "story.jsonl.gz", out="three", **settings)
    one = Corpus(tmp_path / "one", "one")
    for name in ("two", "three"):
        other = Corpus(tmp_path / name, name)
        assert other.index["split"] == one.index["split"]
        for part in ("train", "val"):
            assert text(other, part).replace("<|endoftext|>", "") == text(one, part)
    prepared(story, out="four", workers=2, **settings)
    assert content(tmp_path / "four") == content(tmp_path / "two")


def test_the_vocabulary_is_learned_from_the_first_part_only(
    tmp_path: Path, prepared: Prepare
) -> None:
    file = tmp_path / "a.txt"
    file.write_text("alpha beta gamma. " * 60 + "\n\n" + "zyzzyva quux. " * 20)
    vocabulary = prepared(file, tokenizer="bpe:300", val_fraction=0.2).tokenizer.vocabulary
    assert b" beta" in vocabulary
    assert not any(b"zy" in token or b"qu" in token for token in vocabulary)


class Kill(BaseException):
    """What no handler catches."""


@pytest.mark.parametrize("after", [1, 40, 160])
def test_a_killed_run_goes_on(
    after: int, story: Path, prepared: Prepare, tmp_path: Path, monkeypatch: Any
) -> None:
    for name, value in (("_PIECE", 32), ("_LONGEST", 64)):
        monkeypatch.setattr(sources, name, value)
    monkeypatch.setattr(module, "_NOTE_SECONDS", 0.0)
    prepared(story, out="whole", shard_tokens=500)
    calls = 0

    def kill(_: int) -> None:
        nonlocal calls
        calls += 1
        if calls > after:
            raise Kill

    with pytest.raises(Kill):
        prepared(story, shard_tokens=500, on_progress=kill)
    prepared(story, shard_tokens=500)
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_the_border_is_found_in_a_window_of_a_long_text(
    story: Path, prepared: Prepare, monkeypatch: Any
) -> None:
    expected = prepared(story, out="whole").index["split"]
    monkeypatch.setattr(split, "_REACH", 50)
    assert prepared(story).index["split"] == expected


def chapters(number: int) -> str:
    return f"Chapter of book {number}, a line.\n\n" * 40


def test_of_two_documents_the_last_part_of_the_text_validates(
    tmp_path: Path, capsys: Any, prepared: Prepare
) -> None:
    files = [tmp_path / f"{number}.txt" for number in range(2)]
    for number, file in enumerate(files):
        file.write_text(chapters(number))
    command = ["prepare-text", *map(str, files), "--tokenizer", "bytes", "--val-fraction", "0.1"]
    command += ["--seed", "1"]
    assert main([*command, "--out", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    corpus = Corpus(tmp_path / "out", "--out")
    train, val = text(corpus, "train"), text(corpus, "val")
    assert train + val == chapters(0) + chapters(1)
    assert len(val) == pytest.approx(0.1 * len(train + val), abs=len(chapters(0)) / 40)
    assert [part.documents for part in corpus.parts.values()] == [2, 1]
    cut = len(chapters(1)) - len(val)
    where = {"character": cut, "border": "paragraph", "file": str(files[1])}
    assert corpus.index["split"] == where
    assert f"  split      {files[1]} is divided at character {cut:,}, after a paragraph" in shown
    assert f"  train      2 documents, {len(train):,} tokens, {len(train):,} bytes" in shown
    assert (
        f"  val        1 document, {len(val)} tokens, {len(val)} bytes (1.00 a token), 1 shard\n"
        in shown
    )
    learned = prepared(*files, out="bpe", tokenizer="bpe:300", val_fraction=0.1, seed=1)
    assert text(learned, "train").replace("<|endoftext|>", "") == train


def test_a_cut_between_two_documents_divides_neither(tmp_path: Path, prepared: Prepare) -> None:
    files = [tmp_path / f"{number}.txt" for number in range(2)]
    for file in files:  # copies, of which a hash would send both to one part
        file.write_text(chapters(0))
    corpus = prepared(*files, val_fraction=0.5)
    assert text(corpus, "train") == text(corpus, "val") == chapters(0)
    assert [part.documents for part in corpus.parts.values()] == [1, 1]
    assert corpus.index["split"] == {"character": 0, "border": "document", "file": str(files[1])}


def test_a_cut_in_a_file_of_many_documents(tmp_path: Path, prepared: Prepare) -> None:
    lines = [json.dumps({"text": "same words " * 30}) for _ in range(8)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    corpus = prepared(tmp_path / "a.jsonl", val_fraction=0.3)
    assert text(corpus, "train") + text(corpus, "val") == "same words " * 240
    assert len(text(corpus, "val")) == pytest.approx(0.3 * 240 * 11, abs=11)
    assert [part.documents for part in corpus.parts.values()] == [6, 3]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["x"], "the only document has 1 character, too few to hold out 0.05 of them"),
        (["x", "y"], "the 2 documents have 2 characters, too few to hold out 0.05 of them"),
        ([" \n", "\n"], "no text in 2 files: nothing but white space"),
        (["one", "PK\x03\x04zip"], "1.txt is a zip archive, not text"),
    ],
)
def test_what_can_be_known_is_said_before_any_work(
    files: list[str], message: str, tmp_path: Path, prepared: Prepare, monkeypatch: Any
) -> None:
    def work(*_: Any) -> None:
        raise AssertionError("work was begun")

    monkeypatch.setattr(module, "_learn_from", work)
    monkeypatch.setattr(module, "_encode_all", work)
    paths = [tmp_path / f"{number}.txt" for number in range(len(files))]
    for path, written in zip(paths, files, strict=True):
        path.write_text(written)
    with pytest.raises(PolyvisionError, match=re.escape(message)):
        prepared(*paths, tokenizer="bpe:300", val_fraction=0.05)
    assert not (tmp_path / "out").exists()
