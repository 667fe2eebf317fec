"""A report of sections, written as Markdown and as one HTML page that needs no other file."""

from __future__ import annotations

import base64
import dataclasses
import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import markdown
from matplotlib.figure import Figure

from polyvision.errors import PolyvisionError

__all__ = ["Section", "as_html", "as_markdown", "png", "write_report"]


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
    numbered = [
        dataclasses.replace(section, figure=section.figure and (f"figure{i}", section.figure[1]))
        for i, section in enumerate(sections)
    ]
    # Neither tags nor names such as __init__ are markup.
    text = html.escape(as_markdown(title, lead, numbered), quote=False).replace("_", "&#95;")
    body = markdown.markdown(text, extensions=["tables", "sane_lists"])
    for name, image in _figures(numbered).items():
        data = base64.b64encode(image).decode()
        body = body.replace(f'src="{name}"', f'src="data:image/png;base64,{data}"')
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}'
        f"</title><style>{_STYLE}</style></head><body>\n{body}\n</body></html>\n"
    )


def _figures(sections: Sequence[Section]) -> dict[str, bytes]:
    return dict(section.figure for section in sections if section.figure)


def write_report(
    folder: Path, title: str, lead: str, sections: Sequence[Section], files: Mapping[str, str]
) -> str:
    """Write Markdown, HTML, figures and further files; return the Markdown and where they lie.

    Raises:
        PolyvisionError: the folder cannot be written.
    """
    text = as_markdown(title, lead, sections)
    texts = {"report.md": text, "report.html": as_html(title, lead, sections), **files}
    contents = {name: each.encode() for name, each in texts.items()} | _figures(sections)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            (folder / name).write_bytes(content)
    except OSError as error:
        raise PolyvisionError(f"--output: cannot write {folder}: {error.strerror}") from error
    return f"{text}\nWritten to {folder}: {', '.join(contents)}"
