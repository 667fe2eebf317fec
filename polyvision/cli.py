"""The command ``polyvision <verb>``: dispatch only; each verb lives in its own room."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from polyvision.errors import PolyvisionError

__all__ = ["main"]


def _env(arguments: argparse.Namespace) -> str:
    from polyvision.kernels import describe

    return describe()


# Verb -> what it does, the function that returns the text to print. Rooms are imported when called.
_VERBS: dict[str, tuple[str, Callable[[argparse.Namespace], str]]] = {
    "env": ("print which kernels compute on this machine, and why", _env),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code: 0, or 2 for a mistake of the user."""
    parser = argparse.ArgumentParser(prog="polyvision")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="verb")
    for name, (summary, _) in _VERBS.items():
        verbs.add_parser(name, help=summary, description=summary)
    parsed = parser.parse_args(arguments)
    try:
        print(_VERBS[parsed.verb][1](parsed))
    except PolyvisionError as error:
        print(f"polyvision: {error}", file=sys.stderr)
        return 2
    return 0
