"""What an earlier preparation left in a folder, and how much of it still holds."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polyvision.data.text.corpus import INDEX, PROGRESS
from polyvision.data.text.prepare.fingerprints import (
    INPUTS,
    Fingerprint,
    combined,
    describe_changes,
    parse_fingerprints,
)
from polyvision.errors import PolyvisionError
from polyvision.files import LOCK, partial_of
from polyvision.output import plural

__all__ = ["Found", "check_finished", "find_earlier", "noted_inputs", "place_before"]

# All that may be there before the first note.
_BEGUN = (LOCK, partial_of(Path(PROGRESS)).name)


@dataclasses.dataclass(frozen=True)
class Found:
    """What an earlier preparation left: the index of a complete one, else its last note."""

    complete: bool
    content: dict[str, Any]

    @property
    def inputs(self) -> str:
        """The hash of the files that it was made from."""
        return str(self.content["settings"].get("inputs"))


def find_earlier(out: Path, recipe: dict[str, Any]) -> Found | None:
    """Return what is in the folder; None for a new or an empty one.

    Raises:
        PolyvisionError: the folder holds something else, or was prepared with other settings.
    """
    for name in (INDEX, PROGRESS):
        path = out / name
        if not path.exists():
            continue
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            old = dict(found["settings"])
        except (ValueError, KeyError, TypeError) as error:
            raise PolyvisionError(
                f"{path} is damaged ({error!r}): choose another --out, or --overwrite"
            ) from None
        changed = [k for k in recipe if old.get(k) != recipe[k]]
        if changed:
            lines = "; ".join(f"{k}: {old.get(k)!r} then, {recipe[k]!r} now" for k in changed)
            raise PolyvisionError(
                f"--out {out} was prepared with other settings ({lines}): choose another --out, or "
                "--overwrite to prepare it again"
            )
        return Found(name == INDEX, found)
    if out.exists() and any(path.name not in _BEGUN for path in out.iterdir()):
        raise PolyvisionError(f"--out {out} is not empty and not a prepared corpus: choose another")
    return None


def check_finished(out: Path, found: Found, inputs: Sequence[Fingerprint], bad_lines: int) -> None:
    """Check that a finished corpus is what is asked for.

    Args:
        out: its folder.
        found: its index.
        inputs: the files as they are now.
        bad_lines: how many lines may have been left out.

    Raises:
        PolyvisionError: it was made from other files, or more lines were left out than may be.
    """
    if found.inputs != combined(inputs):
        old = noted_inputs(out, found.inputs)
        changes = describe_changes(old, inputs) if old else "their contents were not noted then"
        raise PolyvisionError(
            f"--out {out} was prepared from other input files "
            f"({changes or 'their order changed'}): choose another --out, or --overwrite to "
            "prepare it again"
        )
    left_out = found.content.get("bad_lines", [])
    if len(left_out) > bad_lines:
        raise PolyvisionError(
            f"--out {out} was prepared without {plural(len(left_out), 'line')} that cannot be "
            f"used, such as {left_out[0]['line']}: take it with --skip-bad-lines {len(left_out)}, "
            "or repair them and --overwrite"
        )


def noted_inputs(out: Path, combination: str) -> list[Fingerprint]:
    """Return what is noted of the files, if it is that of the preparation in question."""
    noted = parse_fingerprints(out / INPUTS)
    return noted if combined(noted) == combination else []


def place_before(place: dict[str, Any], first: int) -> dict[str, Any]:
    """Return the last noted place that depends on the files before number ``first`` alone."""
    file, item = place.get("file", 0), place.get("item", 0)
    if file < first or (file == first and not item):
        return place
    if file > first or "begin" not in place:
        return {}
    begin = place["begin"]
    parts = {
        name: mark | {"shards": place["parts"][name]["shards"][: mark["shards"]]}
        for name, mark in begin["parts"].items()
    }
    return {**place, **begin, "item": 0, "parts": parts}
