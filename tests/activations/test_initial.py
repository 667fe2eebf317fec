"""Initial coefficients: the paper's, or those with which a polynomial starts as its base."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from polyvision.activations import create_activation
from polyvision.errors import PolyvisionError
from polyvision.training.config.compose import compose

BASES = {
    "polyrelu": F.relu,
    "polyprelu": lambda x: F.prelu(x, torch.tensor([0.25])),
    "polycom": F.silu,
}


@pytest.mark.parametrize("name", BASES)
def test_a_polynomial_can_start_as_its_base(name: str) -> None:
    x = torch.linspace(-4, 4, 33)
    module = create_activation(name, init="base", order=4)
    assert module.weight.tolist() == [1, 0, 0, 0]
    torch.testing.assert_close(module(x), BASES[name](x))
    module(x).sum().backward()
    assert module.weight.grad is not None
    assert module.weight.grad.abs().min() > 0  # the higher powers are learned
    torch.nn.init.ones_(module.weight)
    module.reset_parameters()
    assert module.weight.tolist() == [1, 0, 0, 0]
    assert create_activation(name).weight.tolist() == pytest.approx([1 / 3] * 3)


def test_each_expert_starts_as_the_base() -> None:
    module = create_activation("polyrelu", init="base", groups=2)
    assert module.weight.tolist() == [[1, 0, 0], [1, 0, 0]]


def test_a_configuration_chooses_it_and_the_label_tells() -> None:
    (config,) = compose("vision", ["act=polyrelu", "act.init=base"])
    assert config.act.label == "polyrelu-initbase"
    with pytest.raises(PolyvisionError, match=r"unknown act\.init 'bsae'.*Valid: base, equal"):
        compose("vision", ["act=polyrelu", "act.init=bsae"])
    with pytest.raises(PolyvisionError, match="unknown init of PolyReLU 'bsae'"):
        create_activation("polyrelu", init="bsae")
