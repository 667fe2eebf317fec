"""The Lightning module that both tasks share: seeds, optimizer, schedule, clipping, guards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn

from polyvision.errors import PolyvisionError, some
from polyvision.training.averaging import WeightAverage, averaged_tag
from polyvision.training.checkpoint import split_anew
from polyvision.training.diagnose import first_non_finite, non_finite_samples
from polyvision.training.optimization import build_optimizer, build_schedule
from polyvision.training.schema import RecipeConfig
from polyvision.training.seeding import seed_all

__all__ = ["NonFiniteError", "TaskModule"]

# GradScaler halves its scale at each overflow; below this the gradients themselves overflow.
_SMALLEST_LOSS_SCALE = 2.0**-14


class NonFiniteError(PolyvisionError):
    """Training met a loss or gradient that is not finite, and stopped before using it."""


class TaskModule(LightningModule):
    """Training of one model; a task adds ``loss`` and the validation metrics.

    Args:
        model: the network.
        recipe: optimizer, schedule, clipping.
        seed: the run's seed.
        total_steps: optimizer steps of the whole run.
        epoch_steps: optimizer steps of an epoch.
        warmup_steps: optimizer steps of the warm-up; None for the recipe's epochs.
        schedule_steps: optimizer steps of the schedule; None for the whole run.
        named_val: names of the validation sets after the main one.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: RecipeConfig,
        *,
        seed: int,
        total_steps: int,
        epoch_steps: int,
        warmup_steps: float | None = None,
        schedule_steps: int | None = None,
        named_val: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.model = model
        self.recipe = recipe
        self.seed = seed
        self.total_steps = total_steps
        self.epoch_steps = epoch_steps
        self.warmup_steps = warmup_steps
        self.schedule_steps = schedule_steps or total_steps
        self._batch: Any = None
        self._loss = torch.zeros(())
        self._sets = ("", *named_val)
        self._totals: list[dict[str, Tensor]] = []
        decay = recipe.ema_decay
        self.average = decay and WeightAverage(model, decay, warmup=recipe.ema_warmup)

    def loss(self, batch: Any) -> Tensor:
        """Return the mean training loss of a batch."""
        raise NotImplementedError

    def count(self, batch: Any) -> dict[str, Tensor]:
        """Return sums over a validation batch, such as the number of hits; they are added up."""
        raise NotImplementedError

    def metrics(self, totals: dict[str, float]) -> dict[str, float]:
        """Turn the sums over a whole validation set into its metrics, such as ``val/loss``."""
        raise NotImplementedError

    # -- training ----------------------------------------------------------------------------

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Build the optimizer; the schedule is driven by the step count and has no state."""
        optimizer = build_optimizer(
            self.model, self.recipe, loss_scaling=self._scaler() is not None
        )
        self._schedule = build_schedule(
            optimizer,
            self.recipe,
            total_steps=self.schedule_steps,
            epoch_steps=self.epoch_steps,
            warmup_steps=self.warmup_steps,
        )
        return optimizer

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Set learning rate and random seeds from the place in the run, which a resume restores."""
        self._schedule.step_update(self.global_step)
        seed_all(
            self.seed,
            "step",
            self.current_epoch,
            batch_idx,
            self.global_rank,
            cuda=self.device.type == "cuda",
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Compute the loss of one batch."""
        loss = self.loss(batch)
        self._batch, self._loss = batch, loss.detach()
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Stop after the last step; unlike ``max_steps`` alone, this validates at the end."""
        if self.global_step >= self.total_steps:
            self.trainer.should_stop = True

    def on_fit_start(self) -> None:
        """Bring the average to the device of the weights."""
        if self.average:
            self.average.to(self.device)

    def optimizer_step(self, *arguments: Any, **keywords: Any) -> None:
        """Take the step, then average."""
        super().optimizer_step(*arguments, **keywords)
        if self.average:
            self.average.update(self.model, self.global_step + 1)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the averaged weights, under ``ema``, and how many passes a step has."""
        checkpoint["accumulate"] = self.recipe.accumulate
        if self.average:
            checkpoint["ema"] = self.average.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the averaged weights; go on at the same step if steps are split differently."""
        then, now = checkpoint.get("accumulate", self.recipe.accumulate), self.recipe.accumulate
        if then != now:
            split_anew(checkpoint["loops"], then, now)
        if self.average:
            self.average.load_state_dict(checkpoint["ema"])

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip by the global norm, log it, and stop the run before a non-finite step is taken."""
        limit = self.recipe.clip_grad or float("inf")
        norm = nn.utils.clip_grad_norm_(self.parameters(), limit)
        scaler = self._scaler()
        if not torch.isfinite(norm + self._loss):
            self._refuse(norm, scaler)
        # Lightning takes the x-axis from "step"; by itself it would count the first step as 0 and
        # draw validation, which comes after the step, one to the right of it.
        self.log("step", float(self.global_step + 1))
        self.log("optim/grad_norm", norm)
        self.log("optim/lr", max(group["lr"] for group in optimizer.param_groups))
        if scaler is not None:
            self.log("optim/loss_scale", scaler.get_scale())

    def _refuse(self, norm: Tensor, scaler: torch.amp.GradScaler | None) -> None:
        scaled = scaler is not None and torch.isfinite(self._loss)
        if scaled and scaler is not None and scaler.get_scale() > _SMALLEST_LOSS_SCALE:
            return  # the scaler sees the overflow too, skips this step and lowers its scale
        samples = non_finite_samples(self._batch)
        if samples:
            raise NonFiniteError(
                f"step {self.global_step}: the data is not finite: samples "
                f"{some(map(str, samples))} of the batch hold inf or nan. Stopped before the "
                f"optimizer step"
            )
        where = first_non_finite(self.model, lambda: self._forward_again(self._batch))
        reason = "the loss scale collapsed" if scaled else "a value is not finite"
        raise NonFiniteError(
            f"step {self.global_step}: {reason} (loss {self._loss.item()}, gradient norm "
            f"{norm.item()}; {where}). Stopped before the optimizer step. Try a lower recipe.lr, "
            f"recipe.clip_grad=1.0, a longer recipe.warmup_epochs or precision=32"
        )

    def _forward_again(self, batch: Any) -> Tensor:
        with self.trainer.precision_plugin.forward_context():
            return self.loss(batch)

    def _scaler(self) -> torch.amp.GradScaler | None:
        plugin = self.trainer.precision_plugin
        return plugin.scaler if isinstance(plugin, MixedPrecision) else None

    # -- validation --------------------------------------------------------------------------

    def on_validation_epoch_start(self) -> None:
        """Begin new sums, of one network: batch norms differ from rank to rank while it trains.

        A checkpoint, too, holds the first rank's.
        """
        self._totals = [{} for _ in self._sets]
        if self.trainer.world_size > 1:
            for network in (self.model, *([self.average.model] if self.average else [])):
                for buffer in network.buffers():
                    dist.broadcast(buffer, src=0)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Add one batch to the sums of its set, of the trained and of the averaged weights."""
        totals = self._totals[dataloader_idx]
        self._add(totals, "", batch)
        if self.average:
            with self._averaged(self.average.model):
                self._add(totals, "ema ", batch)

    def _add(self, totals: dict[str, Tensor], prefix: str, batch: Any) -> None:
        for name, value in self.count(batch).items():
            key, value = prefix + name, value.detach().double()
            totals[key] = totals[key] + value if key in totals else value

    @contextmanager
    def _averaged(self, averaged: nn.Module) -> Iterator[None]:
        trained, self.model = self.model, averaged
        try:
            yield
        finally:
            self.model = trained

    def on_validation_epoch_end(self) -> None:
        """Log the metrics of each whole set: exact, whatever the batches and ranks."""
        for name, totals in zip(self._sets, self._totals, strict=True):
            keys = sorted(totals)
            sums = torch.stack([totals[k] for k in keys])
            sums = self.trainer.strategy.reduce(sums, reduce_op="sum")
            self._log_set(name, dict(zip(keys, sums.tolist(), strict=True)))
        self.log("step", float(self.global_step))  # the x-axis, as in training

    def _log_set(self, name: str, totals: dict[str, float]) -> None:
        own = {k: v for k, v in totals.items() if not k.startswith("ema ")}
        metrics = self.metrics(own)
        if self.average:
            averaged = {k.removeprefix("ema "): v for k, v in totals.items() if k not in own}
            metrics |= {averaged_tag(k): v for k, v in self.metrics(averaged).items()}
        # The main set has no name: val/loss. Others have: val/c4/loss.
        place = f"/{name}/" if name else "/"
        self.log_dict({k.replace("/", place): v for k, v in metrics.items()}, prog_bar=not name)
