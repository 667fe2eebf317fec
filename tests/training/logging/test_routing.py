"""What a mixture of experts logs, from its record to the run's files."""

from __future__ import annotations

import json

import torch

from polyvision.models.language.router import Routing
from polyvision.training.logging.routing_monitor import load_figure, routing_scalars


def test_scalars_of_a_record() -> None:
    routing = Routing(
        balance=torch.tensor([1.0, 2.0]),
        z=torch.tensor([4.0, 6.0]),
        entropy=torch.tensor([0.5, 0.7]),
        load=torch.tensor([[0.25, 0.25, 0.25, 0.25], [0.5, 0.5, 0.0, 0.0]]),
    )
    values = routing_scalars(routing)
    assert values["train/load_balance"] == 1.5
    assert values["train/router_z"] == 5
    assert [values[f"router/blocks.{i}/busiest"] for i in (0, 1)] == [1, 2]
    assert [values[f"router/blocks.{i}/idle"] for i in (0, 1)] == [0, 2]
    assert values["router/blocks.1/entropy"] == torch.tensor(0.7).item()
    assert len(load_figure(routing.load).axes) == 2


def test_a_run_logs_its_routing_and_weighs_its_losses(train, tmp_path) -> None:
    train(
        "language",
        "model=moe_tiny",
        "model.moe.experts=4",
        "model.moe.expert_coefficients=true",
        "trainer.max_steps=2",
    )
    (metrics,) = tmp_path.rglob("metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    tags = {tag for row in rows for tag in row}
    routing = {"train/load_balance", "train/router_z", "router/blocks.0/entropy"}
    assert routing | {"router/blocks.0/busiest", "router/blocks.0/idle"} <= tags
    # One set of coefficients for each expert; their means are logged.
    assert "act/blocks.0.ffn.activation/weight_3" in tags
    assert "act/blocks.0.ffn.activation/weight_4" not in tags
    steps = [row["step"] for row in rows if "train/load_balance" in row]
    assert steps == [1, 2]
