"""Bad lines that are left out, and the token that ends documents."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sample_texts import content, document

from polyvision.cli import main
from polyvision.data.text.corpus import Corpus
from polyvision.data.text.prepare import prepare as module
from polyvision.data.text.tokenizers import BPETokenizer
from polyvision.errors import PolyvisionError

Prepare = Callable[..., Corpus]


def write(path: Path, start: int, bad: bool = True) -> None:
    rows = [json.dumps({"text": document(start + i)}) for i in range(20)]
    if bad:
        rows[7] = "{"
    path.write_text("\n".join(rows))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three files of 20 lines, of which one is bad in each."""
    (tmp_path / "many").mkdir()
    for number in range(3):
        write(tmp_path / "many" / f"{number}.jsonl", 20 * number)
    return tmp_path / "many"


@pytest.mark.parametrize("workers", [1, 2])
def test_bad_lines_are_counted_and_named(
    workers: int, folder: Path, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "out"
    command = ["prepare-text", str(folder), "--tokenizer", "bpe:270", "--out", str(out)]
    command += ["--workers", str(workers), "--val-fraction", "0.2"]
    assert main([*command, "--skip-bad-lines", "2"]) == 2
    error = capsys.readouterr().err
    assert f"{folder}/2.jsonl:8: not JSON" in error
    assert "2 lines before it were left out; see --skip-bad-lines" in error
    assert main([*command, "--skip-bad-lines", "3"]) == 0
    shown = capsys.readouterr().out
    assert "left out   3 lines that cannot be used, see index.json:" in shown
    corpus = Corpus(out, "--out")
    assert sum(part.documents for part in corpus.parts.values()) == 57
    named = corpus.index["bad_lines"]
    assert [each["line"] for each in named] == [f"{folder}/{i}.jsonl:8" for i in range(3)]
    assert all(each["reason"].startswith("not JSON") for each in named)
    assert main(command) == 2  # without the option, the corpus is not what was asked for
    assert "was prepared without 3 lines" in capsys.readouterr().err


def test_one_repaired_line_costs_its_file_only(folder: Path, prepared: Prepare) -> None:
    for number in (0, 1):
        write(folder / f"{number}.jsonl", 20 * number, bad=False)
    with pytest.raises(PolyvisionError, match=r"2\.jsonl:8: not JSON.*; see --skip-bad-lines"):
        prepared(folder)
    write(folder / "2.jsonl", 40, bad=False)
    calls = 0

    def count(_: int) -> None:
        nonlocal calls
        calls += 1

    prepared(folder, on_progress=count)
    assert calls == 60  # nothing was noted in so short a time
    prepared(folder, out="fresh")
    assert content(folder.parent / "out") == content(folder.parent / "fresh")


def test_lines_left_out_are_remembered_over_a_kill(
    folder: Path, prepared: Prepare, monkeypatch: Any
) -> None:
    class Kill(BaseException):
        pass

    calls = 0

    def kill(_: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 45:
            raise Kill

    monkeypatch.setattr(module, "_NOTE_SECONDS", 0.0)
    with pytest.raises(Kill):
        prepared(folder, skip_bad_lines=3, on_progress=kill)
    with pytest.raises(PolyvisionError, match=r"1\.jsonl:8.* 1 line before it was"):
        prepared(folder, skip_bad_lines=1)
    prepared(folder, skip_bad_lines=9)
    prepared(folder, skip_bad_lines=3, out="fresh")
    assert content(folder.parent / "out") == content(folder.parent / "fresh")
    with pytest.raises(PolyvisionError, match="--skip-bad-lines must be 0 or more, got -1"):
        prepared(folder, skip_bad_lines=-1)


def test_the_end_token_by_name(texts: Path, prepared: Prepare, tmp_path: Path, capsys: Any) -> None:
    learned = prepared(texts, out="learned", tokenizer="bpe:270", end_token="<|im_end|>")
    assert (learned.tokenizer.end_name, learned.tokenizer.end) == ("<|im_end|>", 0)
    tokenizer = BPETokenizer.train(["the whale " * 9], 270, end_token="<|im_end|>")
    definition = json.loads(tokenizer.to_json()) | {"post_processor": None}
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(definition))  # as one that comes from elsewhere
    command = ["prepare-text", str(texts), "--tokenizer", str(file), "--val-fraction", "0.2"]
    assert main([*command, "--out", f"{tmp_path}/none"]) == 0
    none = Corpus(tmp_path / "none", "")
    assert none.tokenizer.end is None
    assert "end token  none: documents follow each other" in capsys.readouterr().out
    assert main([*command, "--out", f"{tmp_path}/named", "--end-token", "<|im_end|>"]) == 0
    assert "end token  <|im_end|> (id 0) after each document" in capsys.readouterr().out
    named = Corpus(tmp_path / "named", "")
    for name, part in named.parts.items():
        assert part.tokens == none.parts[name].tokens + part.documents
        ids = part.shards[0].map_tokens()
        assert (ids[part.shards[0].offsets()[1:] - 1] == 0).all()
        assert (ids == 0).sum() == part.documents
    # Who takes the corpus's tokenizer needs no option.
    again = prepared(texts, out="again", tokenizer=str(tmp_path / "named" / "tokenizer.json"))
    assert again.tokenizer.fingerprint == named.tokenizer.fingerprint
    assert main([*command, "--out", f"{tmp_path}/named"]) == 2  # another setting
    assert "end_token: '<|im_end|>' then, None now" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"end_token": "<eos>"}, "end token '<eos>': the tokenizer bytes has no special tokens"),
        (
            {"end_token": "<|imend|>", "tokenizer": "{}"},
            "end token '<|imend|>': not a special token of this tokenizer. "
            "Did you mean '<|im_end|>'? Valid: <|im_end|>",
        ),
    ],
)
def test_an_end_token_that_is_not_there(
    settings: dict[str, Any], message: str, texts: Path, prepared: Prepare, tmp_path: Path
) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(BPETokenizer.train(["a b"], 257, end_token="<|im_end|>").to_json())
    given = {k: v.replace("{}", str(file)) for k, v in settings.items()}
    with pytest.raises(PolyvisionError, match=re.escape(message)):
        prepared(texts, **given)
