"""Signals that ask a program to end, and child processes, to which they are passed on."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = [
    "ENDING",
    "SWEEP_VARIABLE",
    "Child",
    "command_of_this_program",
    "describe_code",
    "handling",
    "is_further_rank",
    "run_children",
]

# SIGUSR1 is what a cluster's scheduler can be told to send some time before it kills.
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")
ENDING: list[int] = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]


@contextlib.contextmanager
def handling(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Give those signals to ``handler`` while the block runs, in the main thread only.

    What is ignored stays so: nohup does that with SIGHUP, a shell's & with SIGINT.
    """
    before = {}
    if threading.current_thread() is threading.main_thread():  # no other may
        mine = [number for number in ENDING if signal.getsignal(number) != signal.SIG_IGN]
        before = {number: signal.signal(number, handler) for number in mine}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


_POLL_SECONDS = 0.05
# Set for the runs of a sweep: with resume=auto some go on, and some have not begun.
SWEEP_VARIABLE = "POLYVISION_SWEEP"


@dataclasses.dataclass(frozen=True)
class Child:
    """A command, and the file that its output is appended to (None: where ours goes)."""

    command: Sequence[str]
    log: Path | None = None


def run_children(
    children: Sequence[Child],
    slots: Sequence[Mapping[str, str]] = ({},),
    started: Callable[[int], None] = lambda number: None,
    ended: Callable[[int, int], None] = lambda number, code: None,
) -> tuple[list[int | None], int | None]:
    """Run the commands in order, as many at a time as there are slots.

    Signals that ask for an end (``signals.ENDING``) are passed on to the children, once for each
    time they arrive here: a child has a process group of its own, so the terminal's Ctrl-C does not
    reach it as well. After the first, no further command is started.

    Args:
        children: the commands.
        slots: for each place in which a command can run, variables added to its environment.
        started: called with the number of a command, from 0, before it starts.
        ended: called with its number and its exit code.

    Returns:
        The exit codes, None where a command was not started, and the first signal, or None. A child
        ended by signal s has code 128 + s, as in a shell.
    """
    codes: list[int | None] = [None] * len(children)
    waiting = list(range(len(children)))
    running: dict[int, tuple[int, subprocess.Popen[bytes]]] = {}  # slot -> (number, process)
    with _forwarding(running) as received:
        try:
            while running or (waiting and not received):
                for slot in [s for s in range(len(slots)) if s not in running]:
                    if not waiting or received:
                        break
                    number = waiting.pop(0)
                    started(number)
                    running[slot] = number, _start(children[number], slots[slot])
                    for late in received:  # one that arrived while the process was being made
                        running[slot][1].send_signal(late)
                time.sleep(_POLL_SECONDS)
                for slot, (number, process) in list(running.items()):
                    status = process.poll()
                    if status is not None:
                        del running[slot]
                        codes[number] = code = status if status >= 0 else 128 - status
                        ended(number, code)
        finally:
            for _, process in running.values():
                process.terminate()
            for _, process in running.values():
                process.wait()
    return codes, received[0] if received else None


@contextlib.contextmanager
def _forwarding(
    running: Mapping[int, tuple[int, subprocess.Popen[bytes]]],
) -> Iterator[list[int]]:
    """Pass signals on to the running processes; yield the list that they are added to."""
    received: list[int] = []

    def forward(number: int, _: Any) -> None:
        received.append(number)
        for _, process in list(running.values()):
            process.send_signal(number)

    with handling(forward):
        yield received


def _start(child: Child, variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(child.log.open("ab")) if child.log else None
        return subprocess.Popen(
            list(child.command),
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
            env={**os.environ, **variables},
            process_group=0 if os.name == "posix" else None,
        )


def command_of_this_program() -> list[str]:
    """Return how this program was started, without its arguments: by its path or by ``-m``."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return [sys.executable, *(["-m", spec.name] if spec is not None else [sys.argv[0]])]


def is_further_rank() -> bool:
    """Tell whether this process is one of a distributed run, and not its first."""
    return os.environ.get("LOCAL_RANK", "0") != "0"


def describe_code(code: int) -> str:
    """Say what an exit code means: ``exit code 2``, or the signal's name."""
    with contextlib.suppress(ValueError):
        return signal.Signals(code - 128).name
    return f"exit code {code}"
