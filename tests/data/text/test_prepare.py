"""Preparation gives the same bytes every time: with any number of processes, and after a kill."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sample_texts import content, document

from polyvision.cli import main
from polyvision.data.text.corpus import Corpus, Part, verify_corpus
from polyvision.data.text.split import in_validation
from polyvision.data.text.tokenizers import Tokenizer
from polyvision.errors import PolyvisionError

Prepare = Callable[..., Corpus]
DOCUMENTS = [document(i) for i in range(60)]


def documents(part: Part, tokenizer: Tokenizer) -> list[str]:
    found = []
    for number, shard in enumerate(part.shards):
        offsets = shard.offsets().tolist()
        for start, end in pairwise(offsets):
            ids = part.read(number, start, end - start)
            if tokenizer.end is not None:
                assert ids[-1] == tokenizer.end
                assert tokenizer.end not in ids[:-1]
            found.append(tokenizer.decode(ids))
    return found


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_the_parts_hold_the_documents_in_order(
    tokenizer: str, texts: Path, prepared: Prepare
) -> None:
    corpus = prepared(texts, tokenizer=tokenizer, shard_tokens=300)
    train, val = (documents(corpus.parts[n], corpus.tokenizer) for n in ("train", "val"))
    assert val == [d for d in DOCUMENTS if in_validation(d, 0.2, 0)]
    assert train == [d for d in DOCUMENTS if d not in val]
    assert 4 < len(val) < 20
    for name, texts_of in (("train", train), ("val", val)):
        part, counts = corpus.parts[name], corpus.index["parts"][name]
        assert part.text_bytes == sum(len(d.encode()) for d in texts_of) == counts["text_bytes"]
        assert part.documents == len(texts_of) == counts["documents"]
        assert len(part.shards) > 1
    assert corpus.index["tokenizer"]["sha256"] == corpus.tokenizer.fingerprint
    assert (corpus.tokenizer.end is None) == (tokenizer == "bytes")
    verify_corpus(corpus.folder)


def test_the_split_depends_on_text_and_seed_alone() -> None:
    sides = [in_validation(d, 0.3, 0) for d in DOCUMENTS]
    assert sides != [in_validation(d, 0.3, 1) for d in DOCUMENTS]
    assert all(in_validation(d, 0.5, 0) for d, side in zip(DOCUMENTS, sides, strict=True) if side)
    long = "x" * 70_000
    assert in_validation(long, 0.5, 3) == in_validation(long + "y", 0.5, 3)
    share = np.mean([in_validation(str(i), 0.1, 5) for i in range(5000)])
    assert share == pytest.approx(0.1, abs=0.02)


def test_a_bpe_is_learned_from_the_training_part_only(tmp_path: Path, prepared: Prepare) -> None:
    # The head decides, so a document is marked by the side that the whole of it falls to.
    marked = []
    for i in range(200):
        for word in ("zyzzyva", "alpha"):
            text = f"number {i} {word} {word}"
            if in_validation(text, 0.2, 0) == (word == "zyzzyva"):
                marked.append(text)
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"text": t}) + "\n" for t in marked))
    vocabulary = prepared(file, tokenizer="bpe:300").tokenizer.vocabulary
    assert b" alpha" in vocabulary
    assert not any(b"zy" in token for token in vocabulary)


def test_any_number_of_processes_gives_the_same_bytes(texts: Path, prepared: Prepare) -> None:
    prepared(texts, out="one", tokenizer="bpe:300", shard_tokens=400)
    prepared(texts, out="two", tokenizer="bpe:300", shard_tokens=400, workers=2)
    root = texts.parent
    assert content(root / "one") == content(root / "two")


def test_a_document_longer_than_a_piece_is_one_document(tmp_path: Path, prepared: Prepare) -> None:
    text = "the whale and the sea " * 120_000
    (tmp_path / "long.txt").write_text(text)
    corpus = prepared(tmp_path / "long.txt", val_fraction=0.0, tokenizer="bpe:270", shard_tokens=99)
    assert list(corpus.parts) == ["train"]
    assert documents(corpus.parts["train"], corpus.tokenizer) == [text]


def test_the_same_command_again_changes_nothing(texts: Path, prepared: Prepare) -> None:
    prepared(texts)
    times = {p: p.stat().st_mtime_ns for p in (texts.parent / "out").iterdir()}
    prepared(texts, workers=2)
    assert times == {p: p.stat().st_mtime_ns for p in (texts.parent / "out").iterdir()}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"seed": 1}, "seed: 0 then, 1 now"),
        ({"tokenizer": "bpe:300"}, "tokenizer: 'bytes' then, 'bpe:300' now"),
        ({"separator": "x"}, "separator: None then, 'x' now"),
    ],
)
def test_an_output_of_other_settings_is_refused(
    change: dict[str, Any], text: str, texts: Path, prepared: Prepare
) -> None:
    prepared(texts)
    before = content(texts.parent / "out")
    with pytest.raises(PolyvisionError, match=re.escape(f"other settings ({text})")):
        prepared(texts, **change)
    assert content(texts.parent / "out") == before
    prepared(texts, overwrite=True, **change)
    prepared(texts, out="fresh", **change)
    assert content(texts.parent / "out") == content(texts.parent / "fresh")


def test_other_inputs_are_refused(texts: Path, prepared: Prepare) -> None:
    prepared(texts)
    (texts / "new.txt").write_text("more")
    with pytest.raises(PolyvisionError, match=r"other input files \(new.txt new\)"):
        prepared(texts)


def test_a_foreign_folder_is_left_alone(texts: Path, prepared: Prepare) -> None:
    for overwrite in (False, True):
        with pytest.raises(PolyvisionError, match="is not empty and not a prepared corpus"):
            prepared(texts, out="texts", overwrite=overwrite)
    assert len(list(texts.iterdir())) == 60
    (texts.parent / "file").write_text("x")
    with pytest.raises(PolyvisionError, match=r"cannot write .*file"):
        prepared(texts, out="file")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"val_fraction": 1.0}, "--val-fraction must be at least 0 and less than 1, got 1.0"),
        ({"val_fraction": float("nan")}, "got nan"),
        ({"shard_tokens": 0}, "--shard-tokens must be positive, got 0"),
        ({"workers": 0}, "--workers must be at least 1, got 0"),
        ({"separator": ""}, "--separator is empty"),
        ({"tokenizer": "bpe:12"}, "tokenizer 'bpe:12'"),
        ({"val_fraction": 1e-9}, "too few to hold out 1e-09 of them"),
    ],
)
def test_values_out_of_range(
    change: dict[str, Any], text: str, texts: Path, prepared: Prepare
) -> None:
    with pytest.raises(PolyvisionError, match=re.escape(text)):
        prepared(texts, **change)
    prepared(texts)  # nothing was left behind that refuses the next attempt


@pytest.mark.slow
def test_memory_does_not_grow_with_the_input(tmp_path: Path, prepared: Prepare) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    line = json.dumps({"text": "the whale and the sea " * 500}) + "\n"
    with (tmp_path / "large.jsonl").open("w") as file:
        for _ in range(200_000_000 // len(line)):
            file.write(line)
    (tmp_path / "small.jsonl").write_text(line * 2000)
    (tmp_path / "long.txt").write_bytes(b"the whale and the sea " * 10_000_000)
    peak = 0

    def watch(_: int) -> None:
        nonlocal peak
        peak = max(peak, resident())

    settings: dict[str, Any] = {"val_fraction": 0.0, "on_progress": watch}
    prepared(tmp_path / "small.jsonl", out="small", **settings)
    before = peak
    for name in ("large.jsonl", "long.txt"):
        corpus = prepared(tmp_path / name, out=name[:4], **settings)
        assert corpus.parts["train"].tokens > 190e6
    assert peak - before < 60e6


def test_an_empty_corpus(tmp_path: Path, prepared: Prepare) -> None:
    (tmp_path / "a.txt").write_text(" \n")
    with pytest.raises(PolyvisionError, match="no text in 1 files: nothing but white space"):
        prepared(tmp_path / "a.txt")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_bad_file_in_the_middle_is_named(workers: int, texts: Path, prepared: Prepare) -> None:
    (texts / "30.txt").write_bytes(b"good \xff bad")
    with pytest.raises(PolyvisionError, match=r"30.txt is not UTF-8: byte 0xff at offset 5"):
        prepared(texts, workers=workers)
    (texts / "30.txt").write_text(document(30), encoding="utf-8")
    prepared(texts)  # goes on with what did not change
    prepared(texts, out="fresh")
    assert content(texts.parent / "out") == content(texts.parent / "fresh")


def test_the_command_line(texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    command = ["prepare-text", str(texts), "--out", str(out), "--tokenizer", "bytes"]
    assert main([*command, "--separator", r"\n\n"]) == 0
    text = capsys.readouterr().out
    index = json.loads((out / "index.json").read_text())
    assert index["settings"]["separator"] == "\n\n"
    train = index["parts"]["train"]
    assert f"train      {train['documents']} documents, {train['tokens']:,} tokens" in text
    assert f"python train_lm.py data=shards data.path={out}" in text
    assert main(["verify-text", str(out)]) == 0
    assert "All checksums, token ids and document offsets are right." in capsys.readouterr().out
    shard = out / "train-00000.bin"
    shard.write_bytes(shard.read_bytes()[:-9] + b"?" * 9)
    assert main(["verify-text", str(out)]) == 2
    assert "train-00000.bin was altered" in capsys.readouterr().err
    assert main([*command, "--separator", r"\x"]) == 2
    assert r"only \n, \r, \t and \\ are escapes" in capsys.readouterr().err
    assert main(["prepare-text", str(texts) + "s", *command[2:]]) == 2
    assert f"Did you mean '{texts}'?" in capsys.readouterr().err
