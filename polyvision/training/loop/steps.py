"""The end of an optimizer step, and what the step came to: the one place that tells of both.

Lightning's hooks come after each pass over a batch, and an optimizer step may have several. What
listens to training is a ``StepListener`` and hears of each step once, after its last pass.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor

__all__ = ["FinishedStep", "StepListener", "StepSums", "Sums"]

# By name: a sum over the samples or tokens of one pass.
Sums = Mapping[str, float | Tensor]


class StepSums:
    """Sums over the passes of one optimizer step; adding to them does not wait for the device."""

    def __init__(self) -> None:
        self.passes = 0
        self._sums: dict[str, float | Tensor] = {}

    def add(self, sums: Sums) -> None:
        """Add those of a pass."""
        self.passes += 1
        for name, value in sums.items():
            wide = value.detach().double() if isinstance(value, Tensor) else value
            self._sums[name] = self._sums[name] + wide if name in self._sums else wide

    def over_ranks(self, trainer: Trainer) -> dict[str, Tensor]:
        """Return the sums over all ranks, on the host. All ranks call it together; it waits."""
        device = trainer.strategy.root_device
        parts = {
            name: torch.as_tensor(value, dtype=torch.float64, device=device)
            for name, value in self._sums.items()
        }
        flat = torch.cat([part.flatten() for part in parts.values()])
        if trainer.world_size > 1:
            flat = trainer.strategy.reduce(flat, reduce_op="sum")
        split = torch.split(flat.cpu(), [part.numel() for part in parts.values()])
        return {
            name: values.view(part.shape)
            for (name, part), values in zip(parts.items(), split, strict=True)
        }


class FinishedStep:
    """An optimizer step that is done.

    Attributes:
        step: optimizer steps of the run so far, this one included.
        passes: passes over a batch that it had, on each rank.
        due: its metrics are written to the run's files.
    """

    def __init__(self, step: int, due: bool, sums: StepSums) -> None:
        self.step = step
        self.passes = sums.passes
        self.due = due
        self._sums = sums
        self._totals: dict[str, Tensor] | None = None

    def totals(self, trainer: Trainer) -> dict[str, Tensor]:
        """Return its sums over all passes and ranks, on the host.

        The first call waits for the device and for the other ranks, which call it too. So a
        listener asks only for a step that is due.
        """
        if self._totals is None:
            self._totals = self._sums.over_ranks(trainer)
        return self._totals


class StepListener(Callback):
    """A callback that hears of each optimizer step once, when it is done."""

    def on_step_end(
        self, trainer: Trainer, pl_module: LightningModule, done: FinishedStep
    ) -> dict[str, float]:
        """Return what to write beside the training loss; it is written if the step is due."""
        raise NotImplementedError
