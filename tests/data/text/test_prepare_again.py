"""A preparation that ended in the middle, or meets another one: the same command goes on."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sample_texts import content, document

from polyvision.cli import main
from polyvision.data.text.corpus import Corpus
from polyvision.data.text.prepare import prepare as module
from polyvision.data.text.prepare.part_writer import PartWriter
from polyvision.errors import PolyvisionError

Prepare = Callable[..., Corpus]
DOCUMENTS = [document(i) for i in range(60)]


class Kill(BaseException):
    """What no handler catches."""


@pytest.mark.parametrize("shard_tokens", [200, 10**6])
@pytest.mark.parametrize("noted", [0.0, 1e9])
def test_a_killed_run_goes_on_and_gives_the_same_bytes(
    noted: float, shard_tokens: int, texts: Path, prepared: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    (texts / "long.jsonl.gz").write_bytes(
        gzip.compress("".join(json.dumps({"text": d[::-1]}) + "\n" for d in DOCUMENTS).encode())
    )
    settings: dict[str, Any] = {"tokenizer": "bpe:300", "shard_tokens": shard_tokens}
    prepared(texts, out="whole", **settings)
    monkeypatch.setattr(module, "_NOTE_SECONDS", noted)
    out = texts.parent / "killed"
    for after in (1, 25, 70, 119):
        calls = 0

        def kill(_: int, after: int = after) -> None:
            nonlocal calls
            calls += 1
            if calls > after:
                raise Kill

        with pytest.raises(Kill):
            prepared(texts, out="killed", on_progress=kill, **settings)
        assert not (out / "index.json").exists()
        with pytest.raises(PolyvisionError, match="is not complete: run the same polyvision prep"):
            Corpus(out, "data.path")
        if not noted:  # every document was noted, so the next run goes on behind it
            break
    prepared(texts, out="killed", **settings)
    assert content(out) == content(texts.parent / "whole")


def test_a_kill_between_the_last_shard_and_the_index(
    texts: Path, prepared: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared(texts, out="whole")
    check = module.refuse_changed_files

    def kill(*_: Any) -> None:
        raise Kill

    monkeypatch.setattr(module, "refuse_changed_files", kill)
    with pytest.raises(Kill):
        prepared(texts, out="killed")
    assert (texts.parent / "killed" / "train-00000.bin").exists()
    monkeypatch.setattr(module, "refuse_changed_files", check)
    prepared(texts, out="killed")
    assert content(texts.parent / "killed") == content(texts.parent / "whole")


@pytest.mark.parametrize("place", ["learning", "tokenizer", "writers"])
def test_a_kill_before_the_first_document(
    place: str, texts: Path, prepared: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(*_: Any, **__: Any) -> None:
        raise Kill

    write = module.write_whole
    prepared(texts, out="whole", tokenizer="bpe:270")
    with monkeypatch.context() as patched:
        if place == "learning":
            patched.setattr(module, "_learn_from", kill)
        elif place == "tokenizer":
            patched.setattr(
                module,
                "write_whole",
                lambda p, t: kill() if p.name == "tokenizer.json" else write(p, t),
            )
        else:
            patched.setattr(module, "PartWriter", kill)
        with pytest.raises(Kill):
            prepared(texts, tokenizer="bpe:270")
    with pytest.raises(PolyvisionError, match="other settings"):
        prepared(texts)
    prepared(texts, tokenizer="bpe:270")
    assert content(texts.parent / "out") == content(texts.parent / "whole")


@pytest.mark.parametrize("left", ["index.json", "train-00000.bin", "val-00000.bin", "progress"])
@pytest.mark.parametrize("again", [False, True])
def test_a_kill_while_an_old_corpus_is_deleted(
    left: str, again: bool, texts: Path, prepared: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared(texts, out="whole", seed=1)
    prepared(texts)
    unlink = Path.unlink

    def until(path: Path, missing_ok: bool = False) -> None:
        if path.name.startswith(left):
            raise Kill
        unlink(path, missing_ok)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", until)
        with pytest.raises(Kill):
            prepared(texts, overwrite=True, seed=1)
    if left != "index.json" or again:  # with an index, it is still the old corpus
        prepared(texts, overwrite=again, seed=1)
        assert content(texts.parent / "out") == content(texts.parent / "whole")


def test_notes_of_what_is_gone_are_refused(
    texts: Path, prepared: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def kill(_: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 8:
            raise Kill

    monkeypatch.setattr(module, "_NOTE_SECONDS", 0.0)
    with pytest.raises(Kill):
        prepared(texts, on_progress=kill)
    out = texts.parent / "out"
    (out / "train-00000.bin.partial").write_bytes(bytes(200))
    with pytest.raises(PolyvisionError, match=r"bin.partial is not whole: .*--overwrite starts"):
        prepared(texts)
    prepared(texts, overwrite=True)
    prepared(texts, out="whole")
    assert content(out) == content(texts.parent / "whole")


def test_a_folder_that_another_process_prepares_is_refused(
    texts: Path, prepared: Prepare, hold: Callable[[Path], Any]
) -> None:
    (texts.parent / "out").mkdir()
    process = hold(texts.parent / "out")
    for overwrite in (False, True):
        with pytest.raises(PolyvisionError, match=r"in use by another process \(4711\): wait"):
            prepared(texts, overwrite=overwrite)
    process.kill()
    process.wait()
    prepared(texts)
    prepared(texts, out="whole")
    assert content(texts.parent / "out") == content(texts.parent / "whole")
    hold(texts.parent / "whole")
    prepared(texts, out="whole")  # complete: nothing to write


def test_a_full_disk_is_one_line_and_nothing_is_lost(
    texts: Path, prepared: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared(texts, out="whole")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(PartWriter, "end_document", full)
        with pytest.raises(PolyvisionError, match="cannot write a shard: No space left on device"):
            prepared(texts)
    prepared(texts)
    assert content(texts.parent / "out") == content(texts.parent / "whole")


def test_ctrl_c_is_one_line(
    texts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    command = ["prepare-text", str(texts), "--tokenizer", "bytes", "--out", f"{texts}-out"]
    with monkeypatch.context() as patched:
        patched.setattr(PartWriter, "end_document", interrupt)
        with pytest.raises(SystemExit, match="130"):
            main(command)
    assert capsys.readouterr().err == "interrupted; the same command goes on where it stopped\n"
    assert main(command) == 0
