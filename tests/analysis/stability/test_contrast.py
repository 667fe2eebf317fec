"""The training contrast: the loop does what it says, and the difference holds over seeds."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import nn

from polyvision import functional
from polyvision.analysis.stability import training
from polyvision.analysis.stability.contrast import ACTIVATIONS, GRIDS, SETTINGS, book, digits
from polyvision.analysis.stability.networks import NETWORKS, build_network
from polyvision.analysis.stability.overflow import CONTENDERS, EPS
from polyvision.analysis.stability.training import (
    COLLAPSE,
    PRECISIONS,
    Batches,
    Recipe,
    Run,
    Sighting,
    Watch,
    judge,
    train,
)
from polyvision.errors import PolyvisionError
from polyvision.training.loop.devices import Hardware
from polyvision.training.loop.optimization import parameter_groups

SEEDS = (0, 1)
LATER = (1, 2, 3, 4, 5)
MORE_SEEDS = (2, 3, 4, 5, 6, 7)


@pytest.fixture(scope="module")
def small() -> Batches:
    return digits("cpu")


@pytest.fixture(scope="module")
def large() -> Batches:
    return digits("cpu", image_size=16)


def check_stable(run: Run) -> None:
    """Finite loss below the start and a guess; at most 8 steps skipped, from 2^16 to 2^8."""
    assert all(map(math.isfinite, run.losses)), run.reason
    assert run.last_loss < min(run.losses[0], run.guess)
    assert run.scales[-1] >= 2.0**8
    assert max(run.peaks) < 200  # 65504 is far away


def check_trains(run: Run) -> None:
    check_stable(run)
    assert run.outcome == "trains", run.reason


def check_overflows_at_once(run: Run) -> None:
    assert run.lost == 1
    assert run.sighting is not None
    assert run.sighting.kind == "output"
    assert run.outcome == "diverges"
    assert len(run.skipped) == 30  # from 2^16 to 2^-14
    assert run.scales[-1] / 2 == COLLAPSE


# -- the contrast ----------------------------------------------------------------------------------


def contrast(network: str, seed: int, data: Batches, recipe: Recipe) -> None:
    check_trains(train(network, "polynorm", seed, recipe, data))
    check_overflows_at_once(train(network, "polyrelu", seed, recipe, data))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("network", ["mlp", "residual-mlp"])
def test_poly_norm_trains_where_poly_relu_overflows(network: str, seed: int, small) -> None:
    contrast(network, seed, small, Recipe(lr=1e-3, steps=32))


@pytest.mark.slow
@pytest.mark.parametrize("seed", MORE_SEEDS)
@pytest.mark.parametrize("precision", ["fp16", "fp16-weights"])
@pytest.mark.parametrize("network", ["mlp", "residual-mlp"])
def test_contrast_over_more_seeds(network: str, precision: str, seed: int, small) -> None:
    contrast(network, seed, small, Recipe(lr=1e-3, steps=60, precision=precision))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [*SEEDS, *MORE_SEEDS])
@pytest.mark.parametrize("network", ["resnet-no-bn", "resnet-frozen-bn", "resnet26-no-bn"])
def test_contrast_in_convolutional_networks(network: str, seed: int, large) -> None:
    recipe = Recipe(lr=1e-3, steps=80, batch=16)
    check_stable(train(network, "polynorm", seed, recipe, large))
    check_overflows_at_once(train(network, "polyrelu", seed, recipe, large))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_map_of_variances_names_the_first_layer_that_overflows(seed: int, small) -> None:
    run = train("mlp", "polyrelu", seed, Recipe(lr=1e-3, steps=1), small)
    # The third activation; see test_propagation.
    assert run.sighting == Sighting(1, "output", "layers.5")


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in LATER)])
def test_the_range_of_fp16_alone_can_end_poly_relu(seed: int, small) -> None:
    recipe = Recipe(lr=1e-3, steps=60, gain=0.35)
    in_fp16 = train("residual-mlp", "polyrelu", seed, recipe, small)
    in_fp32 = train(
        "residual-mlp", "polyrelu", seed, dataclasses.replace(recipe, precision="fp32"), small
    )
    assert in_fp16.lost is not None
    assert in_fp16.sighting is not None
    assert len(in_fp16.skipped) >= 5
    assert in_fp32.outcome == "trains"
    assert max(in_fp32.peaks) > 65504  # which fp16 cannot hold
    check_trains(train("residual-mlp", "polynorm", seed, recipe, small))


@pytest.mark.parametrize("seed", [*SEEDS, 2, 3, 4, 5])
def test_plain_poly_norm_has_no_finite_gradient_for_small_rows(
    seed: int, small, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plain(x, weight, bias, eps, *, dim, group):
        assert (eps, dim, group) == (EPS, -1, None)
        return CONTENDERS["polynorm"].plain(x, weight) + bias

    recipe = Recipe(lr=1e-3, steps=4, gain=0.35, precision="fp16-weights")
    ours = train("residual-mlp", "polynorm", seed, recipe, small)
    assert ours.sighting is None
    monkeypatch.setattr(functional, "poly_norm", plain)
    run = train("residual-mlp", "polynorm", seed, recipe, small)
    # rms(x^3) of some row is below 0.29^3: outputs are finite, the gradient into ``up`` is not.
    assert run.sighting is not None
    assert (run.sighting.step, run.sighting.kind) == (1, "gradient")
    assert run.sighting.layer.endswith(".up")
    assert run.lost is None
    assert run.skipped[0] == 1


@pytest.mark.parametrize("activation", ["polynorm", "polyrelu"])
def test_both_are_stable_in_a_transformer_with_clipping(activation: str) -> None:
    recipe = Recipe(lr=3e-3, steps=24, batch=8)
    check_trains(train("transformer", activation, 0, recipe, book("cpu", windows=512)))


@pytest.mark.slow
@pytest.mark.parametrize("seed", MORE_SEEDS)
@pytest.mark.parametrize("activation", ["polynorm", "polyrelu"])
def test_both_are_stable_in_a_transformer_over_more_seeds(activation: str, seed: int) -> None:
    recipe = Recipe(lr=3e-3, steps=80, batch=16)
    check_trains(train("transformer", activation, seed, recipe, book("cpu")))


# -- the loop --------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_run_depends_on_its_arguments_alone(precision: str, small) -> None:
    recipe = Recipe(lr=1e-3, steps=4, precision=precision)
    first = train("mlp", "polynorm", 3, recipe, small)
    torch.manual_seed(99)
    assert train("mlp", "polynorm", 3, recipe, small) == first
    assert train("mlp", "polynorm", 4, recipe, small).losses != first.losses


@pytest.mark.parametrize("network", ["mlp", "residual-mlp", "resnet-frozen-bn"])
def test_activations_share_weights_and_order(network: str, large) -> None:
    sample = large.inputs[:8]
    states = []
    for activation in ACTIVATIONS:
        torch.manual_seed(5)
        model = build_network(network, activation, sample=sample, classes=10)
        states.append({n: p for n, p in model.named_parameters() if p.ndim > 1})
    for state in states[1:]:
        assert state.keys() == states[0].keys()
        assert all(torch.equal(state[name], states[0][name]) for name in state)
    labels = [next(large.draw(7, 8))[1].tolist() for _ in range(2)]
    assert labels[0] == labels[1]
    assert labels[0] != next(large.draw(8, 8))[1].tolist()


def test_loss_scaling_and_decay_are_those_of_the_trainers(small) -> None:
    model = build_network("residual-mlp", "polynorm", sample=small.inputs[:4], classes=10)
    stepper = training._Stepper(model, Recipe(lr=1e-3, steps=1), "cpu")
    plugin = Hardware("cpu", 1, "fp16").trainer_arguments()["plugins"][0]
    assert stepper.scaler.state_dict() == plugin.scaler.state_dict()
    assert plugin.precision == "16-mixed"
    with stepper.context:
        assert torch.get_autocast_dtype("cpu") == torch.float16
    from polyvision.training.loop.non_finite import SMALLEST_LOSS_SCALE

    assert COLLAPSE == SMALLEST_LOSS_SCALE
    ours = [
        (g["weight_decay"], [id(p) for p in g["params"]]) for g in stepper.optimizer.param_groups
    ]
    theirs = [
        (g["weight_decay"], [id(p) for p in g["params"]]) for g in parameter_groups(model, 0.05)
    ]
    assert ours == theirs


def test_fp16_weights_are_rounded_from_fp32_masters(small) -> None:
    model = build_network("mlp", "polynorm", sample=small.inputs[:4], classes=10)
    stepper = training._Stepper(model, Recipe(lr=1e-2, steps=1, precision="fp16-weights"), "cpu")
    # The first scales may be too high, as in any run.
    taken = [stepper.step(i, small.inputs[:64], small.targets[:64]) for i in range(1, 5)]
    assert not taken[-1][1]
    assert math.isfinite(taken[-1][0])
    for parameter, master in zip(stepper.parameters, stepper.masters, strict=True):
        assert (parameter.dtype, master.dtype) == (torch.float16, torch.float32)
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float16
        assert torch.equal(parameter, master.half())
    assert any(not torch.equal(m, m.half().float()) for m in stepper.masters)


def test_a_skipped_step_leaves_the_weights_and_halves_the_scale(small) -> None:
    model = build_network("mlp", "polyrelu", sample=small.inputs[:4], classes=10)
    before = [p.detach().clone() for p in model.parameters()]
    stepper = training._Stepper(model, Recipe(lr=1e-2, steps=1), "cpu")
    loss, skipped = stepper.step(1, small.inputs[:64] * 100, small.targets[:64])
    assert skipped
    assert not math.isfinite(loss)
    assert stepper.scale == 2.0**15
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


# -- outcomes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("losses", "skipped", "scale", "outcome"),
    [
        ([2.3] * 18 + [1.7, 1.7], [1], 2.0**15, "trains"),
        ([2.3] * 18 + [1.8, 1.8], [], 2.0**16, "stalls"),
        ([2.3] * 18 + [1.0, 1.0], [20], 2.0**15, "stalls"),  # half of the last steps skipped
        ([2.3] * 18 + [4.7, 4.7], [], 2.0**16, "diverges"),
        ([2.3] * 18 + [1.0, math.nan], [20], 2.0**15, "diverges"),
        ([math.inf] + [1.0] * 19, [1], 2.0**15, "trains"),  # recovered
        ([1.0] * 12, list(range(1, 13)), 2.0**-14, "diverges"),
        ([1.0] * 12 + [math.inf], [], 1.0, "diverges"),  # stopped early without scaling
    ],
)
def test_outcomes(losses: list[float], skipped: list[int], scale: float, outcome: str) -> None:
    run = Run("mlp", "relu", 0, Recipe(lr=1.0, steps=20), math.log(10), losses, skipped=skipped)
    assert judge(run, scale)[0] == outcome


def test_watch_names_the_first_value_that_is_not_finite() -> None:
    class Scale(nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.factor = factor

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.factor

    model = nn.Sequential(nn.Linear(2, 2), Scale(1e20), Scale(1e20), Scale(1.0), Scale(1e-20))
    nn.init.ones_(model[0].weight)
    watch = Watch(model)
    model(torch.ones(1, 2))
    assert watch.read(4) == (math.inf, Sighting(4, "output", "2"))
    model[2].factor = 1.0
    model(torch.ones(1, 2)).sum().backward()
    peak, sighting = watch.read(5)
    assert peak == pytest.approx(2e20, rel=0.5)
    assert sighting is None
    # Backward: 1e-20 * 1e30 through module 4, then * 1e20 * 1e20 overflows in front of module 1.
    model[2].factor = 1e-20
    (model(torch.ones(1, 2)).sum() * 1e38).backward()
    assert watch.read(6)[1] is None
    model[2].factor, model[4].factor = 1e-20, 1.0
    (model(torch.ones(1, 2)).sum() * 1e38).backward()
    assert watch.read(7)[1] is None
    (model(torch.full((1, 2), 10.0)).sum() * 1e38).backward()
    assert watch.read(8)[1] == Sighting(8, "weight gradient", "0.weight")
    model[2].factor, model[3].factor = 1.0, 1e10
    (model(torch.ones(1, 2)).sum() * 1e38).backward()
    assert watch.read(9)[1] == Sighting(9, "gradient", "2")
    watch.close()
    model(torch.full((1, 2), math.inf))
    assert watch.read(10) == (0.0, Sighting(10, "weight gradient", "0.bias"))


# -- networks and data -----------------------------------------------------------------------------


@pytest.mark.parametrize("network", NETWORKS)
def test_settings_and_networks_belong_together(network: str) -> None:
    assert network in {setting.network for setting in SETTINGS}
    assert {grid.network for grid in GRIDS} <= set(NETWORKS)


@pytest.mark.parametrize("network", [n for n in NETWORKS if n.endswith("no-bn")])
def test_batch_norm_is_gone(network: str, large) -> None:
    model = build_network(network, "polynorm", sample=large.inputs[:4], classes=10)
    assert not [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    blocks = {type(m).__name__ for m in model.modules()} & {"BasicBlock", "Bottleneck"}
    assert blocks == {"BasicBlock" if network == "resnet-no-bn" else "Bottleneck"}


def test_frozen_batch_norm_normalises_its_batch_and_stays(large) -> None:
    sample = large.inputs[:16]
    model = build_network("resnet-frozen-bn", "relu", sample=sample, classes=10)
    outputs = []
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    for norm in norms:
        norm.register_forward_hook(lambda _, __, y: outputs.append(y.detach()))
    before = [norm.running_var.clone() for norm in norms]
    model.train()(sample)
    model.train()(3 * sample)
    assert len(norms) > 10
    assert not any(norm.training for norm in norms)
    assert all(torch.equal(a, n.running_var) for a, n in zip(before, norms, strict=True))
    first = outputs[0]
    torch.testing.assert_close(first.mean((0, 2, 3)), torch.zeros(64), atol=1e-4, rtol=0)
    torch.testing.assert_close(first.var((0, 2, 3)), torch.ones(64), atol=1e-2, rtol=0)
    assert outputs[len(norms)].abs().max() > 2 * first.abs().max()  # not normalised by its own


def test_unknown_network_is_refused(small) -> None:
    with pytest.raises(PolyvisionError, match=r"unknown network 'mpl'. Did you mean 'mlp'?"):
        build_network("mpl", "relu", sample=small.inputs[:2], classes=10)


def test_data_is_real_and_normalised(small) -> None:
    assert small.inputs.shape == (1437, 1, 8, 8)
    assert small.inputs.double().mean().item() == pytest.approx(0, abs=1e-6)
    assert small.inputs.double().std().item() == pytest.approx(1, abs=1e-6)
    assert sorted(set(small.targets.tolist())) == list(range(10))
    text = book("cpu", windows=4)
    assert bytes(text.inputs[0].tolist()).decode().startswith("CHAPTER 1.")
    assert torch.equal(text.targets[0][:-1], text.inputs[0][1:])
    assert text.targets.shape == text.inputs.shape == (4, 32)
