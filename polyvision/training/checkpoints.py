"""When checkpoints are written: ``last`` holds the whole state, ``best`` the best weights."""

from __future__ import annotations

import math
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import SIGTERMException

from polyvision.training.run import Run

__all__ = ["Checkpoints"]


class Checkpoints(Callback):
    """Save after each validation, every ``every_n_steps`` optimizer steps, and on SIGTERM.

    Args:
        run: where to save.
        monitor: the validation metric that ``best`` follows.
        mode: ``max`` or ``min``.
        every_n_steps: optimizer steps between further saves; None for none.
    """

    def __init__(self, run: Run, monitor: str, mode: str, every_n_steps: int | None) -> None:
        self.run = run
        self.monitor = monitor
        self.sign = 1.0 if mode == "max" else -1.0
        self.every_n_steps = every_n_steps
        self.best: float | None = None
        self._saved_step = -1

    def state_dict(self) -> dict[str, Any]:
        """Return the best value so far."""
        return {"best": self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the best value so far."""
        self.best = state_dict["best"]

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Update ``best`` if the metric improved, then ``last``."""
        value = float(trainer.callback_metrics[self.monitor])
        # A NaN never counts as best, nor does it keep later values from it.
        if math.isfinite(value) and (self.best is None or self.sign * (value - self.best) > 0):
            self.best = value
            trainer.save_checkpoint(self.run.best, weights_only=True)
        self._save(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count from the step that the run goes on from."""
        self._saved_step = trainer.global_step

    def between_steps(self, trainer: Trainer) -> None:
        """Save at every n-th optimizer step, once; one later if that is the last of an epoch.

        Lightning writes the metrics of a step after its last hook, ``on_train_batch_end``. A run
        that is killed in between and goes on from that step would never write them.
        """
        n = self.every_n_steps
        if n and trainer.global_step // n > self._saved_step // n:
            self._save(trainer)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Save when the scheduler of a cluster ends the job; Lightning raises between steps."""
        if isinstance(exception, SIGTERMException):
            self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        self._saved_step = trainer.global_step
        trainer.save_checkpoint(self.run.last, weights_only=False)
