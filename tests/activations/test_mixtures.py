"""Mixtures: weights by the token in a feed-forward network, and where they do not fit."""

from __future__ import annotations

import pytest
import torch
from activation_oracles import mixture

from polyvision import PolyvisionError, activation_names, create_activation, swap_activations
from polyvision.models.language.ffn import FeedForward, gated_hidden
from polyvision.models.language.moe import MoE
from polyvision.models.language.shape import MoEShape

NAMES = ["moa", "bi_moa"]
SINGLE = ["identity", "relu", "relu2", "leaky_relu", "gelu", "silu", "tanh"]


def test_learned_activation_contains_each_of_its_functions() -> None:
    x = torch.randn(200, dtype=torch.float64)
    module = create_activation("la").double()
    for k, name in enumerate(SINGLE):
        with torch.no_grad():
            module.weight.copy_(torch.eye(7, dtype=torch.float64)[k])
        if name == "relu2":
            want = x.relu() ** 2
        else:
            want = x if name == "identity" else getattr(torch.nn.functional, name)(x)
        torch.testing.assert_close(module(x), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_each_token_weighs_the_functions_for_itself(name: str) -> None:
    ffn = FeedForward(6, 24, name).double()
    hidden = gated_hidden(24) if name == "bi_moa" else 24
    assert ffn.up.weight.shape == (hidden, 6)
    assert ffn.mixing.weight.shape == (14 if name == "bi_moa" else 7, 6)
    x = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    shares = torch.sigmoid(x @ ffn.mixing.weight.T)[..., None]  # (tokens, functions, 1)
    if name == "moa":
        h = mixture(x @ ffn.up.weight.T, shares.unbind(1))
    else:
        left = mixture(x @ ffn.gate.weight.T, shares[:, :7].unbind(1))
        h = left * mixture(x @ ffn.up.weight.T, shares[:, 7:].unbind(1))
    want = h @ ffn.down.weight.T
    variables = [x, *ffn.parameters()]
    torch.testing.assert_close(ffn(x), want)
    torch.testing.assert_close(
        torch.autograd.grad(ffn(x).square().sum(), variables),
        torch.autograd.grad(want.square().sum(), variables),
    )


@pytest.mark.parametrize("name", NAMES)
def test_weights_start_at_one_half_and_are_learned(name: str) -> None:
    ffn = FeedForward(6, 24, name)
    ffn.init_matrices(lambda matrix, _: torch.nn.init.normal_(matrix, std=0.5))
    assert not ffn.mixing.weight.any()
    ffn(torch.randn(5, 6)).square().sum().backward()
    assert (ffn.mixing.weight.grad != 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_places_that_do_not_fit_name_what_does(name: str) -> None:
    fitting = ", ".join(activation_names("pointwise", "normalising", "stochastic"))
    with pytest.raises(PolyvisionError, match=r"is a mixture|is gated") as error:
        swap_activations(torch.nn.Sequential(torch.nn.ReLU()), name, inputs=torch.randn(1, 4))
    assert fitting in str(error.value)
    with pytest.raises(PolyvisionError, match=f"'{name}' weighs its functions .* swiglu,"):
        MoE(8, 12, MoEShape(experts=3, top_k=2), name)
