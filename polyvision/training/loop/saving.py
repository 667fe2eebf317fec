"""When checkpoints are written: ``last`` holds the whole state, ``best`` the best weights."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn

from polyvision.analysis.metrics import higher_is_better
from polyvision.training.loop.stopping import Stopped, Stopping
from polyvision.training.run.folder import Run

__all__ = ["Checkpoints"]


class Checkpoints(Callback):
    """Save around each validation, every ``every_n_steps`` optimizer steps, and when asked to stop.

    The save before a validation keeps the steps if that fails: a run that goes on from it begins
    with the validation. The one after it, of the same step, takes its place. The checkpoint of the
    step before is kept as ``previous``, for the case that ``last`` is damaged later.

    Args:
        run: where to save.
        monitor: the validation metric that ``best`` follows.
        every_n_steps: optimizer steps between further saves; None for none.
        stopping: tells whether to stop.
        shared_batches: for each validation set the number of batches that every rank has.
    """

    def __init__(
        self,
        run: Run,
        monitor: str,
        every_n_steps: int | None,
        stopping: Stopping,
        shared_batches: Sequence[int],
    ) -> None:
        self.run = run
        self.monitor = monitor
        upwards = higher_is_better(monitor)
        assert upwards is not None, f"{monitor} has no direction in polyvision.analysis.metrics"
        self.sign = 1.0 if upwards else -1.0
        self.every_n_steps = every_n_steps
        self.stopping = stopping
        self.shared_batches = shared_batches
        self.best: float | None = None
        self.saved_step = -1
        self._last_is_sound = run.checkpoint is not None and run.checkpoint == run.last

    def state_dict(self) -> dict[str, Any]:
        """Return the best value so far, and the bytes of metrics that were written by now."""
        metrics = self.run.metrics
        return {"best": self.best, "logged": metrics.stat().st_size if metrics.exists() else 0}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the best value so far."""
        self.best = state_dict["best"]

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the steps until here; not after the last, when they are saved."""
        if trainer.state.fn == TrainerFn.FITTING and self.saved_step != trainer.global_step:
            with _validation_ahead(trainer):
                self._save(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Update ``best`` if the metric improved, then ``last``."""
        value = float(trainer.callback_metrics[self.monitor])
        # A NaN never counts as best, nor does it keep later values from it.
        if math.isfinite(value) and (self.best is None or self.sign * (value - self.best) > 0):
            self.best = value
            with self.stopping.held():
                trainer.save_checkpoint(self.run.best, weights_only=True)
        self._save(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count from the step that the run goes on from."""
        self.saved_step = trainer.global_step

    def between_steps(self, trainer: Trainer) -> None:
        """Save at every n-th optimizer step, once; one later if that is the last of an epoch.

        The loader calls it, and says why; no hook of Lightning's does.

        Raises:
            Stopped: a signal asked for it; the step is saved.
        """
        n = self.every_n_steps
        if n and trainer.global_step // n > self.saved_step // n:
            self._save(trainer)
        number = self.stopping.asked(trainer)
        if number:
            if self.saved_step != trainer.global_step:
                self._save(trainer)
            raise Stopped(128 + number)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Stop if asked to; a run that goes on from here validates the same step from the start.

        Raises:
            Stopped: a signal asked for it; the step is saved.
        """
        if batch_idx >= self.shared_batches[dataloader_idx]:
            return  # other ranks have no such batch, and could not answer
        number = self.stopping.asked(trainer)
        if not number:
            return
        with _validation_ahead(trainer):
            self._save(trainer)
        raise Stopped(128 + number)

    def _save(self, trainer: Trainer) -> None:
        # Only a whole file takes the place of another: neither is missing if this one fails.
        fresh = self.run.checkpoints / ".next.ckpt"
        with self.stopping.held():
            trainer.save_checkpoint(fresh, weights_only=False)
            if trainer.is_global_zero:
                if self._last_is_sound and self.saved_step != trainer.global_step:
                    self._keep_last()
                fresh.replace(self.run.last)
        self.saved_step = trainer.global_step
        self._last_is_sound = True

    def _keep_last(self) -> None:
        """Give the file a second name, so that ``last`` is never missing."""
        link = self.run.previous.with_name(f".{self.run.previous.name}.partial")
        try:
            link.unlink(missing_ok=True)
            os.link(self.run.last, link)
            link.replace(self.run.previous)
        except OSError:  # a file system without hard links: it is missing for a moment
            self.run.last.replace(self.run.previous)


@contextlib.contextmanager
def _validation_ahead(trainer: Trainer) -> Iterator[None]:
    """Let what is saved in the block begin with the validation that goes on, from its start."""
    if trainer.state.fn != TrainerFn.FITTING:  # after the last step: nothing else is left to do
        yield
        return
    # What Lightning calls a validation that was stopped at its first batch, and repeats.
    progress = trainer.fit_loop.epoch_loop.val_loop.batch_progress
    before = progress.state_dict()
    progress.reset()
    progress.increment_ready()
    progress.increment_started()
    try:
        yield
    finally:
        progress.load_state_dict(before)
