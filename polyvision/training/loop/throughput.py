"""How fast a run is, and what holds it up: rates, waiting for data, time left, memory."""

from __future__ import annotations

import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch import LightningModule, Trainer

from polyvision.output import count
from polyvision.training.loop.steps import FinishedStep, StepListener

__all__ = ["Throughput"]


class Throughput(StepListener):
    """Log samples and tokens per second, FLOP utilisation where the peak is known, and memory.

    ``perf/data_wait`` is the share of the time in which the loop waited for its next batch (without
    workers: made it). ``perf/eta_s`` is the time that the steps left take at the run's pace so far,
    validation included. ``perf/peak_memory_gib`` is the largest amount so far: on a GPU that of
    tensors, otherwise that of the whole process, libraries and data included; it is left out where
    the system tells none.

    Rates are those since the last step that was due, also over the end of an epoch. Their clock
    stands still from the start of a validation, an analysis or a save until the next batch comes,
    so figures, samples of text and ``best.ckpt`` do not count; the wait for that batch does.

    Args:
        batch_size: samples per pass of all ranks.
        tokens_per_sample: tokens of a sample; None for images.
        flops_per_sample: forward and backward FLOPs of one sample (three times the forward pass).
        dtype: the compute dtype that the peak is looked up for.
        total_steps: optimizer steps of the whole run.
        waited: tells the seconds spent so far on waiting for data.
    """

    def __init__(
        self,
        batch_size: int,
        tokens_per_sample: int | None,
        flops_per_sample: float,
        dtype: torch.dtype,
        total_steps: int,
        waited: Callable[[], float],
    ) -> None:
        self.batch_size = batch_size
        self.tokens_per_sample = tokens_per_sample
        self.flops_per_sample = flops_per_sample
        self.dtype = dtype
        self.total_steps = total_steps
        self.waited = waited
        self.measured: list[dict[str, float]] = []
        self._passes = 0
        self._start = self._waited = self._begin = 0.0
        # When the clock was stopped, and what had been waited by then; None while it runs.
        self._stopped: tuple[float, float] | None = None
        self._first_step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock of the estimate; that of the rates starts with the first batch."""
        self._begin, self._first_step = time.perf_counter(), trainer.global_step
        self._restart()
        self.pause(pl_module.device)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Let the clock go on."""
        if self._stopped is not None:
            (since, waited), self._stopped = self._stopped, None
            self._start += time.perf_counter() - since - (self.waited() - waited)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock."""
        self.pause(pl_module.device)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Stop the clock."""
        self.pause(pl_module.device)

    def pause(self, device: torch.device) -> None:
        """Stop the clock of the rates until the next batch; what the GPU has yet to do counts."""
        if self._stopped is None:
            _wait_for(device)
            self._stopped = (time.perf_counter(), self.waited())

    def _restart(self) -> None:
        self._passes, self._start, self._waited = 0, time.perf_counter(), self.waited()

    def on_step_end(
        self, trainer: Trainer, pl_module: LightningModule, done: FinishedStep
    ) -> dict[str, float]:
        """Return the rates since the last step that was due."""
        self._passes += done.passes
        if not done.due:
            return {}
        _wait_for(pl_module.device)
        seconds = time.perf_counter() - self._start
        rate = self._passes * self.batch_size / seconds
        values = {"perf/samples_per_s": rate}
        if self.tokens_per_sample is not None:
            values["perf/tokens_per_s"] = rate * self.tokens_per_sample
        values["perf/data_wait"] = (self.waited() - self._waited) / seconds
        values["perf/eta_s"] = self.left(done.step)
        peak = get_available_flops(pl_module.device, self.dtype)
        if peak:
            values["perf/mfu"] = rate * self.flops_per_sample / (peak * trainer.world_size)
        memory = _peak_memory(pl_module.device)
        if memory is not None:
            values["perf/peak_memory_gib"] = memory / 2**30
        self.measured.append(values)
        self._restart()
        return values

    def left(self, step: int) -> float:
        """Return the seconds that the steps after ``step`` take at the pace so far."""
        done = max(step - self._first_step, 1)
        return max(self.total_steps - step, 0) * (time.perf_counter() - self._begin) / done

    def medians(self) -> dict[str, float]:
        """Return the median of each rate; the first measurement warms up and does not count."""
        rows = self.measured[1:] or self.measured
        names = [name for name in (rows[0] if rows else {}) if name != "perf/eta_s"]
        return {name: statistics.median(row[name] for row in rows) for name in names}

    def line(self) -> str:
        """Return the last measurement for people; nothing before the first."""
        if not self.measured:
            return ""
        last = self.measured[-1]
        unit = "samples" if self.tokens_per_sample is None else "tokens"
        memory = last.get("perf/peak_memory_gib")
        return (
            f"{count(last[f'perf/{unit}_per_s'])} {unit}/s  "
            f"data wait {last['perf/data_wait']:.0%}"
            + ("" if memory is None else f"  memory {memory:.2f} GiB")
        )


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _peak_memory(device: torch.device) -> int | None:
    """Return the largest number of bytes in use so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return None
    status = Path("/proc/self/status")  # on Linux, where ru_maxrss begins with the parent's peak
    own = re.search(
        r"VmHWM:\s*(\d+) kB", status.read_text(encoding="utf-8") if status.exists() else ""
    )
    if own:
        return int(own[1]) * 1024
    import resource  # not on Windows

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
