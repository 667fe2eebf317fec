"""Health measures on activations, states and weights with known answers."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from polyvision.analysis.health.dead_neurons import Deaths, neuron_deaths
from polyvision.analysis.health.measure import (
    excess_kurtosis,
    gradient_norms,
    measure_health,
    state_extremes,
    zero_share,
)
from polyvision.analysis.health.report import health_result
from polyvision.models.language.shape import MoEShape, TransformerShape
from polyvision.models.language.transformer import Transformer
from polyvision.models.vision.create import create_vision_model


def approx_deaths(static, dynamic):
    return Deaths(pytest.approx(static), pytest.approx(dynamic))


def test_only_exact_zeros_are_zeros():
    assert zero_share(torch.tensor([0.0, -0.0, 1e-40, 5.0, -1.0])) == pytest.approx(0.4)


def test_static_and_dynamic_deaths_of_tokens():
    x = torch.ones(2, 3, 4)  # samples, tokens, neurons
    x[:, :, 0] = 0  # dead everywhere: static
    x[0, :, 1] = 0  # dead on one of two samples: one dynamic pair of eight
    x[1, 0, 2] = 0  # dead on a token only: alive
    assert neuron_deaths(x) == approx_deaths(1 / 4, 1 / 8)


@pytest.mark.parametrize("dim", [1, None])
def test_deaths_of_maps_run_over_channels(dim):
    x = torch.zeros(2, 4, 3, 3)
    x[0, 0, 1, 2] = 1
    x[1, 1] = 1
    # Channels 2 and 3 are dead; of the pairs of 0 and 1, one each.
    assert neuron_deaths(x, dim) == approx_deaths(1 / 2, 1 / 4)


def test_deaths_of_channel_last_maps():
    x = torch.zeros(2, 3, 3, 4)
    x[0, 1, 2, 0] = 1
    assert neuron_deaths(x, -1) == approx_deaths(3 / 4, 1 / 8)


def test_kurtosis_of_known_distributions():
    assert excess_kurtosis(torch.tensor([1.0, -1.0])) == pytest.approx(-2)
    # One element in n of size 1, the rest 0: 1/(p(1-p)) - 6 with p = 1/n.
    spike = torch.zeros(100)
    spike[3] = 7.0
    assert excess_kurtosis(spike) == pytest.approx(1 / (0.01 * 0.99) - 6)
    assert abs(excess_kurtosis(torch.randn(200_000))) < 0.1
    assert math.isnan(excess_kurtosis(torch.ones(4)))


def test_massive_needs_size_and_contrast():
    state = torch.full((10, 10), 0.2)
    state[0, 0], state[1, 1], state[2, 2] = -250.0, 199.0, 90.0
    # 250 is 1,250 medians; 199 is only 995; 90 is not above 100.
    seen = state_extremes(state)
    assert seen == {"largest": 250.0, "median": pytest.approx(0.2), "massive": 1.0}
    assert state_extremes(150 * torch.ones(4, 4))["massive"] == 0


def small_model(activation="relu", moe=None):
    shape = TransformerShape(
        vocab_size=16,
        context=8,
        width=8,
        layers=2,
        heads=2,
        ffn_hidden=24,
        activation=activation,
        moe=moe,
    )
    return Transformer(shape), torch.randint(16, (4, 8))


def health_of(model, tokens, gradients=None):
    def evaluate():
        return float(F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()))

    return measure_health(model, tokens, evaluate, gradients)


def test_a_model_with_dead_neurons_and_a_massive_state():
    model, tokens = small_model()
    with torch.no_grad():
        model.blocks[0].ffn.up.weight[:6] = 0  # a quarter of the neurons
        model.blocks[0].ffn.down.weight.fill_(-0.5)
        model.blocks[1].ffn.down.weight.copy_(model.blocks[1].ffn.down.weight.abs())
        model.embedding.weight[:, 3] = 1e6
    health = health_of(model, tokens)
    assert health.sites["blocks.0.ffn.activation"]["dead_units"] >= 0.25
    assert health.sites["blocks.1.ffn.activation"]["zero_share"] > 0.2
    down = health.weights["blocks.0.ffn.down"]
    assert down == {"mean": pytest.approx(-0.5), "negative_share": 1.0}
    assert health.weights["blocks.1.ffn.down"]["negative_share"] == 0
    assert health.first_massive == "blocks.0"
    assert health.layers["blocks.1"]["massive"] == tokens.numel()


def test_a_mixture_of_experts():
    model, tokens = small_model(moe=MoEShape(experts=3, top_k=2))
    with torch.no_grad():
        model.blocks[0].ffn.up[:, :6] = 0  # a quarter of the neurons of every expert
        model.blocks[0].ffn.down[1].fill_(-0.5)
    health = health_of(model, tokens)
    assert health.sites["blocks.0.ffn.activation"]["dead_units"] >= 0.25
    down = health.weights["blocks.0.ffn.1.down"]
    assert down == {"mean": pytest.approx(-0.5), "negative_share": 1.0}
    assert len(health.weights) == 6
    assert list(health.sparsity["layers"]) == ["blocks.0.ffn", "blocks.1.ffn"]
    assert health.sparsity["layers"]["blocks.0.ffn"] >= 0.25
    assert health.sparsity["loss_sparse"] <= health.sparsity["loss_dense"] + math.log(1.01)


def test_a_smooth_activation_has_no_zeros():
    model, tokens = small_model("polynorm")
    health = health_of(model, tokens)
    assert {site["zero_share"] for site in health.sites.values()} == {0.0}
    assert health.first_massive is None


def test_gradient_norms_add_up_to_the_global_norm():
    model, tokens = small_model()
    assert set(gradient_norms(model).values()) == {0.0}
    F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    norms = gradient_norms(model)
    assert list(norms) == ["embedding", "blocks.0", "blocks.1", "norm", "head"]
    whole = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert math.hypot(*norms.values()) == pytest.approx(float(whole), rel=1e-5)
    assert norms["head"] == pytest.approx(float(model.head.weight.grad.norm()), rel=1e-5)


def test_result_holds_everything(tmp_path):
    model, tokens = small_model()
    result = health_result(health_of(model, tokens, {"blocks.0": 0.5}))
    tags = result.tags()
    assert tags["analysis/health/blocks.0/grad_norm"] == 0.5
    assert {"analysis/health/mean/dead_units", "analysis/health/mean/sparsity"} <= set(tags)
    paths = result.save(tmp_path / "new")
    assert [path.name for path in paths] == ["health.json", "health.png"]
    assert all(path.stat().st_size > 500 for path in paths)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", [0.0, math.nan])
def test_a_broken_model_is_still_measured(value, tmp_path):
    model, tokens = small_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    health = health_of(model, tokens, {"blocks.0": value})
    assert (health.sparsity is None) == math.isnan(value)
    health_result(health).save(tmp_path)


@pytest.mark.parametrize(("name", "size"), [("test_resnet", 32), ("test_convnext", 64)])
def test_vision_models(name, size):
    model = create_vision_model(name, "relu", num_classes=4, image_size=size).model
    images, labels = torch.randn(4, 3, size, size), torch.arange(4)
    health = measure_health(model, images, lambda: float(F.cross_entropy(model(images), labels)))
    assert all(0 < site["zero_share"] < 1 for site in health.sites.values())
    assert (health.sparsity is None) == (name == "test_resnet")
    assert model.training
