"""``polyvision activations``: the registered activations, and one of them with its curve."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import get_args

from polyvision.activations import activation_info, activation_names, activation_origin
from polyvision.activations.registry import Kind
from polyvision.analysis.catalogue.facts import Facts, draw, facts_of, in_terminal, save
from polyvision.errors import PolyvisionError

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument("name", nargs="?", help="show this one; without it, list all")
    parser.add_argument(
        "--kind",
        choices=get_args(Kind),
        help="list those of one kind",
    )
    parser.add_argument(
        "--output", type=Path, help="write the curve of NAME as .png or .svg, in place of the text"
    )


def run(arguments: argparse.Namespace) -> str:
    """Return the list, or what is known of one.

    Raises:
        PolyvisionError: there is no such activation, or the picture cannot be written.
    """
    if arguments.name is None:
        if arguments.output is not None:
            raise PolyvisionError("--output draws one activation: give its name")
        return _list(activation_names(*([arguments.kind] if arguments.kind else [])))
    if arguments.kind is not None:
        raise PolyvisionError(f"--kind is for the list: leave it out to show {arguments.name}")
    facts = facts_of(arguments.name)
    if arguments.output is None:
        return f"{_text(facts)}\n\n{in_terminal(facts.name)}"
    save(draw(facts.name), arguments.output)
    return f"{_text(facts)}\n\nwritten: {arguments.output}"


def _list(names: list[str]) -> str:
    rows = [("act=", "kind", "options", "formula", "source")]
    kinds = get_args(Kind)
    for name in sorted(names, key=lambda n: (kinds.index(activation_info(n).kind), n)):
        info = activation_info(name)
        options = ", ".join(f"{k}={v}" for k, v in dataclasses.asdict(info.options()).items())
        source = activation_origin(name) or info.source.partition(", http")[0]
        rows.append((name, info.kind, options or "-", info.formula, source))
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    lines = [
        f"{name:<{widths[0]}}  {kind:<{widths[1]}}  {formula} | {options} | {source}"
        for name, kind, options, formula, source in rows
    ]
    return "\n".join(
        [*lines, f"{len(rows) - 1} activations; polyvision activations NAME shows one"]
    )


def _text(facts: Facts) -> str:
    rows = {
        "kind": facts.kind,
        "formula": facts.formula,
        "source": facts.source,
        "registered by": facts.origin or "polyvision",
        "options": ", ".join(f"act.{k}={v}" for k, v in facts.options.items()) or "none",
        "parameters": "; ".join(f"{k} {v}" for k, v in facts.parameters.items()) or "none",
        "finite in fp16": facts.fp16_text,
        "bytes kept": f"{facts.kept:.3g} for each fp32 element (ReLU keeps 4)",
    }
    lines = [f"{label:<15}{value}" for label, value in rows.items()]
    return "\n".join([facts.name, *lines, "", facts.doc])
