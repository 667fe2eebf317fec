"""What ``polyvision env`` prints: which backend computes on this machine, and why."""

from __future__ import annotations

import argparse
import contextlib

import torch
from polyvision.kernels.selection import BACKENDS, VARIABLE, choose, obstacle, requested

from polyvision.files import cache_folder

__all__ = ["add_arguments", "describe", "run"]


def describe() -> str:
    """Return what ``polyvision env`` prints: the backends, which one each device gets, and why."""
    from polyvision.kernels.cpu import build

    devices = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
    request = requested()
    lines = [
        f"torch     {torch.__version__}, {torch.get_num_threads()} CPU threads",
        f"devices   {', '.join(devices)}",
        f"override  {f'{request[0]} ({request[1]})' if request else f'none ({VARIABLE})'}",
    ]
    for backend in BACKENDS:
        reasons = {device: obstacle(backend, device) for device in devices}
        usable = [device for device, reason in reasons.items() if reason is None]
        why = f"usable on {', '.join(usable)}" if usable else f"not usable: {reasons[devices[-1]]}"
        lines.append(f"{backend:<9} {why}")
    for device in devices:
        lines.append(f"{device:<9} computes with {choose(device)!r}")
    with contextlib.suppress(build.BuildError):
        lines.append(f"compiler  {build.compiler()}")
    lines.append(f"cache     {cache_folder()}")
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``polyvision env`` takes no arguments."""


def run(arguments: argparse.Namespace) -> str:
    """Return what ``polyvision env`` prints."""
    return describe()
