"""``polyvision check``: whether an activation of one's own keeps the contract of all."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable
from typing import Any, get_args

from polyvision.activations import activation_info, activation_names
from polyvision.activations.plugins import load_plugins, module_of
from polyvision.activations.registry import Kind
from polyvision.analysis.catalogue.contract import CHECKS, Subject, problem_of, subject_of
from polyvision.errors import PolyvisionError, unknown

__all__ = ["add_arguments", "run"]

_KINDS: tuple[Kind, ...] = get_args(Kind)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    width = max(map(len, CHECKS))
    checks = (f"  {name:<{width}}  {check.__doc__}" for name, check in CHECKS.items())
    parser.epilog = "\n".join(["checks:", *checks, "", "exit code 1: a check failed"])
    parser.add_argument(
        "activation",
        help="my_module:Mine, path/to/file.py:Mine (a class, or a function that builds the "
        "module), or a registered name",
    )
    parser.add_argument(
        "--kind",
        choices=_KINDS,
        help="of a class that is not registered (default: normalising if its constructor takes "
        "dim, gated if its forward takes two tensors, else pointwise)",
    )
    parser.add_argument(
        "--surrogate",
        action="store_true",
        help="it is trained with another derivative than that of its values",
    )


def run(arguments: argparse.Namespace) -> str:
    """Run every check, and return a line for each.

    Raises:
        PolyvisionError: there is no such activation, or it cannot be built at all.
        SystemExit: 1 if a check failed.
    """
    subject = _subject(arguments.activation, arguments.kind, arguments.surrogate)
    if (broken := problem_of(Subject.build, subject)) is not None:
        raise PolyvisionError(f"{subject.name}() cannot be built: {broken}")
    results = {name: problem_of(check, subject) for name, check in CHECKS.items()}
    width = max(map(len, results))
    lines = [f"{subject.name} ({subject.kind})"]
    lines += [
        f"{'ok  ' if problem is None else 'FAIL'}  {name:<{width}}  {problem or ''}".rstrip()
        for name, problem in results.items()
    ]
    failed = [name for name, problem in results.items() if problem is not None]
    if failed:
        lines.append(f"{len(failed)} of {len(results)} checks failed")
        print("\n".join(lines), flush=True)
        raise SystemExit(1)
    return "\n".join([*lines, f"all {len(results)} checks passed"])


def _subject(given: str, kind: Kind | None, surrogate: bool) -> Subject:
    place, colon, name = given.rpartition(":")
    if not colon:
        if kind is not None and given in activation_names():
            raise PolyvisionError(f"--kind is for a class, and {given} is registered: leave it out")
        if given not in activation_names() and given.endswith(".py"):
            raise PolyvisionError(f"{given}: say which class or function of it, {given}:Mine")
        subject = subject_of(given)
        return subject if not surrogate else Subject(given, subject.make, subject.kind, {}, True)
    load_plugins([place])
    module = module_of(place)
    make = getattr(module, name, None)
    for registered in activation_names():  # also one behind a name: file.py:mine
        info = activation_info(registered)
        if info.factory is make or (make is None and registered == name):
            known = subject_of(registered)
            return Subject(given, info.factory, known.kind, {}, surrogate or known.surrogate)
    if not callable(make):
        own = [key for key, value in vars(module).items() if _builds(value, module.__name__)]
        raise unknown(f"class or function of {place}", name, own)
    return Subject(given, make, kind or _kind_of(make), {}, surrogate)


def _builds(value: Any, module: str) -> bool:
    return callable(value) and getattr(value, "__module__", None) == module


def _kind_of(make: Callable[..., Any]) -> Kind:
    try:
        keywords = inspect.signature(make).parameters
        forward = inspect.signature(make().forward).parameters.values()
    except Exception:  # the checks will say it
        return "pointwise"
    if "dim" in keywords:
        return "normalising"
    needed = [p for p in forward if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    return "gated" if len(needed) == 2 else "pointwise"
