"""What a run writes while it trains: throughput, memory, and lines for people."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, TQDMProgressBar
from lightning.pytorch.loggers import TensorBoardLogger

__all__ = ["Console", "Throughput", "tensorboard"]


def tensorboard(trainer: Trainer) -> Any:
    """Return the TensorBoard writer of this process, or None."""
    loggers = (lo for lo in trainer.loggers if isinstance(lo, TensorBoardLogger))
    return next((lo.experiment for lo in loggers if trainer.is_global_zero), None)


class Throughput(Callback):
    """Log samples and tokens per second, FLOP utilisation where the peak is known, and memory.

    ``perf/peak_memory_gib`` is the largest amount so far: on a GPU that of tensors, otherwise that
    of the whole process, libraries and data included; it is left out where the system tells none.
    Time spent in validation and saving does not count.

    Args:
        batch_size: samples per batch of all ranks.
        tokens_per_sample: tokens of a sample; None for images.
        flops_per_sample: forward and backward FLOPs of one sample (three times the forward pass).
        dtype: the compute dtype that the peak is looked up for.
        every_n_steps: batches between two measurements.
    """

    def __init__(
        self,
        batch_size: int,
        tokens_per_sample: int | None,
        flops_per_sample: float,
        dtype: torch.dtype,
        every_n_steps: int,
    ) -> None:
        self.batch_size = batch_size
        self.tokens_per_sample = tokens_per_sample
        self.flops_per_sample = flops_per_sample
        self.dtype = dtype
        self.every_n_steps = every_n_steps
        self.rates: list[float] = []
        self._batches = 0
        self._start = 0.0

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start measuring."""
        self._restart()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start anew after the interruption."""
        self._restart()

    def _restart(self) -> None:
        self._batches, self._start = 0, time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the rates of the last interval."""
        self._batches += 1
        if self._batches < self.every_n_steps:
            return
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize(pl_module.device)
        rate = self._batches * self.batch_size / (time.perf_counter() - self._start)
        self.rates.append(rate)
        values = {"perf/samples_per_s": rate}
        if self.tokens_per_sample is not None:
            values["perf/tokens_per_s"] = rate * self.tokens_per_sample
        peak = get_available_flops(pl_module.device, self.dtype)
        if peak:
            values["perf/mfu"] = rate * self.flops_per_sample / (peak * trainer.world_size)
        memory = _peak_memory(pl_module.device)
        if memory is not None:
            values["perf/peak_memory_gib"] = memory / 2**30
        pl_module.log_dict(values)
        self._restart()


def _peak_memory(device: torch.device) -> int | None:
    """Return the largest number of bytes in use so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return None
    import resource  # not on Windows

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Console(TQDMProgressBar):
    """A progress bar on a terminal, and one line per validation everywhere.

    Args:
        total_steps: optimizer steps of the whole run.
        metrics: the metrics to print, in order.
        interactive: draw the bar.
    """

    def __init__(self, total_steps: int, metrics: list[str], interactive: bool) -> None:
        super().__init__(leave=False)
        self.total_steps = total_steps
        self.metrics = metrics
        self._interactive = interactive
        self._start, self._first_step = 0.0, 0

    @property
    def is_disabled(self) -> bool:
        """Whether no bar is drawn."""
        return not self._interactive or super().is_disabled

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock of the estimate."""
        super().on_train_start(trainer, pl_module)
        self._start, self._first_step = time.monotonic(), trainer.global_step

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print where the run stands."""
        super().on_validation_end(trainer, pl_module)
        step = trainer.global_step
        if not trainer.is_global_zero or step == self._first_step:
            return
        pace = (time.monotonic() - self._start) / (step - self._first_step)
        left = max(self.total_steps - step, 0) * pace
        values = trainer.callback_metrics
        shown = "  ".join(f"{m} {values[m]:.4f}" for m in self.metrics if m in values)
        self.print(
            f"epoch {trainer.current_epoch + 1}  step {step}/{self.total_steps}  {shown}  "
            f"elapsed {_clock(time.monotonic() - self._start)}  left {_clock(left)}"
        )

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print above the bar, or plainly where there is none."""
        if self.is_disabled:
            print(*args, flush=True)
        else:
            super().print(*args, **kwargs)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
