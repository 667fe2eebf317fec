"""What ``act`` may be beside a name: a class or a function that builds a module."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyvision import PolyNorm, swap_activations
from polyvision.activations import SwiGLU, activation_names
from polyvision.errors import PolyvisionError

FITTING = activation_names("pointwise", "normalising", "stochastic")
ONE = nn.ReLU()


def network() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.GELU())


class Scaled(nn.Module):
    """A user's own activation, which nobody has registered."""

    def __init__(self, factor: float = 2.0) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * F.relu(x)


@pytest.mark.parametrize(
    ("act", "options", "name", "text"),
    [
        (nn.Mish, {}, "Mish", "Mish()"),
        (nn.LeakyReLU, {"negative_slope": 0.2}, "LeakyReLU", "LeakyReLU(negative_slope=0.2)"),
        (partial(nn.ELU, alpha=2.0), {}, "ELU", "ELU(alpha=2.0)"),
        (lambda: nn.Mish(inplace=True), {}, "Mish", "Mish(inplace=True)"),
        (Scaled, {"factor": 3.0}, "Scaled", "Scaled()"),
        (PolyNorm, {"order": 2}, "polynorm", "PolyNorm(order=2, eps=1e-06, dim=1)"),
        (partial(PolyNorm, order=2), {}, "PolyNorm", "PolyNorm(order=2, eps=1e-06, dim=1)"),
        ("polynorm", {"order": 2}, "polynorm", "PolyNorm(order=2, eps=1e-06, dim=1)"),
    ],
)
def test_a_class_or_function_gives_every_site_a_module(
    act: str | Callable[..., nn.Module], options: dict[str, Any], name: str, text: str
) -> None:
    model = network().to(torch.float64)
    inputs = torch.zeros(2, 3, 8, 8, dtype=torch.float64)
    report = swap_activations(model, act, inputs=inputs, **options)
    assert report.activation == name
    assert [site.name for site in report.sites] == ["1", "3"]
    assert repr(model[1]) == repr(model[3]) == text
    assert model[1] is not model[3]
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    model(torch.randn(2, 3, 8, 8, dtype=torch.float64)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_class_lies_on_the_device_of_its_site() -> None:
    model = network().to("meta")
    swap_activations(model, Scaled)
    assert model[1].factor.is_meta


@pytest.mark.parametrize(
    ("act", "options", "text"),
    [
        (nn.Mish(), {}, f"act must be a name ({FITTING[0]}, "),
        (3, {}, "builds a new module at each call, got 3"),
        (None, {}, "builds a new module at each call, got None"),
        ([nn.Mish], {}, "builds a new module at each call, got [<class 'torch.nn."),
        (F.mish, {}, "mish() failed: mish() missing 1 required positional argument: 'input'. act"),
        (nn.Mish, {"slope": 1}, "Mish(slope) failed: Mish.__init__() got an unexpected keyword"),
        (lambda: ONE, {}, "but <lambda>() gives the same module twice"),
        (lambda: 3, {}, "but <lambda>() gives 3"),
        (lambda: PolyNorm(), {}, "<lambda>() builds a PolyNorm, which needs the feature dimension"),
        (SwiGLU, {}, "swiglu is gated: it needs two inputs"),
        (partial(SwiGLU), {}, "swiglu is gated: it needs two inputs"),
        (PolyNorm, {"ordr": 2}, "unknown option of activation 'polynorm' 'ordr'. Did you mean"),
        (nn.Flatten, {}, "Sequential does not run with Flatten: "),
        (partial(nn.AvgPool2d, 2), {}, "1 (ReLU): the new module changes the shape"),
    ],
)
def test_anything_else_is_refused_in_one_line(act: Any, options: dict[str, Any], text: str) -> None:
    model = network()
    before = repr(model)
    with pytest.raises(PolyvisionError, match=re.escape(text)) as caught:
        swap_activations(model, act, inputs=torch.zeros(2, 3, 8, 8), **options)
    assert "\n" not in str(caught.value)
    assert repr(model) == before
