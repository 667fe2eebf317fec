"""What a person reads before and after a run."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["count", "format_table", "size"]


def format_table(title: str, rows: Iterable[tuple[str, str]]) -> str:
    """Align labelled lines under a title."""
    rows = list(rows)
    width = max(len(label) for label, _ in rows)
    lines = [f"  {label:<{width}}  {text}" for label, text in rows]
    return "\n".join([title, *lines])


def count(number: float) -> str:
    """Shorten a large number: 23.5M."""
    for limit, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= limit:
            return f"{number / limit:.3g}{unit}"
    return f"{number:.3g}"


def size(number: float) -> str:
    """Bytes in binary units: 89.9 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(number) < 1024 or unit == "GiB":
            break
        number /= 1024
    return f"{number:.1f} {unit}"
