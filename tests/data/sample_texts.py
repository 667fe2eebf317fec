"""Small documents that all differ."""

from __future__ import annotations

from pathlib import Path

WORDS = ["whale", "ship", "sea", "captain", "harpoon", "wave", "island", "storm"]


def document(number: int) -> str:
    """Return a document of its own length and words."""
    words = (WORDS[(number * k + k * k) % len(WORDS)] for k in range(5 + number * 7 % 40))
    return f"Document {number}: " + " ".join(words) + " \u2014 the end.\n"


def content(folder: Path) -> dict[str, bytes]:
    """Return what the files of a folder hold."""
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}
