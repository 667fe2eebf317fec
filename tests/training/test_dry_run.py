"""A dry run builds no weights, and its plan is that of the real network."""

import dataclasses

import pytest
import torch
from torch import nn

from polyvision.analysis.cost.estimate import estimate_cost
from polyvision.models.language.shape import MoEShape, TransformerShape
from polyvision.models.language.transformer import Transformer
from polyvision.models.vision.create import create_vision_model
from polyvision.models.weights.empty import empty
from polyvision.training import session
from polyvision.training.config.compose import compose
from polyvision.training.tasks import language, vision

SHAPE = TransformerShape(vocab_size=64, context=32, width=16, layers=2, heads=4, ffn_hidden=24)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape",
    [
        SHAPE,
        dataclasses.replace(SHAPE, tie_embeddings=True, qk_norm=True),
        dataclasses.replace(SHAPE, moe=MoEShape(4, 2), checkpointing=True, init_cutoff=3.0),
    ],
    ids=["dense", "tied", "mixture"],
)
def test_the_cost_of_a_language_model_needs_no_weights(shape, dtype):
    def tokens():
        return torch.zeros(2, 20, dtype=torch.long)

    without = empty(lambda: Transformer(shape), lambda model: model)
    assert {p.device.type for p in without.parameters()} == {"meta"}
    expected = estimate_cost(Transformer(shape), tokens, dtype)
    assert estimate_cost(without, tokens, dtype) == expected
    assert expected.saved_bytes > 0


@pytest.mark.parametrize("name", ["test_resnet", "test_vit", "test_convnext"])
def test_the_cost_of_an_image_network_needs_no_weights(name):
    def build():
        return create_vision_model(name, "polynorm", num_classes=4, image_size=160)

    def images():
        return torch.zeros(2, 3, 160, 160)

    real, without = build(), empty(build, lambda built: built.model)
    assert {p.device.type for p in without.model.parameters()} == {"meta"}
    assert without.parameters == real.parameters
    assert without.report == real.report
    costs = [estimate_cost(built.model, images, torch.float32) for built in (without, real)]
    assert costs[0] == costs[1]


class Reads(nn.Module):
    """Its constructor reads a value."""

    def __init__(self):
        super().__init__()
        self.rate = torch.linspace(0, 1, 3)[1].item()


class Holds(nn.Module):
    """It has a tensor that is no buffer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.scale = torch.ones(2)


def test_a_network_that_needs_values_has_them():
    assert empty(Reads, lambda model: model).rate == 0.5
    held = empty(Holds, lambda model: model)
    assert held.layer.weight.device.type == held.scale.device.type == "cpu"
    with pytest.raises(ValueError, match="my mistake"):
        empty(_mistake, lambda model: model)


def _mistake():
    raise ValueError("my mistake")


@pytest.mark.parametrize("task", ["vision", "language"])
def test_a_dry_run_shows_the_plan_of_the_run_without_its_weights(
    task, overrides, monkeypatch, capsys
):
    models = []
    estimate = session.estimate_cost
    monkeypatch.setattr(
        session,
        "estimate_cost",
        lambda model, *rest: (models.append(model), estimate(model, *rest))[1],
    )
    domain = {"vision": vision, "language": language}[task]
    plans = []
    for dry in (True, False):
        (config,) = compose(task, [*overrides[task], f"dry_run={str(dry).lower()}"])
        built = domain.build_task(config)
        monkeypatch.setattr(session, "_fit", lambda *_: {})
        session.run_task(config, lambda _, built=built: built)
        plans.append(capsys.readouterr().out)
    assert plans[0] == plans[1]
    devices = [{p.device.type for p in model.parameters()} for model in models]
    assert devices == [{"meta"}, {"cpu"}]
