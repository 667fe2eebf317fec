"""Training windows and validation sets from shards and text, and what does not fit together."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polyvision.data.text.corpus import Corpus
from polyvision.data.text.language_data import LanguageData, load_language_data
from polyvision.data.text.sampling import MixedWindows, ShuffledWindows
from polyvision.errors import PolyvisionError

Prepare = Callable[..., Corpus]


def load(name: str = "shards", **more: Any) -> LanguageData:
    return load_language_data(name, **({"context": 16} | more))


def test_shards_give_windows_of_both_parts(texts: Path, prepared: Prepare) -> None:
    corpus = prepared(texts)
    data = load(path=str(corpus.folder), seed=3)
    assert isinstance(data.train, ShuffledWindows)
    assert data.train.seed == 3
    assert data.train.part.tokens == corpus.index["parts"]["train"]["tokens"]
    assert len(data.val) == (corpus.index["parts"]["val"]["tokens"] - 1) // 16
    assert data.tokenizer.fingerprint == corpus.tokenizer.fingerprint
    assert not data.named
    assert data.plan["data"].startswith(f"{corpus.folder}, ")
    assert data.plan["train"] == f"{len(data.train):,} windows of 16 an epoch"


def test_named_sets_take_their_validation_part_or_everything(
    texts: Path, prepared: Prepare
) -> None:
    main = prepared(texts)
    own = prepared(texts, out="own", seed=4)
    whole = prepared(texts, out="whole", val_fraction=0.0)
    data = load(path=str(main.folder), val={"own": str(own.folder), "whole": str(whole.folder)})
    assert list(data.named) == ["own", "whole"]
    sizes = [own.parts["val"].tokens, whole.parts["train"].tokens]
    assert [len(s) for s in data.named.values()] == [(n - 1) // 16 for n in sizes]
    assert data.plan["val whole"].startswith(f"{whole.folder}, 60 documents")
    # Without a validation split of its own, the first named set is the main one.
    data = load(path=str(whole.folder), val={"own": str(own.folder)})
    assert len(data.val) == (own.parts["val"].tokens - 1) // 16
    assert not data.named
    assert data.plan["val"] == "main set (val/loss): own"


def test_a_set_without_validation_part_is_said_to_be_one(
    texts: Path, prepared: Prepare, caplog: pytest.LogCaptureFixture
) -> None:
    main = prepared(texts)
    other = prepared(texts, out="other", val_fraction=0.0, seed=2)
    load(path=str(main.folder), val={"own": str(main.folder)})
    assert not caplog.messages
    data = load(path=str(main.folder), val={"other": str(other.folder)})
    whole = "it has no validation split, so all of its training split is taken"
    assert data.plan["val other"].endswith(f"bytes; {whole}")
    assert caplog.messages == [f"data.val.other={other.folder}: {whole}"]
    caplog.clear()
    places = {"path": str(other.folder), "val": {"a": str(main.folder), "b": str(other.folder)}}
    load(**places)
    (line,) = caplog.messages
    assert line.startswith(f"data.val.b={other.folder}: {whole}, which this run also trains on")
    assert "val/b shows no generalisation" in line


def test_a_mixture_of_folders(texts: Path, prepared: Prepare) -> None:
    first = prepared(texts, out="first")
    prepared(texts, out="second", seed=9)
    data = load(path=str(first.folder.parent), mix={"first": 3.0, "second": 1.0})
    assert isinstance(data.train, MixedWindows)
    assert data.train.counts.tolist() == [7500, 2500]
    assert len(data.val) == (first.parts["val"].tokens - 1) // 16
    assert list(data.named) == ["second"]
    assert data.plan["data first"].startswith("75 % of ")


def test_a_named_set_does_not_replace_one_of_the_mixture(texts: Path, prepared: Prepare) -> None:
    first = prepared(texts, out="first")
    prepared(texts, out="second", seed=9)
    place = {"path": str(first.folder.parent), "mix": {"first": 3.0, "second": 1.0}}
    for name in ("first", "second"):
        with pytest.raises(PolyvisionError, match=rf"data\.val\.{name} has the name of data\.mix"):
            load(**place, val={name: str(first.folder)})
    assert list(load(**place, val={"again": str(first.folder)}).named) == ["second", "again"]


def test_a_text_takes_named_sets_of_its_tokenizer(
    texts: Path, prepared: Prepare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLYVISION_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "story.txt"
    file.write_text("the whale and the sea. " * 100)
    own = {"path": str(file), "tokenizer": "bpe:270", "val_fraction": 0.2}
    data = load("text", **own)
    definition = tmp_path / "tokenizer.json"
    definition.write_text(data.tokenizer.to_json())
    corpus = prepared(texts, tokenizer=str(definition))
    data = load("text", val={"other": str(corpus.folder)}, **own)
    assert len(data.named["other"]) == (corpus.parts["val"].tokens - 1) // 16
    other = prepared(texts, out="other")
    with pytest.raises(PolyvisionError, match=r"another tokenizer .*256 tokens"):
        load("text", val={"other": str(other.folder)}, **own)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"name": "shard"}, "unknown text data 'shard'. Did you mean 'shards'?"),
        ({"path": None}, "data=shards needs a folder that polyvision prepare-text wrote"),
        ({"path": "{}/otu"}, "data.path='{}/otu' does not exist; name a folder that polyvision"),
        ({"path": "{}/texts"}, "has no index.json, so it is not a prepared corpus"),
        ({"path": "{}/texts/00.txt"}, "is a file; name a folder"),
        ({"tokenizer": "bytes"}, "data=shards takes no data.tokenizer"),
        ({"val_fraction": 0.1}, "data=shards takes no data.val_fraction"),
        ({"name": "book", "mix": {"a": 1.0}}, "data=book takes no data.mix"),
        ({"name": "book"}, "data=book needs data.tokenizer and data.val_fraction"),
        ({"context": 10**6}, "the part 'train' of {}/out has "),
        ({"context": 5000}, "the part 'val' of {}/out has "),
        ({"val": {"a/b": "{}/out"}}, "data.val.a/b: a name has letters"),
        ({"val": {"c4": "{}/no"}}, "data.val.c4='{}/no' does not exist"),
        ({"path": "{}", "mix": {"out": 1.0, "no": 1.0}}, "data.mix.no='{}/no' does not exist"),
    ],
)
def test_what_does_not_fit(
    arguments: dict[str, Any], text: str, texts: Path, prepared: Prepare, tmp_path: Path
) -> None:
    prepared(texts)

    def fill(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: fill(v) for k, v in value.items()}
        return value.replace("{}", str(tmp_path)) if isinstance(value, str) else value

    given = {"path": str(tmp_path / "out")} | {k: fill(v) for k, v in arguments.items()}
    if given.get("name") == "book":
        del given["path"]
    with pytest.raises(PolyvisionError, match=re.escape(text.replace("{}", str(tmp_path)))):
        load(**given)


def test_corpora_of_different_tokenizers_do_not_mix(texts: Path, prepared: Prepare) -> None:
    folder = prepared(texts, out="a").folder
    prepared(texts, out="b", tokenizer="bpe:300")
    with pytest.raises(PolyvisionError, match="b was prepared with another tokenizer"):
        load(path=str(folder.parent), mix={"a": 1.0, "b": 1.0})
    with pytest.raises(PolyvisionError, match="b was prepared with another tokenizer"):
        load(path=str(folder), val={"b": str(folder.parent / "b")})


def test_a_corpus_without_validation(texts: Path, prepared: Prepare) -> None:
    corpus = prepared(texts, val_fraction=0.0)
    with pytest.raises(PolyvisionError, match="has no validation split: prepare it with --val-f"):
        load(path=str(corpus.folder))


def index(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    values = json.loads((folder / "index.json").read_text())
    change(values)
    (folder / "index.json").write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda f: (f / "train-00000.bin").unlink(), "train-00000.bin is missing"),
        (lambda f: (f / "val-00000.bin").write_bytes(b""), "val-00000.bin is not a token shard"),
        (
            lambda f: (f / "train-00000.bin").write_bytes((f / "val-00000.bin").read_bytes()),
            "train-00000.bin is not the shard that",
        ),
        (lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json cannot be read"),
        (
            lambda f: (f / "tokenizer.json").write_bytes((f / "../b/tokenizer.json").read_bytes()),
            "tokenizer.json is another tokenizer",
        ),
        (
            lambda f: (f / "train-00000.bin").write_bytes(
                (f / "../b/train-00000.bin").read_bytes()
            ),
            "train-00000.bin was made with another tokenizer",
        ),
        (lambda f: index(f, lambda v: v.update(version=9)), "has format version 9"),
        (lambda f: index(f, lambda v: v.pop("parts")), "is damaged (KeyError('parts'))"),
        (lambda f: (f / "index.json").write_text("{"), "is damaged (JSONDecodeError"),
        (lambda f: (f / "index.json").write_text("[]"), "is damaged (TypeError"),
    ],
)
def test_a_corpus_that_is_not_whole(
    damage: Callable[[Path], Any], text: str, texts: Path, prepared: Prepare
) -> None:
    folder = prepared(texts).folder
    prepared(texts, out="b", tokenizer="bpe:300")
    damage(folder)
    with pytest.raises(PolyvisionError, match=re.escape(text)):
        load(path=str(folder))
