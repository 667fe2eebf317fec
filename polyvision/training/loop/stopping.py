"""Signals that ask a run to end: obeyed at the next place from which it can go on exactly.

Lightning acts on SIGTERM after any pass. That may be one of several whose gradients add up, which
no checkpoint holds, or one that a validation should follow, which then never comes. Among several
ranks it sends a message from within the signal handler, where the others may expect another one.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import Trainer

from polyvision.training.signals import handling

__all__ = ["Stopped", "Stopping"]


class Stopped(SystemExit):
    """The run ended as a signal asked, after it was saved; ``code`` is 128 + the signal."""


class Stopping:
    """Keep the first signal that asks the run to end; a second Ctrl-C ends it at once.

    Further signals change nothing: schedulers and shells repeat them.

    Attributes:
        number: the first signal; 0 for none.
        holding: a block goes on that comes to its end even under a second Ctrl-C.
    """

    def __init__(self) -> None:
        self.number = 0
        self.holding = False
        self._interrupts = 0  # a Ctrl-C after another signal is the first one

    @contextlib.contextmanager
    def listening(self, trainer: Trainer) -> Iterator[None]:
        """Receive signals while the block runs, in the place of Lightning's handlers too."""
        connector: Any = trainer._signal_connector
        connector.register_signal_handlers = lambda: None
        with handling(self._receive):
            yield

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Let the block come to its end even under a second Ctrl-C."""
        self.holding = True
        try:
            yield
        finally:
            self.holding = False

    def _receive(self, number: int, _: Any) -> None:
        said, self.number = bool(self.number), self.number or number
        if number == signal.SIGINT:
            self._interrupts += 1
            said = self._interrupts > 1
            if said and not self.holding:
                raise KeyboardInterrupt
        if not said and os.environ.get("LOCAL_RANK", "0") == "0":
            hint = ", Ctrl-C again stops at once" if number == signal.SIGINT else ""
            text = f"{signal.Signals(number).name}: stopping after this step{hint}\n"
            with contextlib.suppress(OSError):  # the terminal may be gone
                os.write(2, text.encode())  # print may be what was interrupted

    def asked(self, trainer: Trainer) -> int:
        """Return a signal that any of the ranks has received, or 0; all ranks ask together."""
        if trainer.world_size == 1:
            return self.number
        mine = torch.tensor(self.number, device=trainer.strategy.root_device)
        return int(trainer.strategy.reduce(mine, reduce_op="max"))
