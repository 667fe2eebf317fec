"""Pages of the site that are made from the code: front page, changelog, reference.

MkDocs calls ``on_files`` (a hook named in mkdocs.yml). Nothing is written into ``docs/``.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import inspect
import itertools
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
# Files beside docs/ that are pages of the site, under these names.
AT_THE_TOP = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    pages = {page: _from_the_top(name) for name, page in AT_THE_TOP.items()}
    pages |= {
        "reference/functions.md": _members("Functions", "polyvision.functional"),
        "reference/activations.md": _activations(),
        "reference/gallery.md": _gallery(),
        "reference/models.md": _models(),
        "reference/commands.md": _commands(),
        "reference/settings.md": _settings(),
    }
    for page, text in pages.items():
        files.append(File.generated(config, page, content=text))
    for name, curve in _curves().items():
        files.append(File.generated(config, f"reference/gallery/{name}.svg", content=curve))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links that leave ``docs/`` to the pages made from those files."""
    up = "../" * page.file.src_uri.count("/")
    for name, made in AT_THE_TOP.items():
        markdown = markdown.replace(f"]({up}../{name}", f"]({up}{made}")
    return markdown


def _from_the_top(name: str) -> str:
    text = (ROOT / name).read_text(encoding="utf-8")
    text = re.sub(r"\]\(docs/", "](", text)
    for other, page in AT_THE_TOP.items():
        text = text.replace(f"]({other}", f"]({page}")
    # Other files of the repository are named, not linked.
    return re.sub(
        r"\[([^]]+)\]\((?!\w+:|#)(?![\w/-]+\.(?:md|png|html))[^)]*\)|"
        r"\[([^]]+)\]\((?:polyvision|tests|benchmarks)/[^)]*\)",
        lambda m: m[1] or m[2],
        text,
    )


def _members(title: str, module: str) -> str:
    names = importlib.import_module(module).__all__
    return f"# {title}\n\n" + "\n".join(f"::: {module}.{name}\n" for name in names)


def _activations() -> str:
    registry = importlib.import_module("polyvision.activations")
    rows = []
    for name in registry.activation_names():
        info = registry.activation_info(name)
        options = ", ".join(f"`{k}={v!r}`" for k, v in dataclasses.asdict(info.options()).items())
        source, _, link = info.source.partition(", http")
        source = f"[{source}](http{link})" if link else source
        rows.append(f"| `{name}` | `{info.formula}` | {info.kind} | {options or '-'} | {source} |")
    head = "# Activations\n\n| `act=` | formula | kind | options | source |\n|---|---|---|---|---|"
    return "\n".join([head, *rows]) + "\n\n" + _members("", "polyvision.activations")[3:]


# Filters the rows of the table by what is typed.
_SEARCH = """<input type="search" placeholder="name, formula, kind, author ..." aria-label="search"
 style="width: 100%; border: 1px solid; padding: .4em" oninput="
 const words = this.value.toLowerCase().split(' ');
 document.querySelectorAll('.md-content tbody tr').forEach(row => row.hidden =
 !words.every(word => row.textContent.toLowerCase().includes(word)))">"""


def _names() -> list[str]:
    names: list[str] = importlib.import_module("polyvision.activations").activation_names()
    return names


def _gallery() -> str:
    """Return a table of all activations, each with what is measured on it now."""
    facts_of = importlib.import_module("polyvision.analysis.catalogue.facts").facts_of
    rows = []
    for name in _names():
        facts = facts_of(name)
        cells = [
            f"**`{name}`**<br>{facts.kind}",
            f"![value and derivative of {name}](gallery/{name}.svg)",
            f"`{facts.formula}`<br>{facts.source.partition(', http')[0]}",
            "<br>".join(f"`{k}` {v}" for k, v in facts.parameters.items()) or "none",
            facts.fp16_text,
            f"{facts.kept:.3g}",
        ]
        rows.append("| " + " | ".join(cell.replace("|", "&#124;") for cell in cells) + " |")
    head = (
        "# Gallery\n\nEvery registered activation with its default options. The curves run over "
        "-4 to 4; a gated one is drawn over its gate, with 1 as the other input, and a normalising "
        "one maps the whole interval as one row. *fp16*: inputs up to this power of two give "
        "finite outputs. *Bytes kept*: for each fp32 element, until the backward pass; ReLU keeps "
        "4. Time beside ReLU: not measured here; `python -m benchmarks.activations` measures it on "
        "your machine. `polyvision activations NAME` shows the same in a terminal.\n"
    )
    table = "| name | curve | formula | parameters | fp16 | bytes kept |\n|---|---|---|---|---|---|"
    return "\n".join([head, _SEARCH, "", table, *rows]) + "\n"


def _curves() -> dict[str, bytes]:
    facts = importlib.import_module("polyvision.analysis.catalogue.facts")
    return {name: facts.picture(facts.draw(name)) for name in _names()}


def _models() -> str:
    names = ("swap_activations", "load_model", "load_pretrained", "PolyvisionError")
    return "# Networks\n\n" + "\n".join(f"::: polyvision.{name}\n" for name in names)


def _commands() -> str:
    cli = importlib.import_module("polyvision.cli")
    parts = ["# Commands\n\n`polyvision COMMAND`, or `python -m polyvision COMMAND`.\n"]
    for name in cli.COMMANDS:
        parser = cli.command_parser(name)
        parser.formatter_class = lambda prog: argparse.HelpFormatter(prog, width=100)
        parts.append(f"## {name}\n\n```\n{parser.format_help().rstrip()}\n```\n")
    return "\n".join(parts)


def _settings() -> str:
    """Return every key of both trainers: type, default, meaning."""
    schema = importlib.import_module("polyvision.training.config.schema")
    compose = importlib.import_module("polyvision.training.config.compose")
    parts = [
        "# Settings\n\nEvery key of `train_vision.py` and `train_lm.py`, as `key=value` on the "
        "command line. Defaults are those of the script without arguments.\n"
    ]
    for task, script in compose.SCRIPTS.items():
        default = compose.compose(task, [])[0]
        parts.append(f"## {script}.py\n")
        parts.append("| key | type | default | meaning |\n|---|---|---|---|")
        parts += _rows(schema, default, "")
        parts.append("")
    return "\n".join(parts)


def _rows(schema: Any, node: Any, path: str) -> Iterator[str]:
    hints = get_type_hints(type(node), include_extras=True)
    meanings = _meanings(type(node))
    for field in dataclasses.fields(node):
        value, key = getattr(node, field.name), f"{path}{field.name}"
        if dataclasses.is_dataclass(value) and not isinstance(value, schema.ActivationConfig):
            yield from _rows(schema, value, f"{key}.")
            continue
        shown = value.name if isinstance(value, schema.ActivationConfig) else value
        meaning = " ".join(meanings.get(field.name, "").split()).replace("|", "\\|")
        yield f"| `{key}` | {_type(hints[field.name])} | `{shown}` | {meaning} |"


def _meanings(cls: type) -> dict[str, str]:
    """Return the string below each field of a dataclass and of its bases."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body  # type: ignore[attr-defined]
        for before, after in itertools.pairwise(body):
            text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            if isinstance(before, ast.AnnAssign) and text:
                found[before.target.id] = str(after.value.value)  # type: ignore[union-attr,attr-defined]
    return found


def _type(hint: Any) -> str:
    from polyvision.typed import describe

    return describe(hint).replace("|", "\\|")
