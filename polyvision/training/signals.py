"""The signals that ask a program to end, and handlers for them that last as long as a block."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["ENDING", "handling"]

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
