"""Overrides of a command line, ``key=value``: the one place that reads them.

Hydra's own parser does the work: ``key=a,b`` asks for a run with each value, ``+key`` and ``++key``
add a key, ``~key`` takes it away.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterable

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from polyvision.errors import PolyvisionError

__all__ = [
    "check_validation",
    "choices",
    "combinations",
    "given_keys",
    "parse",
    "quoted",
    "readable",
]

# What validation takes from the weights, or has no use for.
_NOT_BESIDE_VALIDATE = ("model", "act", "experiment", "finetune", "resume", "analysis", "dry_run")
_OF_RECIPE = "recipe.batch_size"
# A formula has parentheses and commas, which Hydra reads as its own unless they are in quotes.
_FORMULA = re.compile(r"(act\.f=)(?!['\"])(.+)", re.DOTALL)


def parse(overrides: Iterable[str]) -> list[Override]:
    """Read overrides.

    Raises:
        PolyvisionError: a line for each one that cannot be read.
    """
    problems: list[str] = []
    parsed = readable(overrides, problems)
    if problems:
        raise PolyvisionError("\n".join(problems))
    return parsed


def readable(overrides: Iterable[str], problems: list[str]) -> list[Override]:
    """Read the overrides that can be read; append a line to ``problems`` for each other one."""
    parser = OverridesParser.create()
    parsed = []
    for text in overrides:
        try:
            parsed.extend(parser.parse_overrides([_FORMULA.sub(_in_quotes, text)]))
        except HydraException:
            problems.append(f"cannot read {text!r}: {_advice(text)}")
    return parsed


def _in_quotes(formula: re.Match[str]) -> str:
    text = formula[2].replace("\\", "\\\\").replace('"', '\\"')
    return f'{formula[1]}"{text}"'


def _advice(text: str) -> str:
    key, equals, value = text.partition("=")
    if equals and re.fullmatch(r"[+~]*\w[\w./@]*", key, re.ASCII) and not set("'\"") & set(value):
        given = f'{key}="{value}"'
        return f"Hydra wants quotes around such a value, in the shell {shlex.quote(given)}"
    return "write key=value, such as seed=1"


def choices(override: Override) -> list[str]:
    """Return the override as text, once for each value that it asks for."""
    line = str(override.input_line)
    if not override.is_sweep_override():
        return [line]
    return [f"{line.partition('=')[0]}={value}" for value in override.sweep_string_iterator()]


def combinations(overrides: Iterable[str]) -> list[list[str]]:
    """Return the overrides of each run that ``key=a,b`` asks for.

    Raises:
        PolyvisionError: an override that cannot be read.
    """
    return [list(run) for run in itertools.product(*map(choices, parse(overrides)))]


def given_keys(overrides: Iterable[str]) -> set[str]:
    """Return the keys and groups that overrides set: ``+data.options.x=1`` gives its dotted key.

    Raises:
        PolyvisionError: an override that cannot be read.
    """
    return {override.key_or_group for override in parse(overrides)}


def quoted(text: str) -> str:
    """Return a value of an override as Hydra reads it back, quoted where it must be."""
    if re.fullmatch(r"[\w./~-]+", text, re.ASCII):
        return text
    return "'" + re.sub(r"(\\*)('|$)", lambda m: 2 * m[1] + (m[2] and "\\'"), text) + "'"


def check_validation(overrides: Iterable[str]) -> None:
    """Refuse what ``validate=`` would not use.

    Raises:
        PolyvisionError: the network, or how it is trained, is given as well.
    """
    wrong = [
        str(override.input_line)
        for override in parse(overrides)
        if (group := override.key_or_group.partition(".")[0]) in _NOT_BESIDE_VALIDATE
        or (group == "recipe" and override.key_or_group != _OF_RECIPE)
    ]
    if wrong:
        raise PolyvisionError(
            f"validate= takes network and activation from the weights and trains nothing: leave "
            f"out {', '.join(wrong)}. It uses data=, {_OF_RECIPE}, precision, trainer.accelerator"
        )
