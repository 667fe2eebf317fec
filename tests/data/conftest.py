"""Small corpora, prepared in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sample_texts import document

from polyvision.data.text.corpus import Corpus
from polyvision.data.text.prepare.prepare import Settings, prepare
from polyvision.data.text.sources import find_sources

# Arguments of ``prepare`` itself.
_OWN = ("workers", "overwrite", "on_progress", "skip_bad_lines", "check_inputs", "say")


@pytest.fixture
def without_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Save the time that notes after every document would wait for the disk."""
    monkeypatch.setattr("os.fsync", lambda file: None)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A folder with 60 small documents."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number:02}.txt").write_text(document(number), encoding="utf-8")
    return folder


@pytest.fixture
def prepared(tmp_path: Path) -> Callable[..., Corpus]:
    """Prepare files into a folder; settings by keyword."""

    def run(*inputs: Path, out: str = "out", **more: Any) -> Corpus:
        own = {k: more.pop(k) for k in _OWN if k in more}
        settings = Settings(**{"tokenizer": "bytes", "val_fraction": 0.2} | more)
        sources = find_sources([str(path) for path in inputs])
        return prepare(sources, tmp_path / out, settings, **own)

    return run
