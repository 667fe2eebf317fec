"""A report of sections, written as Markdown and as one HTML page that needs no other file."""

from __future__ import annotations

import base64
import dataclasses
import html
import io
import re
from collections.abc import Sequence

from matplotlib.figure import Figure

__all__ = ["Section", "as_html", "as_markdown", "png"]


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of a report.

    Attributes:
        title: its heading.
        paragraphs: text; ``*words*`` are emphasised.
        items: a list, below the paragraphs.
        table: rows of equal length, the first of them the header; may be empty.
        figure: (file name, PNG), or None.
    """

    title: str
    paragraphs: tuple[str, ...] = ()
    items: tuple[str, ...] = ()
    table: tuple[tuple[str, ...], ...] = ()
    figure: tuple[str, bytes] | None = None


def png(figure: Figure, dpi: int = 80) -> bytes:
    """Render a figure."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, metadata={"Software": None})
    return buffer.getvalue()


def as_markdown(title: str, lead: str, sections: Sequence[Section]) -> str:
    """Write the report; figures are files beside it. Tables are aligned, to be read as they are."""
    parts = [f"# {title}", lead]
    for section in sections:
        parts += [f"## {section.title}", *section.paragraphs]
        if section.items:
            parts.append("\n".join(f"- {item}" for item in section.items))
        if section.figure:
            parts.append(f"![{section.title}]({section.figure[0]})")
        if section.table:
            parts.append(_table(section.table))
    return "\n\n".join(parts) + "\n"


def _table(rows: Sequence[Sequence[str]]) -> str:
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |"
        for row in cells
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; font-size: 13px; margin: 1rem 0 }
th, td { border: 1px solid #ccc; padding: .2rem .5rem; text-align: left; vertical-align: top }
th { background: #f2f2f2 } img { max-width: 100% }
"""


def as_html(title: str, lead: str, sections: Sequence[Section]) -> str:
    """Write the report as one page, figures inside."""
    parts = [
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}'
        f"</title><style>{_STYLE}</style></head><body><h1>{html.escape(title)}</h1>",
        f"<p>{html.escape(lead)}</p>",
    ]
    for section in sections:
        parts.append(f"<h2>{html.escape(section.title)}</h2>")
        parts += [f"<p>{_emphasis(html.escape(text))}</p>" for text in section.paragraphs]
        if section.items:
            items = "".join(f"<li>{html.escape(item)}</li>" for item in section.items)
            parts.append(f"<ul>{items}</ul>")
        if section.figure:
            data = base64.b64encode(section.figure[1]).decode()
            alt = html.escape(section.title)
            parts.append(f'<img alt="{alt}" src="data:image/png;base64,{data}">')
        for i, row in enumerate(section.table):
            tag = "td" if i else "th"
            cells = "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row)
            parts.append(("" if i else "<table>") + f"<tr>{cells}</tr>")
        if section.table:
            parts.append("</table>")
    return "\n".join([*parts, "</body></html>"]) + "\n"


def _emphasis(text: str) -> str:
    return re.sub(r"\*(\w[^*]*)\*", r"<em>\1</em>", text)
