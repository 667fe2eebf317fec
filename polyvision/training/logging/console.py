"""What people see of a run while it trains."""

from __future__ import annotations

import time
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.loggers import TensorBoardLogger

from polyvision.output import duration
from polyvision.training.loop.steps import FinishedStep, StepListener
from polyvision.training.loop.throughput import Throughput

__all__ = ["Console", "tensorboard"]

# Without a bar, a line comes at least this often.
_QUIET_SECONDS = 60.0
_BAR_SECONDS = 0.1


def tensorboard(trainer: Trainer) -> Any:
    """Return the TensorBoard writer of this process, or None."""
    loggers = (lo for lo in trainer.loggers if isinstance(lo, TensorBoardLogger))
    return next((lo.experiment for lo in loggers if trainer.is_global_zero), None)


class Console(TQDMProgressBar, StepListener):
    """A progress bar on a terminal, and lines: one per validation, without a bar one a minute too.

    Args:
        throughput: measures the run.
        metrics: the metrics to print, in order.
        interactive: draw the bar.
    """

    def __init__(self, throughput: Throughput, metrics: list[str], interactive: bool) -> None:
        super().__init__(leave=False)
        self.throughput = throughput
        self.metrics = metrics
        self._interactive = interactive
        self._start, self._first_step, self._printed, self._drawn = 0.0, 0, 0.0, 0.0

    @property
    def is_disabled(self) -> bool:
        """Whether no bar is drawn."""
        return not self._interactive or super().is_disabled

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """Add the rates to what the bar shows."""
        shown: dict[str, Any] = super().get_metrics(trainer, pl_module)
        shown.pop("v_num", None)
        if (loss := trainer.callback_metrics.get("train/loss")) is not None:
            shown["train/loss"] = f"{loss:.4f}"
        line = self.throughput.line()
        return {**shown, "speed": line} if line else shown

    def _should_update(self, current: int, total: int) -> bool:
        """Draw the bar ten times a second at most: to draw it takes longer than a short step."""
        due = time.monotonic() - self._drawn >= _BAR_SECONDS or current == total
        if self.is_disabled or not due:
            return False
        self._drawn = time.monotonic()
        return True

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        super().on_train_start(trainer, pl_module)
        self._start = self._printed = time.monotonic()
        self._first_step = trainer.global_step

    def on_step_end(
        self, trainer: Trainer, pl_module: LightningModule, done: FinishedStep
    ) -> dict[str, float]:
        """Say every minute that the run goes on, where no bar does."""
        if self.is_disabled and time.monotonic() - self._printed >= _QUIET_SECONDS:
            self._print_line(trainer, ["train/loss"])
        return {}

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print where the run stands."""
        super().on_validation_end(trainer, pl_module)
        if trainer.global_step != self._first_step:
            self._print_line(trainer, self.metrics)

    def _print_line(self, trainer: Trainer, metrics: list[str]) -> None:
        self._printed = time.monotonic()
        if not trainer.is_global_zero:
            return
        step, total = trainer.global_step, self.throughput.total_steps
        values = trainer.callback_metrics
        parts = [
            f"epoch {trainer.current_epoch + 1}",
            f"step {step}/{total}",
            *(f"{m} {values[m]:.4f}" for m in metrics if m in values),
            self.throughput.line(),
            f"elapsed {duration(time.monotonic() - self._start)}",
            f"left {duration(self.throughput.left(step))}",
        ]
        self.print("  ".join(part for part in parts if part))

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print above the bar, or plainly where there is none."""
        if self.is_disabled:
            print(*args, flush=True)
        else:
            super().print(*args, **kwargs)
