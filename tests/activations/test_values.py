"""Values and gradients of every activation against its formula in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from activation_oracles import ORACLES, build, cases, inputs, relu
from torch import Tensor

from polyvision import PolyNorm, PolyReLU, activation_names, create_activation
from polyvision.activations import activation_info

# Relative rms error against float64 on the same inputs: one rounding to the output's dtype.
# No fp32 product 30 x is exact enough for its sine at large x.
SCALE = {"siren": 0.05}
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2.3e-4, torch.bfloat16: 1.8e-3}


def label(value: Any) -> str:
    if isinstance(value, dict):
        return ",".join(f"{k}={v}" for k, v in value.items()) or "default"
    return str(value)


def relative_rms(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


def test_every_activation_has_an_oracle() -> None:
    assert set(ORACLES) == set(activation_names()), "add its formula to activation_oracles.py"


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
@pytest.mark.parametrize(("name", "keywords"), cases(), ids=label)
def test_value_and_gradients(name: str, keywords: dict[str, Any], scale: float) -> None:
    module = build(name, **keywords).double()
    variables = [*inputs(name, 3, 5, 7, scale=scale), *module.parameters()]
    xs = variables[: len(variables) - len(list(module.parameters()))]
    got, want = module(*xs), ORACLES[name](module, *xs)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11 * float(want.detach().abs().max()))

    upstream = torch.randn_like(want)
    for ours, exact in zip(
        torch.autograd.grad(got, variables, upstream),
        torch.autograd.grad(want, variables, upstream),
        strict=True,
    ):
        size = float(exact.abs().max())
        torch.testing.assert_close(ours, exact, rtol=1e-9, atol=1e-10 * size)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("name", activation_names())
def test_low_precision_rounds_once(name: str, dtype: torch.dtype) -> None:
    module = build(name)
    xs = inputs(name, 64, 257, scale=SCALE.get(name, 2.0), dtype=dtype)
    got = module(*xs)
    assert got.dtype == dtype
    want = ORACLES[name](module.double(), *(x.double() for x in xs))
    # The coefficients are exact in fp32; gated baselines round the gate as well as the product.
    roundings = 2 if activation_info(name).kind == "gated" else 1
    bound = roundings * TOLERANCE[dtype]
    if name in ("dsilu", "snake"):  # many values just above a power of 2, which are rounded most
        bound = max(bound, 1.02 * relative_rms(want.to(dtype), want))
    assert relative_rms(got, want) <= bound


@pytest.mark.parametrize("name", ["relu", "gelu", "silu"])
def test_baseline_is_bitwise_that_of_torch(name: str) -> None:
    (x,) = inputs(name, 1000, scale=3.0, dtype=torch.float32)
    assert torch.equal(build(name)(x), getattr(F, name)(x))


# The derivatives of the paper's Algorithms 1 and 2, worked out by hand.


def test_polynorm_gradients_are_the_closed_form() -> None:
    module = build("polynorm", eps=0.01).double()
    (x,) = inputs("polynorm", 6, 11)
    g = torch.randn_like(x)
    module(x).backward(g)
    dx = torch.zeros_like(x)
    for i, weight in enumerate(module.weight, 1):
        r = ((x ** (2 * i)).mean(-1, True) + module.eps).rsqrt()
        z = x**i * r
        dx += i * weight * x ** (i - 1) * r * (g - z * (g * z).mean(-1, True))
        torch.testing.assert_close(module.weight.grad[i - 1], (g * z).sum())
    torch.testing.assert_close(x.grad, dx)
    torch.testing.assert_close(module.bias.grad, g.sum().reshape(1))


def test_polyrelu_gradients_are_the_closed_form() -> None:
    module = build("polyrelu").double()
    (x,) = inputs("polyrelu", 6, 11)
    x.data[0, :4] = 0.0
    g = torch.randn_like(x)
    module(x).backward(g)
    slopes = sum(i * w * x ** (i - 1) for i, w in enumerate(module.weight, 1))
    torch.testing.assert_close(x.grad, torch.where(x > 0, g * slopes, 0.0))
    for i, grad in enumerate(module.weight.grad, 1):
        torch.testing.assert_close(grad, (g * relu(x) ** i).sum())
    torch.testing.assert_close(module.bias.grad, g.sum().reshape(1))


# What the paper proves or states of the two functions.


def with_weights(module: Any, *weights: float) -> Any:
    with torch.no_grad():
        module.weight.copy_(torch.tensor(weights))
    return module


def test_relu_and_its_square_are_polyrelu() -> None:
    """Lemma 1, exact: the powers that weigh 0 contribute nothing at all."""
    x = torch.cat([100 * torch.randn(10_000), torch.tensor([0.0, -0.0, 1e-30, 1e10, -1e10])])
    assert torch.equal(with_weights(PolyReLU(), 1, 0, 0)(x), F.relu(x))
    assert torch.equal(with_weights(PolyReLU(), 0, 1, 0)(x), F.relu(x).square())


def test_every_polynomial_is_two_polyrelu() -> None:
    """Lemma 1: p(x) = P(x) + Q(-x), where Q has the odd coefficients negated and no constant."""
    weights, constant = [0.5, -1.25, 2.0, 0.375], 0.7
    x = torch.linspace(-3, 3, 601, dtype=torch.float64)
    positive = with_weights(PolyReLU(order=4), *weights).double()
    torch.nn.init.constant_(positive.bias, constant)
    negated = [w * (-1) ** i for i, w in enumerate(weights, 1)]
    negative = with_weights(PolyReLU(order=4, bias=False), *negated).double()
    want = constant + sum(w * x**i for i, w in enumerate(weights, 1))
    torch.testing.assert_close(positive(x) + negative(-x), want, rtol=1e-12, atol=1e-12)


def test_a_relu_network_is_a_polyrelu_network() -> None:
    """Theorem 1, exact: the same weights with every ReLU replaced."""

    def network(activation: torch.nn.Module) -> torch.nn.Module:
        torch.manual_seed(1)
        layers = [torch.nn.Linear(4, 16), activation, torch.nn.Linear(16, 16), activation]
        return torch.nn.Sequential(*layers, torch.nn.Linear(16, 1)).double()

    x = torch.rand(200, 4, dtype=torch.float64) * 2 - 1
    ours = network(with_weights(PolyReLU(), 1, 0, 0))
    assert torch.equal(ours(x), network(torch.nn.ReLU())(x))


@pytest.mark.parametrize("width", [1, 8, 100])
def test_polynorm_in_the_l2_form_is_equation_3(width: int) -> None:
    """With a_0 x^0 / ||x^0||, and the default form is sqrt(width) times that."""
    module = build("polynorm", norm="l2", eps=1e-100).double()
    x = torch.randn(5, width, dtype=torch.float64)
    coefficients = [module.bias[0], *module.weight]
    equation_3 = sum(
        a * x**i / torch.linalg.vector_norm(x**i, dim=-1, keepdim=True)
        for i, a in enumerate(coefficients)
    )
    torch.testing.assert_close(module(x), equation_3, rtol=1e-12, atol=1e-12)
    rms = build("polynorm", eps=1e-100).double()
    torch.testing.assert_close(rms(x), equation_3 * width**0.5, rtol=1e-12, atol=1e-12)


def test_coefficients_of_one_norm_do_not_load_into_the_other() -> None:
    for name in ("polynorm", "polyrelunorm", "polynorm_glu"):
        rms, l2 = create_activation(name), create_activation(name, norm="l2")
        l2.load_state_dict(create_activation(name, norm="l2").state_dict())
        for ours, other in ((rms, l2), (l2, rms)):
            with pytest.raises(RuntimeError, match=r"is Poly\w+.* are those of Poly"):
                ours.load_state_dict(other.state_dict())


def test_weights_ascend() -> None:
    two = torch.full((1, 2), 2.0)
    assert with_weights(PolyReLU(bias=False), 1, 10, 100)(two).tolist() == [[842.0, 842.0]]
    x = torch.tensor([[-1.0, 3.0]])
    assert (with_weights(PolyNorm(), 1, 0, 0)(x)[0, 0] < 0).item()
    assert (with_weights(PolyNorm(), 0, 1, 0)(x)[0, 0] > 0).item()
    assert (with_weights(PolyNorm(), 0, 0, 1)(x)[0, 0] < 0).item()


def test_initial_values_are_those_of_the_paper() -> None:
    for cls in (PolyNorm, PolyReLU):
        for order in (1, 3, 8):
            module = cls(order=order)
            assert module.weight.tolist() == pytest.approx([1 / order] * order)
            assert module.bias.tolist() == [0.0]


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_polynorm_survives_inputs_whose_powers_overflow(dtype: torch.dtype) -> None:
    module = build("polynorm")
    x = ((2 * torch.rand(8, 300) - 1) * torch.finfo(dtype).max).to(dtype)
    want = ORACLES["polynorm"](module.double(), x.double())
    assert relative_rms(module.float()(x), want) <= TOLERANCE[dtype]
