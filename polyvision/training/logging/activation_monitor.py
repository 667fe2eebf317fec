"""What becomes of the activations: coefficients, learned curves, histograms of what they map."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, cast

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from polyvision.activations import activation_modules
from polyvision.analysis.figures import activation_curves
from polyvision.training.logging.console import tensorboard
from polyvision.training.logging.tensorboard import overlay_layout

__all__ = ["ActivationMonitor"]

# Histograms and curves are drawn from at most this many values of a site.
_SAMPLE = 16384
_BINS = 60
# Of longer parameters, such as a gain for each feature, mean, minimum and maximum are logged.
_SHOWN = 64


class ActivationMonitor(Callback):
    """At each validation: every coefficient, and histograms of what enters and leaves each site.

    Histograms and curves show the first batch of the main validation set, also where there are
    several sets, and the trained weights, not their average. The curves take longer to draw. They
    come at validation 1, 2, 4, 8, ... and at the last, so their number grows only with the
    logarithm of the run's length.

    Args:
        histograms: record what reaches the sites, for histograms and curves.
        total_steps: optimizer steps of the whole run.
        shown: tags of the validation metrics, for the overlay charts.
    """

    def __init__(self, histograms: bool, total_steps: int, shown: Sequence[str]) -> None:
        self.histograms = histograms
        self.total_steps = total_steps
        self.shown = shown
        self._validations = 0
        self._initial: dict[str, nn.Module] = {}
        self._inputs: dict[str, Tensor] = {}
        self._outputs: dict[str, Tensor] = {}
        self._handles: list[Any] = []

    def state_dict(self) -> dict[str, Any]:
        """Return the number of validations so far."""
        return {"validations": self._validations}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the number of validations."""
        self._validations = state_dict["validations"]

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Keep the activations as they are built, which is before a checkpoint is loaded."""
        self._initial = copy.deepcopy(_sites(pl_module))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the initial coefficients, and lay out the charts that overlay runs."""
        writer = tensorboard(trainer)
        if trainer.global_step == 0:
            self._log_coefficients(trainer, pl_module)
        if writer is not None:
            names = {n.rsplit("/", 1)[1] for n in self._coefficients(pl_module)}
            writer.add_custom_scalars(overlay_layout(self.shown, sorted(names)))

    def on_validation_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Watch the sites during the first batch of the main validation set."""
        first = batch_idx == 0 and dataloader_idx == 0
        if self.histograms and first and trainer.is_global_zero:
            for name, module in _sites(pl_module).items():
                self._handles.append(module.register_forward_hook(self._watch(name)))

    def on_validation_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Stop watching."""
        while self._handles:
            self._handles.pop().remove()

    def _watch(self, name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            dim = getattr(module, "dim", -1)
            self._inputs[name] = _rows(inputs[0], dim)
            self._outputs[name] = _rows(output, dim)

        return hook

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write what was seen."""
        self._validations += 1
        self._log_coefficients(trainer, pl_module)
        writer = tensorboard(trainer)
        if writer is None or not self._inputs:
            return
        step = trainer.global_step
        for what, seen in (("input", self._inputs), ("output", self._outputs)):
            for name, rows in seen.items():
                values = rows[rows.isfinite()]
                if values.numel():
                    # TensorBoard shows 30 equal bins of whatever it is given.
                    writer.add_histogram(f"act/{name}/{what}", values, step, bins=_BINS)
        if self._validations & (self._validations - 1) == 0 or step >= self.total_steps:
            figures = activation_curves(_sites(pl_module), self._initial, self._inputs)
            for number, figure in enumerate(figures, start=1):
                tag = "act/curves" if number == 1 else f"act/curves_{number}"
                writer.add_figure(tag, figure, step)
        self._inputs, self._outputs = {}, {}

    def _coefficients(self, pl_module: LightningModule) -> dict[str, float]:
        values = {}
        for name, module in _sites(pl_module).items():
            for key, parameter in module.named_parameters():
                value = parameter.detach()
                if value.ndim == 2 and getattr(module, "groups", None):
                    value = value.mean(0)  # over the experts
                if value.numel() > _SHOWN:
                    for what in ("mean", "min", "max"):
                        values[f"act/{name}/{key}_{what}"] = getattr(value.float(), what)().item()
                    continue
                flat = value.flatten().tolist()
                single = key == "bias" and len(flat) == 1
                for i, value in enumerate(flat, start=1):
                    values[f"act/{name}/{key}" if single else f"act/{name}/{key}_{i}"] = value
        return values

    def _log_coefficients(self, trainer: Trainer, pl_module: LightningModule) -> None:
        values = self._coefficients(pl_module)
        if values and trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.log_metrics(values, trainer.global_step)


def _sites(pl_module: LightningModule) -> dict[str, nn.Module]:
    return activation_modules(cast(nn.Module, pl_module.model))


def _rows(x: Tensor, dim: int) -> Tensor:
    """Return (rows, features): whole vectors, since a normalising activation maps them whole."""
    rows = x.detach().movedim(dim, -1).flatten(0, -2)
    return rows[: max(1, _SAMPLE // rows.shape[-1])].float()
