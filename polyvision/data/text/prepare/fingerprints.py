"""What files held when a corpus was prepared from them, to tell whether they still do."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from polyvision.data.text.sources import Source
from polyvision.errors import PolyvisionError

__all__ = [
    "INPUTS",
    "Fingerprint",
    "combined",
    "describe_changes",
    "first_change",
    "parse_fingerprints",
    "refuse_changed_files",
    "take_fingerprints",
    "to_json",
]

INPUTS = "inputs.json"

# Files up to this size are always compared whole; larger ones by size, time of change and samples.
_WHOLE = 64 << 20
_SAMPLES, _SAMPLE_BYTES = 64, 1 << 20
_SHOWN = 5  # changed files that an error names


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """What one file held.

    Attributes:
        name: of the file, inside the input that it belongs to.
        size: its bytes.
        sha256: of all of them.
        mtime_ns: when it was changed; only of files larger than 64 MiB, else 0.
        sample: SHA-256 of 64 evenly spaced MiB of a file larger than 64 MiB, else empty.
    """

    name: str
    size: int
    sha256: str
    mtime_ns: int = 0
    sample: str = ""


def take_fingerprints(
    sources: Sequence[Source], known: Sequence[Fingerprint] = (), *, whole: bool = False
) -> list[Fingerprint]:
    """Read the files; a large one that has not changed by all signs is not read whole again.

    Args:
        sources: the files.
        known: what they held before.
        whole: read all files whole.

    Raises:
        PolyvisionError: a file cannot be read.
    """
    before = {each.name: each for each in known}
    return [_take(source, None if whole else before.get(source.name)) for source in sources]


def _take(source: Source, known: Fingerprint | None) -> Fingerprint:
    try:
        with source.path.open("rb") as file:
            if source.size <= _WHOLE:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
                return Fingerprint(source.name, source.size, sha256)
            sampled = hashlib.sha256()
            for number in range(_SAMPLES):
                file.seek((source.size - _SAMPLE_BYTES) * number // (_SAMPLES - 1))
                sampled.update(file.read(_SAMPLE_BYTES))
            found = Fingerprint(source.name, source.size, "", source.mtime_ns, sampled.hexdigest())
            if known is not None and dataclasses.replace(known, sha256="") == found:
                return known
            file.seek(0)
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            return dataclasses.replace(found, sha256=sha256)
    except OSError as error:
        raise PolyvisionError(f"{source.path} cannot be read: {error.strerror}") from None


def refuse_changed_files(sources: Iterable[Source]) -> None:
    """Refuse files that were changed since they were found.

    Raises:
        PolyvisionError: one was.
    """
    for source in sources:
        try:
            stat = os.stat(source.path)
            changed = (stat.st_size, stat.st_mtime_ns) != (source.size, source.mtime_ns)
        except OSError:
            changed = True
        if changed:
            raise PolyvisionError(
                f"{source.path} was changed while it was read: run the same command again when "
                "nothing writes to it any more"
            )


def combined(fingerprints: Sequence[Fingerprint]) -> str:
    """Return one hash of names and contents, in their order."""
    lines = "".join(f"{each.name}\0{each.size}\0{each.sha256}\n" for each in fingerprints)
    return hashlib.sha256(lines.encode("utf-8", "surrogateescape")).hexdigest()


def first_change(old: Sequence[Fingerprint], new: Sequence[Fingerprint]) -> int:
    """Return the number of the first file that has another name or content."""
    pairs = zip(old, new, strict=False)
    same = (_same(a, b) for a, b in pairs)
    return next((i for i, equal in enumerate(same) if not equal), min(len(old), len(new)))


def describe_changes(old: Sequence[Fingerprint], new: Sequence[Fingerprint]) -> str:
    """Return which files were changed, came or went, in words; empty for none."""
    before, now = ({each.name: each for each in files} for files in (old, new))
    groups = {
        "changed": [n for n in now if n in before and not _same(before[n], now[n])],
        "new": [n for n in now if n not in before],
        "gone": [n for n in before if n not in now],
    }
    return "; ".join(f"{_names(names)} {what}" for what, names in groups.items() if names)


def _same(a: Fingerprint, b: Fingerprint) -> bool:
    return (a.name, a.size, a.sha256) == (b.name, b.size, b.sha256)


def _names(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more:,} more" if more > 0 else "")


def to_json(fingerprints: Sequence[Fingerprint]) -> str:
    """Return the text of the file ``INPUTS``."""
    files = [
        {k: v for k, v in dataclasses.asdict(each).items() if v not in (0, "") or k == "size"}
        for each in fingerprints
    ]
    return json.dumps({"files": files}, indent=1) + "\n"


def parse_fingerprints(path: Path) -> list[Fingerprint]:
    """Read the file ``INPUTS``; nothing where it is missing or damaged."""
    try:
        files = json.loads(path.read_text(encoding="utf-8"))["files"]
        return [Fingerprint(**each) for each in files]
    except (OSError, ValueError, KeyError, TypeError):
        return []
