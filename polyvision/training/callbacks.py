"""What a run writes while it trains: throughput, learned activations, and lines for people."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, cast

import torch
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, TQDMProgressBar
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn

from polyvision.activations import activation_modules
from polyvision.training.figures import activation_curves

__all__ = ["ActivationMonitor", "Console", "Throughput", "tensorboard"]

# Histograms and curves are drawn from at most this many values of a site.
_SAMPLE = 16384


def tensorboard(trainer: Trainer) -> Any:
    """Return the TensorBoard writer of this process, or None."""
    loggers = (lo for lo in trainer.loggers if isinstance(lo, TensorBoardLogger))
    return next((lo.experiment for lo in loggers if trainer.is_global_zero), None)


def _sites(pl_module: LightningModule) -> dict[str, nn.Module]:
    return activation_modules(cast(nn.Module, pl_module.model))


class Throughput(Callback):
    """Log samples (and tokens) per second, and model FLOP utilisation where the peak is known.

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
        pl_module.log_dict(values)
        self._restart()


class ActivationMonitor(Callback):
    """At each validation: every coefficient, the learned curves, histograms of pre-activations.

    Args:
        histograms: record what reaches the sites, for histograms and curves.
    """

    def __init__(self, histograms: bool) -> None:
        self.histograms = histograms
        self._rows: dict[str, Tensor] = {}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the initial coefficients, and lay out the charts that overlay them."""
        writer = tensorboard(trainer)
        if trainer.global_step == 0:
            self._log_coefficients(trainer, pl_module)
        if writer is not None:
            names = {n.rsplit("/", 1)[1] for n in self._coefficients(pl_module)}
            charts = {n: ["Multiline", [rf"act/.*/{n}$"]] for n in sorted(names)}
            losses = {"loss": ["Multiline", ["train/loss", "val/loss"]]}
            writer.add_custom_scalars({"training": losses, "activations": charts})

    def on_validation_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Watch the sites during the first validation batch."""
        if self.histograms and batch_idx == 0 and trainer.is_global_zero:
            for name, module in _sites(pl_module).items():
                self._handles.append(module.register_forward_pre_hook(self._watch(name)))

    def on_validation_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Stop watching."""
        while self._handles:
            self._handles.pop().remove()

    def _watch(self, name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0].detach()
            dim = getattr(module, "dim", -1)
            # Whole feature vectors, since a normalising activation is a function of all of them.
            rows = x.movedim(dim, -1).flatten(0, -2)
            self._rows[name] = rows[: max(1, _SAMPLE // rows.shape[-1])].float()

        return hook

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write what was seen."""
        self._log_coefficients(trainer, pl_module)
        writer = tensorboard(trainer)
        if writer is None or not self._rows:
            return
        step = trainer.global_step
        for name, rows in self._rows.items():
            values = rows[rows.isfinite()].cpu()
            if values.numel():
                writer.add_histogram(f"act/{name}/input", values, step)
        figure = activation_curves(_sites(pl_module), self._rows)
        if figure is not None:
            writer.add_figure("act/curves", figure, step)
        self._rows = {}

    def _coefficients(self, pl_module: LightningModule) -> dict[str, float]:
        values = {}
        for name, module in _sites(pl_module).items():
            for key, parameter in module.named_parameters():
                flat = parameter.detach().flatten().tolist()
                single = key == "bias" and len(flat) == 1
                for i, value in enumerate(flat, start=1):
                    values[f"act/{name}/{key}" if single else f"act/{name}/{key}_{i}"] = value
        return values

    def _log_coefficients(self, trainer: Trainer, pl_module: LightningModule) -> None:
        values = self._coefficients(pl_module)
        if values and trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.log_metrics(values, trainer.global_step)


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
