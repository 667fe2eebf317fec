"""The largest memory that a piece of work takes, in a process of its own."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

__all__ = ["added_peak", "in_own_process"]


def _process_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"no {field} in /proc/self/status")


def added_peak(work: Callable[[], object], device: str = "cpu") -> int | None:
    """Return the most bytes in use during ``work()`` less those in use before it.

    Bytes of tensors on a GPU, else of the process; None where the system does not tell.
    ``ru_maxrss`` would not do: a process starts with the peak of the one that started it.
    """
    gc.collect()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        return torch.cuda.max_memory_allocated() - before
    try:
        Path("/proc/self/clear_refs").write_text(
            "5", encoding="utf-8"
        )  # the peak is now what is in use
    except OSError:
        work()
        return None
    before = _process_bytes("VmRSS")
    work()
    return _process_bytes("VmHWM") - before


def in_own_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return ``function(*arguments)``, computed in a fresh process with as many threads."""
    with multiprocessing.get_context("spawn").Pool(
        1, initializer=torch.set_num_threads, initargs=(torch.get_num_threads(),)
    ) as pool:
        return pool.apply(function, arguments)
