"""The Lightning module that both tasks share: seeds, optimizer, schedule, clipping, guards."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn

from polyvision.activations import activation_modules
from polyvision.errors import some
from polyvision.training.config.schema import RecipeConfig
from polyvision.training.loading.loader import TrainLoader
from polyvision.training.loading.seeding import seed_all
from polyvision.training.loop.averaging import WeightAverage, averaged_tag
from polyvision.training.loop.non_finite import (
    SMALLEST_LOSS_SCALE,
    Finding,
    NonFiniteError,
    advice,
    find_non_finite,
    non_finite_samples,
)
from polyvision.training.loop.optimization import build_optimizer, build_schedule
from polyvision.training.loop.steps import FinishedStep, StepListener, StepSums, Sums
from polyvision.training.run.checkpoint import rescale_progress

__all__ = ["TaskModule"]


class TaskModule(LightningModule):
    """Training of one model; a task adds its losses, and the metrics made of them.

    Args:
        model: the network.
        recipe: optimizer, schedule, clipping.
        seed: the run's seed.
        total_steps: optimizer steps of the whole run.
        epoch_steps: optimizer steps of an epoch.
        warmup_steps: optimizer steps of the warm-up; None for the recipe's epochs.
        schedule_steps: optimizer steps of the schedule; None for the whole run.
        named_val: names of the validation sets after the main one.

    Attributes:
        finished: the optimizer step that was done last; None before the first of this process.
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
        self.finished: FinishedStep | None = None
        self._batch: Any = None
        self._loss = torch.zeros(())  # minimised: the sum over the passes of this step
        self._passes: list[tuple[int, Tensor]] = []  # place in the epoch, loss
        self._sums = StepSums()
        self._stepped = False
        self._optimizer_values: dict[str, float] = {}
        self._listeners: list[StepListener] = []
        self._scheduled: list[Any] = []
        self._sets = ("", *named_val)
        self._totals: list[dict[str, Tensor]] = []
        decay = recipe.ema_decay
        self.average = decay and WeightAverage(model, decay, warmup=recipe.ema_warmup)

    def losses(self, batch: Any) -> tuple[Tensor, Sums]:
        """Return what training minimises, and sums over the batch for ``training_metrics``.

        The first is a mean over the batch, with all auxiliary losses.
        """
        raise NotImplementedError

    def training_metrics(self, totals: dict[str, Tensor], step: int) -> dict[str, float]:
        """Turn the sums over a whole step, all passes and ranks, into its metrics.

        ``train/loss`` is the mean of the task's own loss, without auxiliary ones.
        """
        raise NotImplementedError

    def loss(self, batch: Any) -> Tensor:
        """Return what training minimises, for one batch."""
        return self.losses(batch)[0]

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
        """Set what changes in a run from the place in it, which a resume restores.

        That is the learning rate, the random seeds, and activations with a schedule of their own.
        """
        self._schedule.step_update(self.global_step)
        for activation in self._scheduled:
            activation.set_progress(self.global_step / self.total_steps)
        self._seed(batch_idx)

    def _seed(self, batch_idx: int) -> None:
        place = ("step", self.current_epoch, batch_idx, self.global_rank)
        seed_all(self.seed, *place, cuda=self.device.type == "cuda")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Compute the loss of one batch."""
        loss, sums = self.losses(batch)
        self._sums.add(sums)
        self._batch, value = batch, loss.detach()
        self._loss = self._loss + value if self._passes else value
        self._passes.append((batch_idx, value))
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """After the last pass of a step tell the listeners, and write its metrics if it is due.

        After the last step stop; unlike ``max_steps`` alone, this validates at the end.
        """
        if not self._stepped:
            return
        self._stepped = False
        step = self.global_step
        done = self.finished = FinishedStep(step, self._due(step), self._sums)
        self._sums, self._passes = StepSums(), []
        values: dict[str, float] = {}
        for listener in self._listeners:
            values |= listener.on_step_end(self.trainer, self, done)
        if done.due:
            self._write(done, values)
        if step >= self.total_steps:
            self.trainer.should_stop = True

    def _due(self, step: int) -> bool:
        every: int = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        return step % every == 0 or step >= self.total_steps

    def _write(self, done: FinishedStep, values: dict[str, float]) -> None:
        """Write one row: what Lightning logs by itself is the last pass of the first rank."""
        metrics = self.training_metrics(done.totals(self.trainer), done.step)
        row = {**metrics, **self._optimizer_values, **values}
        if self.trainer.is_global_zero:
            for logger in self.trainer.loggers:
                logger.log_metrics(row, done.step)
                logger.save()
        # For the console and the summary; ``self.log`` would take longer than all the rest.
        shown: Any = self.trainer.callback_metrics
        shown.update(row)

    def on_fit_start(self) -> None:
        """Find listeners and scheduled activations; bring the average to the weights' device."""
        activations: Iterable[Any] = activation_modules(self.model).values()
        self._scheduled = [a for a in activations if hasattr(a, "set_progress")]
        callbacks = self.trainer.callbacks  # type: ignore[attr-defined]
        self._listeners = [c for c in callbacks if isinstance(c, StepListener)]
        if self.average:
            self.average.to(self.device)

    def optimizer_step(self, *arguments: Any, **keywords: Any) -> None:
        """Take the step, then average."""
        super().optimizer_step(*arguments, **keywords)
        self._stepped = True
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
            rescale_progress(checkpoint["loops"], then, now)
        if self.average:
            self.average.load_state_dict(checkpoint["ema"])

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip by the global norm, and stop the run before a non-finite step is taken."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        scaler = self._scaler()
        finite = bool(torch.isfinite(norm + self._loss))
        if not finite:
            self._refuse(norm, scaler)  # before clipping makes all gradients nan
        elif self.recipe.clip_grad:
            nn.utils.clip_grads_with_norm_(parameters, self.recipe.clip_grad, norm)
        if self._due(self.global_step + 1):
            self._optimizer_values = {"optim/lr": max(g["lr"] for g in optimizer.param_groups)}
            if finite:  # else the scaler skips the step
                self._optimizer_values["optim/grad_norm"] = norm.item()
            if scaler is not None:
                self._optimizer_values["optim/loss_scale"] = scaler.get_scale()

    def _refuse(self, norm: Tensor, scaler: torch.amp.GradScaler | None) -> None:
        scaled = scaler is not None and torch.isfinite(self._loss)
        if scaled and scaler is not None and scaler.get_scale() > SMALLEST_LOSS_SCALE:
            return  # the scaler sees the overflow too, skips this step and lowers its scale
        step = f"step {self.global_step}"
        finding: Finding | None = None
        for batch_idx in self._suspects():
            batch = self._again(batch_idx)
            samples = non_finite_samples(batch)
            if samples:
                raise NonFiniteError(
                    f"{step}: the data is not finite: samples {some(map(str, samples))} of the "
                    f"batch hold inf or nan. Stopped before the optimizer step"
                )
            again = functools.partial(self._repeated, batch, batch_idx)
            finding = find_non_finite(self.model, again)
            if finding is not None:
                break
        reason = "the loss scale collapsed" if scaled else "a value is not finite"
        where = finding.place if finding else "all values of this device's batches are finite"
        narrow = not self.trainer.precision_plugin.precision.startswith("32")
        hint = advice(finding, self.model, step=self.global_step, narrow=narrow)
        raise NonFiniteError(
            f"{step}: {reason} (loss {self._loss.item() / len(self._passes)}, gradient norm "
            f"{norm.item()}; {where}). Stopped before the optimizer step. {hint}"
        )

    def _suspects(self) -> list[int]:
        """Return the places of this step's batches in the epoch, those with a bad loss first."""
        return [i for i, _ in sorted(self._passes, key=lambda each: bool(each[1].isfinite()))]

    def _again(self, batch_idx: int) -> Any:
        """Return a batch of this step; all but the last are made again rather than kept."""
        loader = self.trainer.train_dataloader
        if batch_idx == self._passes[-1][0] or not isinstance(loader, TrainLoader):
            return self._batch
        return self.trainer.strategy.batch_to_device(loader.batch_at(batch_idx))

    def _repeated(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss of a batch as it was, its random numbers and its scale included."""
        self._seed(batch_idx)
        scaler = self._scaler()
        with self.trainer.precision_plugin.forward_context():
            loss = self.loss(batch)
        return loss if scaler is None else scaler.scale(loss)

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
        # Lightning takes the x-axis from "step".
        self.log("step", float(self.global_step))
        if self.finished is not None:  # of the step that is validated, whether it was due or not
            metrics = self.training_metrics(self.finished.totals(self.trainer), self.finished.step)
            shown: Any = self.trainer.callback_metrics
            shown["train/loss"] = metrics["train/loss"]

    def _log_set(self, name: str, totals: dict[str, float]) -> None:
        own = {k: v for k, v in totals.items() if not k.startswith("ema ")}
        metrics = self.metrics(own)
        if self.average:
            averaged = {k.removeprefix("ema "): v for k, v in totals.items() if k not in own}
            metrics |= {averaged_tag(k): v for k, v in self.metrics(averaged).items()}
        # The main set has no name: val/loss. Others have: val/c4/loss.
        place = f"/{name}/" if name else "/"
        self.log_dict({k.replace("/", place): v for k, v in metrics.items()}, prog_bar=not name)
