"""How a mixture of experts shares its tokens out: scalars in training, the load as a picture."""

from __future__ import annotations

from collections.abc import Mapping

from lightning.pytorch import LightningModule, Trainer
from matplotlib.figure import Figure
from torch import Tensor

from polyvision.models.language.router import Routing
from polyvision.training.logging.console import tensorboard
from polyvision.training.loop.module import TaskModule
from polyvision.training.loop.steps import FinishedStep, StepListener

__all__ = ["RoutingMonitor", "load_figure", "mean_routing", "routing_scalars", "routing_sums"]

_PREFIX = "routing/"


def routing_sums(routing: Routing, positions: int) -> dict[str, Tensor]:
    """Return the record of a pass times the tokens it routed, to be added up over a step."""
    records = routing._asdict().items()
    return {f"{_PREFIX}{name}": value.detach() * positions for name, value in records}


def mean_routing(totals: Mapping[str, Tensor]) -> Routing | None:
    """Return the mean over the tokens of a step, from its sums; None in a dense model."""
    parts = [totals.get(f"{_PREFIX}{name}") for name in Routing._fields]
    found = [part / totals["positions"] for part in parts if part is not None]
    return Routing(*found) if found else None


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


class RoutingMonitor(StepListener):
    """Log the routing of a whole step as often as its loss, and its load at validations."""

    def on_step_end(
        self, trainer: Trainer, pl_module: LightningModule, done: FinishedStep
    ) -> dict[str, float]:
        """Return the scalars of this step."""
        routing = mean_routing(done.totals(trainer)) if done.due else None
        return {} if routing is None else routing_scalars(routing)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw the load of the last step; all ranks ask for it together."""
        assert isinstance(pl_module, TaskModule)
        done, writer = pl_module.finished, tensorboard(trainer)
        routing = None if done is None else mean_routing(done.totals(trainer))
        if writer is not None and routing is not None:
            writer.add_figure("router/load", load_figure(routing.load), trainer.global_step)
