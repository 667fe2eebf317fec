"""The device that a command computes on."""

from __future__ import annotations

import argparse

import torch

from polyvision.errors import PolyvisionError

__all__ = ["add_device_argument", "pick_device"]


def add_device_argument(parser: argparse.ArgumentParser) -> None:
    """Declare ``--device``, whose value ``pick_device`` takes."""
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")


def pick_device(asked: str) -> torch.device:
    """Resolve ``auto``, ``cpu`` or ``cuda``.

    Raises:
        PolyvisionError: there is no such device.
    """
    available = torch.cuda.is_available()
    if asked == "cuda" and not available:
        raise PolyvisionError("--device cuda: no GPU is visible here; use cpu or auto")
    return torch.device("cuda" if available and asked != "cpu" else "cpu")
