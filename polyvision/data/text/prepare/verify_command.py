"""``polyvision verify-text``: read every byte of prepared corpora, from the command line."""

from __future__ import annotations

import argparse

from polyvision.data.text.corpus import verify_corpus
from polyvision.data.text.prepare.command import describe

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``verify-text``."""
    parser.add_argument("folders", nargs="+", metavar="DIR", help="what prepare-text wrote")


def run(arguments: argparse.Namespace) -> str:
    """Verify the folders; return what they hold."""
    tables = [describe(verify_corpus(folder)) for folder in arguments.folders]
    return "\n".join([*tables, "All checksums, token ids and document offsets are right."])
