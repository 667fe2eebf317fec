"""Activations that draw random numbers: what they draw, when, and that a seed repeats it."""

from __future__ import annotations

import copy
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from polyvision import activation_names, create_activation
from polyvision.activations.stochastic import StochA
from polyvision.errors import PolyvisionError
from polyvision.models.language.moe import MoE
from polyvision.models.language.shape import MoEShape
from polyvision.models.language.transformer import Transformer, TransformerShape
from polyvision.training.loop.module import TaskModule

NAMES = activation_names("stochastic")
SHAPE = TransformerShape(
    vocab_size=16, context=8, width=16, layers=2, heads=2, ffn_hidden=24, activation="stocha"
)


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def drawn(module: nn.Module, x: Tensor, seed: int = 3) -> Tensor:
    torch.manual_seed(seed)
    y: Tensor = module(x)
    return y


@pytest.mark.parametrize("name", NAMES)
def test_a_seed_repeats_what_training_draws_and_eval_draws_nothing(name: str) -> None:
    module, x = create_activation(name), torch.randn(50, 40)
    assert torch.equal(drawn(module, x), drawn(module, x))
    assert not torch.equal(drawn(module, x), drawn(module, x, 4))
    module.eval()
    state = torch.get_rng_state()
    assert torch.equal(module(x), module(x))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", NAMES)
def test_networks_and_gradients_repeat_with_the_seed(name: str) -> None:
    network = nn.Sequential(nn.Linear(6, 6), create_activation(name), nn.Linear(6, 1))
    x = torch.randn(20, 6)
    gradients = []
    for model in (network, copy.deepcopy(network), fx.symbolic_trace(network)):
        loss = drawn(model, x).square().mean()
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0])
    graph = fx.symbolic_trace(network).eval()  # a graph obeys the mode, too
    assert torch.equal(graph(x), network.eval()(x))


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("positive", ["identity", "silu"])
def test_stocha_is_silu_or_relu_for_negative_inputs(p: float, positive: Any) -> None:
    module = StochA(p=p, positive=positive)
    x = torch.randn(300, 300, dtype=torch.float64, requires_grad=True)
    y = drawn(module, x)
    below = x < 0
    smooth = y != 0
    share = smooth[below].double().mean().item()
    assert share == pytest.approx(p, abs=0.01)
    want = torch.where(below, torch.where(smooth, silu(x), 0 * x), x)
    if positive == "silu":
        want = torch.where(below, want, silu(x))
    torch.testing.assert_close(y, want)
    upstream = torch.randn_like(x)
    torch.testing.assert_close(
        torch.autograd.grad(y, x, upstream), torch.autograd.grad(want, x, upstream)
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_stocha_is_rounded_once(dtype: torch.dtype) -> None:
    x = (2 * torch.randn(100, 100)).to(dtype)
    y, wide = drawn(StochA(), x), drawn(StochA(), x.float())
    assert y.dtype == dtype
    assert torch.equal(y, wide.to(dtype))


def test_rrelu_draws_slopes_between_its_bounds() -> None:
    x = -torch.ones(200, 200)
    y = -drawn(create_activation("rrelu", lower=0.2, upper=0.6), x)
    assert 0.2 <= y.min() < 0.21 < 0.59 < y.max() <= 0.6
    assert y.mean().item() == pytest.approx(0.4, abs=0.005)
    assert type(create_activation("rrelu")) is nn.RReLU
    assert repr(create_activation("rrelu")) == repr(nn.RReLU())


def test_stocha_ends_as_relu() -> None:
    module, x = StochA(relu_share=0.25), torch.randn(50, 40)
    for done, ends in ((0.0, False), (0.74, False), (0.75, True), (1.0, True), (0.5, False)):
        module.set_progress(done)
        assert torch.equal(drawn(module, x), x.relu()) == ends
    never = StochA(relu_share=0.0)
    never.set_progress(1.0)
    assert not torch.equal(drawn(never, x), x.relu())


def test_stocha_can_go_on_drawing_for_generation() -> None:
    x = torch.randn(50, 40)
    assert torch.equal(drawn(StochA().eval(), x), x.relu())
    module = StochA(sample_in_eval=True).eval()
    module.set_progress(1.0)
    assert torch.equal(drawn(module, x), drawn(StochA(), x))


def test_the_trainer_tells_how_far_the_training_is() -> None:
    """A function of the step alone, so that a resumed run has the same."""
    network = nn.Sequential(nn.Linear(2, 2), create_activation("stocha", relu_share=0.2), nn.ReLU())
    recipe = SimpleNamespace(ema_decay=0.0)
    module = TaskModule(network, recipe, seed=0, total_steps=10, epoch_steps=5)
    trainer = SimpleNamespace(callbacks=[], global_step=0)
    module._trainer = trainer
    module._schedule = SimpleNamespace(step_update=lambda step: None)
    module._seed = lambda batch_idx: None
    module.on_fit_start()
    seen = []
    for step in (0, 7, 8, 9, 3):
        trainer.global_step = step
        module.on_train_batch_start(None, 0)
        seen.append(network[1]._last_part)
    assert seen == [False, False, True, True, False]


def test_checkpointed_blocks_draw_the_same_numbers_again() -> None:
    model = Transformer(SHAPE)
    checkpointed = Transformer(TransformerShape(**{**vars(SHAPE), "checkpointing": True}))
    checkpointed.load_state_dict(model.state_dict())
    tokens = torch.randint(16, (4, 8))
    gradients = []
    for each in (model, checkpointed):
        loss = drawn(each, tokens).square().mean()
        gradients.append(torch.autograd.grad(loss, list(each.parameters())))
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"p": 1.5}, "StochA: p must be from 0 to 1, got 1.5"),
        ({"p": "0.5"}, "StochA: p must be a finite number, got '0.5'"),
        ({"relu_share": -0.1}, "StochA: relu_share must be from 0 to 1, got -0.1"),
        ({"positive": "relu"}, "unknown positive of StochA 'relu'."),
    ],
)
def test_bad_values(options: dict[str, Any], text: str) -> None:
    with pytest.raises(PolyvisionError, match=re.escape(text)):
        create_activation("stocha", **options)


def test_bad_slopes() -> None:
    with pytest.raises(PolyvisionError, match=r"lower must be at most upper, got lower=0\.5 and"):
        create_activation("rrelu", lower=0.5)


def test_experts_refuse_it_with_what_fits() -> None:
    fitting = ", ".join(activation_names("pointwise", "normalising", "gated"))
    with pytest.raises(PolyvisionError, match=f"'stocha' draws random .* one of: {fitting}, or"):
        MoE(8, 12, MoEShape(experts=3, top_k=2), "stocha")
