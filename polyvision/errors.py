"""The one exception users meet, and the did-you-mean helper behind its texts."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from pathlib import Path

__all__ = [
    "PolyvisionError",
    "did_you_mean",
    "first_line",
    "looked_for",
    "some",
    "unknown",
]


class PolyvisionError(ValueError):
    """A mistake in what the user asked for: one text that names value, place and choices.

    It is a ``ValueError`` on purpose: timm retries a layer's constructor on ``TypeError`` and
    would hide the text.
    """


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """Return ``' Did you mean X?'`` for the closest choice, or an empty string."""
    close = difflib.get_close_matches(name, list(choices), n=1, cutoff=0.6)
    return f" Did you mean {close[0]!r}?" if close else ""


def unknown(what: str, name: str, choices: Iterable[str]) -> PolyvisionError:
    """Build the error for a name that is not among ``choices``."""
    valid = sorted(choices)
    hint = did_you_mean(name, valid)
    return PolyvisionError(f"unknown {what} {name!r}.{hint} Valid: {', '.join(valid) or 'none'}.")


def looked_for(path: str | os.PathLike[str]) -> str:
    """Return where a path that is missing was looked for, to follow it; empty if it says so itself.

    Example:
        >>> looked_for("/data/images")
        ''
    """
    absolute = Path(path).expanduser().absolute()
    return "" if str(absolute) == os.fspath(path) else f" (looked for {absolute})"


def some(names: Iterable[str], limit: int = 5) -> str:
    """Return the first names in order, and how many are left out."""
    ordered = sorted(names)
    rest = len(ordered) - limit
    return ", ".join(ordered[:limit]) + (f" and {rest} more" if rest > 0 else "")


def first_line(error: BaseException) -> str:
    """Return the first line of the text of ``error``, or its class where it has none."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
