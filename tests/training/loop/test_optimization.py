"""Parameter groups and the learning rate of each step."""

import dataclasses
import math

import pytest
import torch
from torch import nn

from polyvision.activations import create_activation
from polyvision.models.vision.create import create_vision_model
from polyvision.training.config.compose import compose
from polyvision.training.loop.optimization import (
    build_optimizer,
    build_schedule,
    learning_rate,
    parameter_groups,
)


def recipe(**changes):
    (config,) = compose("language", [])
    return dataclasses.replace(config.recipe, **changes)


def network():
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), create_activation("polynorm"))


def test_coefficients_norms_and_biases_are_not_decayed():
    model = network()
    # Coefficients of any shape: a set for each expert has two dimensions.
    model[2].weight = nn.Parameter(torch.ones(5, 3))
    decayed, kept = parameter_groups(model, 0.1)
    assert [tuple(p.shape) for p in decayed["params"]] == [(4, 4)]
    assert decayed["weight_decay"] == 0.1
    assert sorted(tuple(p.shape) for p in kept["params"]) == [(1,), (4,), (4,), (4,), (5, 3)]
    assert kept["weight_decay"] == 0.0


@pytest.mark.parametrize("name", ["adamw", "sgd", "lamb"])
def test_every_parameter_is_in_the_optimizer_once(name):
    model = network()
    optimizer = build_optimizer(
        model, recipe(optimizer=name, optimizer_options={}), loss_scaling=False
    )
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters())
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


def test_fused_only_without_loss_scaling():
    plain, scaled = (
        build_optimizer(network(), recipe(), loss_scaling=scaling) for scaling in (False, True)
    )
    assert plain.defaults["fused"] is True
    assert not scaled.defaults["fused"]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"optimizer": "adamv"}, "unknown recipe.optimizer 'adamv'. Did you mean"),
        (
            {"optimizer_options": {"beta": 1}},
            "optimizer_options.beta: recipe.optimizer=adamw does not read",
        ),
        ({"lr": 1e-4, "min_lr": 3e-4}, "recipe.min_lr=0.0003 is above the rate, 0.0001"),
    ],
)
def test_bad_optimizers_are_refused(changes, text):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        build_optimizer(network(), recipe(**changes), loss_scaling=False)
    assert text in str(caught.value)


def rates(total, **changes):
    chosen = recipe(lr=1.0, **changes)
    optimizer = build_optimizer(network(), chosen, loss_scaling=False)
    schedule = build_schedule(optimizer, chosen, total_steps=total, epoch_steps=10)
    values = []
    for step in range(total):
        schedule.step_update(step)
        values.append(optimizer.param_groups[0]["lr"])
    return values


def test_warmup_is_linear_and_cosine_ends_at_the_minimum():
    values = rates(100, warmup_epochs=1.0, min_lr=0.1)
    assert values[:10] == pytest.approx([0.001 + 0.0999 * step for step in range(10)])
    expected = [0.1 + 0.45 * (1 + math.cos(math.pi * step / 100)) for step in range(10, 100)]
    assert values[10:] == pytest.approx(expected)


def test_milestones_are_in_epochs():
    options = {"decay_milestones": [3, 6], "decay_rate": 0.1}
    values = rates(90, schedule="multistep", schedule_options=options, warmup_epochs=0.0)
    # timm's rates drop with the last step of the epoch before.
    assert values == pytest.approx([1.0] * 29 + [0.1] * 30 + [0.01] * 31)


def test_a_run_shorter_than_an_epoch_still_follows_the_whole_schedule():
    values = rates(5, warmup_epochs=0.0, min_lr=0.0)
    expected = [0.5 * (1 + math.cos(math.pi * step / 5)) for step in range(5)]
    assert values == pytest.approx(expected)


def test_everything_but_coefficients_is_decayed_on_request():
    decayed, kept = parameter_groups(network(), 0.1, decay_norm_and_bias=True)
    assert sorted(tuple(p.shape) for p in decayed["params"]) == [(4,), (4,), (4,), (4, 4)]
    assert sorted(tuple(p.shape) for p in kept["params"]) == [(1,), (3,)]
    assert kept["weight_decay"] == 0.0


@pytest.mark.parametrize(
    ("base", "scaling", "expected"),
    [(None, "linear", 0.1), (256, "linear", 0.4), (256, "sqrt", 0.2), (2048, "linear", 0.05)],
)
def test_the_rate_grows_with_the_batch(base, scaling, expected):
    chosen = recipe(lr=0.1, batch_size=1024, lr_base_batch=base, lr_scaling=scaling)
    assert learning_rate(chosen) == pytest.approx(expected)
    optimizer = build_optimizer(network(), chosen, loss_scaling=False)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(expected)


def test_warmup_begins_where_it_is_told():
    values = rates(100, warmup_epochs=1.0, warmup_lr=0.25)
    assert values[:3] == pytest.approx([0.25, 0.325, 0.4])


def test_layer_decay_scales_rates_and_spares_coefficients():
    built = create_vision_model("test_resnet", "polynorm", num_classes=4, image_size=32)
    chosen = recipe(lr=1.0, layer_decay=0.5, weight_decay=0.1, warmup_epochs=0.0)
    optimizer = build_optimizer(built.model, chosen, loss_scaling=False)
    build_schedule(optimizer, chosen, total_steps=10, epoch_steps=10).step_update(0)
    names = {id(p): name for name, p in built.model.named_parameters()}
    found = {names[id(p)]: g for g in optimizer.param_groups for p in g["params"]}
    assert set(found) == set(names.values())
    rate = {name: group["lr"] for name, group in found.items()}
    assert rate["fc.weight"] == 1.0
    assert rate["layer4.0.conv1.weight"] == 0.5
    assert rate["layer1.0.conv1.weight"] == 2 * rate["conv1.0.weight"]
    for act in ("act1", "layer2.0.act1"):  # no pattern of timm covers the stem's activation
        assert found[f"{act}.weight"]["weight_decay"] == 0.0
    assert rate["act1.weight"] == rate["conv1.0.weight"]
    assert rate["layer2.0.act1.weight"] == rate["layer2.0.conv1.weight"]


def test_layer_decay_needs_layers():
    with pytest.raises(ValueError, match=r"recipe\.layer_decay=0\.5 needs .* Sequential"):
        parameter_groups(network(), 0.1, layer_decay=0.5)
