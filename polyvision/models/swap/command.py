"""What ``polyvision swap-report MODEL`` prints: the table of a swap, made without data."""

from __future__ import annotations

import argparse

from polyvision.errors import PolyvisionError
from polyvision.models.swap.replace import swap_activations
from polyvision.models.swap.sites import ROLES
from polyvision.models.swap.zoo import build_empty
from polyvision.models.trace.inputs import image_inputs

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``polyvision swap-report``."""
    parser.add_argument(
        "model", help="timm name, torchvision:<name> or transformers:<model type>, e.g. resnet50"
    )
    parser.add_argument("--act", default="polynorm", help="activation (default: polynorm)")
    selection = f"a role ({', '.join(ROLES)}) or a name pattern"
    parser.add_argument("--include", nargs="+", help=f"replace only these: {selection}")
    parser.add_argument("--exclude", nargs="+", help=f"keep these: {selection}")
    parser.add_argument("--image-size", type=int, help="height and width of the images in pixels")


def run(arguments: argparse.Namespace) -> str:
    """Return the table; what is left over is listed in it."""
    if arguments.image_size is not None and arguments.image_size < 1:
        raise PolyvisionError(f"--image-size must be 1 or more, got {arguments.image_size}")
    model = build_empty(arguments.model)
    size = arguments.image_size
    report = swap_activations(
        model,
        arguments.act,
        inputs=None if size is None else image_inputs(model, size),
        include=arguments.include,
        exclude=arguments.exclude,
        on_leftover="ignore",
    )
    return str(report)
