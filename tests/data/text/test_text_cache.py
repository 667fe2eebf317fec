"""The cache saves work, never changes a result and never is the reason for a failure."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyvision.data.text import file as text_module
from polyvision.data.text.cache import Arrays, cache_folder, cached_arrays
from polyvision.data.text.file import TextData, load_text_data

STORY = "The sea, the ship and the whale.\n\n" * 40


class Store:
    """A text file and a cache folder; counts how often the text is encoded."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.file, self.cache, self.encoded = folder / "a.txt", folder / "cache", 0
        self.file.write_text(STORY, encoding="utf-8")
        encode = text_module._encode

        def counted(*args: Any) -> Arrays:
            self.encoded += 1
            return encode(*args)

        monkeypatch.setattr(text_module, "_encode", counted)

    def load(self, **changes: Any) -> TextData:
        arguments = {"path": self.file, "context": 8, "tokenizer": "bpe:300", "cache": self.cache}
        return load_text_data("text", **(arguments | changes))

    def archives(self) -> list[Path]:
        return sorted(self.cache.rglob("*"))[1:]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    return Store(tmp_path, monkeypatch)


def same(a: TextData, b: TextData) -> bool:
    return (
        a.tokenizer.fingerprint == b.tokenizer.fingerprint
        and a.val_bytes == b.val_bytes
        and all(
            x.tokens.dtype == y.tokens.dtype and np.array_equal(x.tokens, y.tokens)
            for x, y in ((a.train, b.train), (a.val, b.val))
        )
    )


def test_a_second_load_encodes_nothing_and_is_equal(store: Store) -> None:
    first, second = store.load(), store.load(context=4)  # the context is not part of the key
    assert store.encoded == 1
    assert same(first, store.load())
    assert second.val.context == 4
    assert [f.suffix for f in store.archives()] == [".npz"]


def test_whatever_changes_the_result_has_its_own_entry(store: Store) -> None:
    store.load()
    store.load(tokenizer="bytes")
    store.load(tokenizer="bpe:290")
    store.load(val_fraction=0.4)
    store.file.write_text(STORY + "The end.", encoding="utf-8")
    store.load()
    assert store.encoded == len(store.archives()) == 5


def test_an_edit_of_the_same_length_and_time_is_encoded_anew(store: Store) -> None:
    store.load()
    stat = store.file.stat()
    store.file.write_text(STORY.replace("whale", "WHALE"), encoding="utf-8")
    os.utime(store.file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    data = store.load()
    assert "WHALE" in data.tokenizer.decode(data.train.tokens)
    assert "whale" not in data.tokenizer.decode(data.train.tokens)


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "foreign"])
def test_a_damaged_entry_is_rebuilt(
    store: Store, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = store.load()
    (archive,) = store.archives()
    content = archive.read_bytes()
    middle = len(content) // 2
    archive.write_bytes(
        {
            "empty": b"",
            "cut": content[:middle],
            "flipped": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
            "foreign": b"not an archive",
        }[damage]
    )
    assert same(first, store.load())
    assert "rebuilding the unreadable cache file" in caplog.text
    assert archive.read_bytes() != b"not an archive"
    assert same(first, store.load())
    assert store.encoded == 2


def test_a_folder_that_cannot_be_written_costs_only_time(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    first = store.load()
    caplog.clear()
    assert same(first, store.load(cache=store.file / "below a file"))
    assert "set POLYVISION_CACHE" in caplog.text
    assert store.encoded == 2


def test_a_failed_write_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    arrays = cached_arrays(tmp_path / "a" / "b.npz", lambda: {"x": np.arange(3)})
    assert arrays["x"].tolist() == [0, 1, 2]
    assert list((tmp_path / "a").iterdir()) == []
    assert "No space left on device" in caplog.text


def test_what_killed_writers_left_is_deleted_and_what_others_write_is_not(tmp_path: Path) -> None:
    left, written, other = (
        tmp_path / name for name in (".b.npz.1.tmp", ".b.npz.2.tmp", ".c.npz.1.tmp")
    )
    for file in (left, written, other):
        file.write_bytes(b"half")
    for file in (left, other):
        os.utime(file, (0, 0))
    cached_arrays(tmp_path / "b.npz", lambda: {"x": np.arange(3)})
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["b.npz", written.name, other.name])


def test_an_error_while_building_is_not_hidden(tmp_path: Path) -> None:
    def fail() -> Arrays:
        raise OSError("from the builder")

    with pytest.raises(OSError, match="from the builder"):
        cached_arrays(tmp_path / "b.npz", fail)


def test_the_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/h")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("POLYVISION_CACHE", raising=False)
    assert cache_folder() == Path("/h/.cache/polyvision")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder() == Path("/x/polyvision")
    monkeypatch.setenv("POLYVISION_CACHE", "~/own")
    assert cache_folder() == Path("/h/own")
