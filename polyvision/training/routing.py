"""How a mixture of experts shares its tokens out: scalars in training, the load as a picture."""

from __future__ import annotations

from typing import Any, cast

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from matplotlib.figure import Figure
from torch import Tensor

from polyvision.models.router import Routing
from polyvision.training.callbacks import tensorboard

__all__ = ["RoutingMonitor", "load_figure", "routing_scalars"]


def routing_scalars(routing: Routing) -> dict[str, float]:
    """Return the tags of a model's routing.

    ``train/load_balance`` (1 when balanced) and ``train/router_z`` are means over the layers,
    before their weights. Per layer, ``router/<layer>/entropy`` is in nats,
    ``router/<layer>/busiest`` the largest load relative to an equal share, and
    ``router/<layer>/idle`` the number of experts without a token.

    Args:
        routing: records with a first dimension of layers.
    """
    busiest = routing.load.amax(-1) * routing.load.shape[-1]
    idle = (routing.load == 0).sum(-1)
    values = {
        "train/load_balance": routing.balance.mean().item(),
        "train/router_z": routing.z.mean().item(),
    }
    columns = {"entropy": routing.entropy, "busiest": busiest, "idle": idle}
    for name, column in columns.items():
        for layer, value in enumerate(column.tolist()):
            values[f"router/blocks.{layer}/{name}"] = float(value)
    return values


def load_figure(load: Tensor) -> Figure:
    """Draw each expert's load (layers, experts), relative to an equal share."""
    relative = (load * load.shape[1]).cpu().float().numpy()
    figure = Figure(figsize=(2 + 0.12 * load.shape[1], 1.6 + 0.2 * load.shape[0]))
    axes = figure.subplots()
    image = axes.imshow(relative, cmap="viridis", vmin=0, aspect="auto")
    axes.set_xlabel("expert")
    axes.set_ylabel("layer")
    figure.colorbar(image, label="load / equal share")
    figure.tight_layout()
    return figure


class RoutingMonitor(Callback):
    """Log the routing of a batch, over all ranks, as often as the loss; its load at validations."""

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write the scalars of this batch; reading them waits for the GPU, so not at each step."""
        due = trainer.global_step % trainer.log_every_n_steps == 0  # type: ignore[attr-defined]
        routing = _routing_of(pl_module)
        if routing is None or not due:
            return
        scalars = routing_scalars(_over_ranks(routing, trainer))
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.log_metrics(scalars, trainer.global_step)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw the load of the last training batch."""
        routing, writer = _routing_of(pl_module), tensorboard(trainer)
        if routing is None:
            return
        load = _over_ranks(routing, trainer).load
        if writer is not None:
            writer.add_figure("router/load", load_figure(load), trainer.global_step)


def _over_ranks(routing: Routing, trainer: Trainer) -> Routing:
    """Average over the ranks, which have as many tokens each; all of them call it together."""
    if trainer.world_size == 1:
        return routing
    reduce = trainer.strategy.reduce
    return Routing(*(cast(Tensor, reduce(v.clone(), reduce_op="mean")) for v in routing))


def _routing_of(pl_module: LightningModule) -> Routing | None:
    routing: Routing | None = getattr(pl_module, "routing", None)
    return routing
