"""Inputs that were changed between two preparations, or in the middle of one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sample_texts import content, document

from polyvision.cli import main
from polyvision.data.text.corpus import Corpus, verify_corpus
from polyvision.data.text.prepare import fingerprints
from polyvision.data.text.prepare import prepare as module
from polyvision.errors import PolyvisionError

Prepare = Callable[..., Corpus]
pytestmark = pytest.mark.usefixtures("without_fsync")


class Kill(BaseException):
    """What no handler catches."""


def text_of(corpus: Corpus) -> str:
    return "".join(
        corpus.tokenizer.decode(shard.map_tokens())
        for part in corpus.parts.values()
        for shard in part.shards
    )


def test_an_edit_of_the_same_length_is_not_done_already(tmp_path: Path, capsys: Any) -> None:
    file, out = tmp_path / "a.txt", tmp_path / "out"
    file.write_text("hello whale\n\n" * 50)
    stat = file.stat()
    command = ["prepare-text", str(file), "--tokenizer", "bytes", "--out", str(out)]
    assert main(command) == 0
    assert main(command) == 0  # nothing changed
    file.write_text(file.read_text().replace("hello", "HELLO"))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # nor does its time tell
    capsys.readouterr()
    assert main(command) == 2
    error = capsys.readouterr().err
    assert f"--out {out} was prepared from other input files (a.txt changed)" in error
    assert "--overwrite to prepare it again" in error
    assert main([*command, "--overwrite"]) == 0
    assert "HELLO" in text_of(Corpus(out, "--out"))
    assert "hello" not in text_of(Corpus(out, "--out"))


def test_all_changes_are_named(texts: Path, prepared: Prepare) -> None:
    prepared(texts)
    (texts / "07.txt").write_text("other")
    (texts / "08.txt").unlink()
    for number in range(6):
        (texts / f"new{number}.txt").write_text("more")
    with pytest.raises(
        PolyvisionError,
        match=r"\(07.txt changed; new0.txt, .*new4.txt and 1 more new; 08.txt gone\)",
    ):
        prepared(texts)


def test_a_copy_of_the_files_is_the_same_input(texts: Path, prepared: Prepare) -> None:
    prepared(texts)
    before = content(texts.parent / "out")
    for path in texts.iterdir():
        os.utime(path, ns=(1, 1))
    prepared(texts)
    assert content(texts.parent / "out") == before


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Files of more than 100 bytes count as large; the names of those that are hashed whole."""
    monkeypatch.setattr(fingerprints, "_WHOLE", 100)
    monkeypatch.setattr(fingerprints, "_SAMPLES", 3)
    monkeypatch.setattr(fingerprints, "_SAMPLE_BYTES", 10)
    hashed: list[str] = []
    digest = fingerprints.hashlib.file_digest

    def noted(file: Any, name: str) -> Any:
        if file.name.endswith(".txt"):
            hashed.append(Path(file.name).name)
        return digest(file, name)

    monkeypatch.setattr(fingerprints.hashlib, "file_digest", noted)
    return hashed


def test_a_large_file_is_read_whole_only_where_a_sign_tells_of_a_change(
    large: list[str], tmp_path: Path, prepared: Prepare
) -> None:
    file = tmp_path / "large.txt"
    file.write_text("the whale\n" * 100)
    prepared(file)
    assert large == ["large.txt"]
    prepared(file)
    assert large == ["large.txt"]
    os.utime(file, ns=(1, 1))
    prepared(file)  # another time, the same content
    assert large == ["large.txt"] * 2
    changed = bytearray(file.read_bytes())
    changed[400] ^= 1  # between the samples
    file.write_bytes(changed)
    with pytest.raises(PolyvisionError, match=r"large\.txt changed"):
        prepared(file)  # another time
    prepared(file, overwrite=True)
    stat = file.stat()
    changed[400] ^= 1
    file.write_bytes(changed)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    prepared(file)  # no sign tells
    with pytest.raises(PolyvisionError, match=r"large\.txt changed"):
        prepared(file, check_inputs=True)
    changed[0] ^= 1  # a sample
    file.write_bytes(changed)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(PolyvisionError, match=r"large\.txt changed"):
        prepared(file)


@pytest.mark.parametrize("changed", [10, 30, 31, 50])
@pytest.mark.parametrize("shard_tokens", [500, 10**6])
def test_a_change_in_the_middle_costs_what_comes_after_it(
    changed: int, shard_tokens: int, tmp_path: Path, prepared: Prepare, monkeypatch: Any
) -> None:
    """Files of five documents; it was killed in file 30."""
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(60):
        documents = [document(5 * number + i) for i in range(5)]
        (folder / f"{number:02}.txt").write_text("|".join(documents), encoding="utf-8")
    settings: dict[str, Any] = {"separator": "|", "shard_tokens": shard_tokens}
    monkeypatch.setattr(module, "_NOTE_SECONDS", 0.0)
    calls = 0

    def kill(_: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 153:
            raise Kill

    with pytest.raises(Kill):
        prepared(folder, on_progress=kill, **settings)
    (folder / f"{changed:02}.txt").write_text("a repaired file|of two documents")
    calls = 0

    def count(_: int) -> None:
        nonlocal calls
        calls += 1

    said: list[str] = []
    verify_corpus(prepared(folder, on_progress=count, say=said.append, **settings).folder)
    whole = 60 * 5 - 3
    kept = {10: 0, 30: 150, 31: 152, 50: 152}[changed]
    assert calls == whole - kept
    start = {10: 1, 30: 31, 31: 31, 50: 31}[changed]
    assert said == [
        f"input files were changed since the last attempt: going on from file {start} of 60"
    ]
    prepared(folder, out="fresh", **settings)
    assert content(tmp_path / "out") == content(tmp_path / "fresh")


@pytest.mark.parametrize("learned", [True, False])
def test_a_change_goes_on_only_with_the_same_vocabulary(
    learned: bool, texts: Path, prepared: Prepare, monkeypatch: Any
) -> None:
    monkeypatch.setattr(module, "_LEARN", 60 * 40)  # the first 40 characters of each file
    (texts / "40.txt").write_text("x" * 40 + " then \n" + "tail " * 30)
    (texts / "50.txt").write_bytes((texts / "50.txt").read_bytes() + b" " * 70_000 + b"\xff")
    with pytest.raises(PolyvisionError, match=r"50\.txt is not UTF-8"):
        prepared(texts, tokenizer="bpe:300")
    (texts / "50.txt").write_text(document(50) + " " * 70_000, encoding="utf-8")
    if learned:
        (texts / "55.txt").write_text("zyzzyva " * 5)
    calls = 0

    def count(_: int) -> None:
        nonlocal calls
        calls += 1

    prepared(texts, tokenizer="bpe:300", on_progress=count)
    prepared(texts, out="fresh", tokenizer="bpe:300")
    assert content(texts.parent / "out") == content(texts.parent / "fresh")


@pytest.mark.parametrize("name", ["progress.json", "inputs.json", "tokenizer.json"])
def test_a_kill_while_a_changed_input_is_noted(
    name: str, texts: Path, prepared: Prepare, monkeypatch: Any
) -> None:
    """After any of the files, the next attempt still gives the bytes of a fresh one."""
    monkeypatch.setattr(module, "_NOTE_SECONDS", 0.0)
    calls = 0

    def stop(_: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 30:
            raise Kill

    with pytest.raises(Kill):
        prepared(texts, tokenizer="bpe:300", on_progress=stop)
    (texts / "20.txt").write_text("zyzzyva " * 40)
    write = module.write_whole

    def kill(path: Path, text: str) -> None:
        write(path, text)
        if path.name == name:
            raise Kill

    with monkeypatch.context() as patched:
        patched.setattr(module, "write_whole", kill)
        with pytest.raises(Kill):
            prepared(texts, tokenizer="bpe:300")
    prepared(texts, tokenizer="bpe:300")
    prepared(texts, out="fresh", tokenizer="bpe:300")
    assert content(texts.parent / "out") == content(texts.parent / "fresh")


def test_a_file_that_changes_while_it_is_read_is_named(texts: Path, prepared: Prepare) -> None:
    def edit(_: int) -> None:
        (texts / "03.txt").write_text("new text")

    with pytest.raises(PolyvisionError, match=r"03.txt was changed while it was read: run the sam"):
        prepared(texts, on_progress=edit)
    prepared(texts)
    prepared(texts, out="fresh")
    assert content(texts.parent / "out") == content(texts.parent / "fresh")
