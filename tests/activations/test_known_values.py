"""What is known of single activations: identities, integrals, errors of fits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from activation_oracles import inputs
from scipy import integrate
from torch import Tensor

from polyvision.activations import create_activation

X = torch.linspace(-6, 6, 241, dtype=torch.float64)


def made(name: str, **options: Any) -> torch.nn.Module:
    return create_activation(name, **options).double()


TORCH: dict[str, Callable[[Tensor], Tensor]] = {
    "leaky_relu": F.leaky_relu,
    "relu6": F.relu6,
    "hardtanh": F.hardtanh,
    "softshrink": F.softshrink,
    "elu": F.elu,
    "celu": F.celu,
    "selu": F.selu,
    "softplus": F.softplus,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "mish": F.mish,
    "hardswish": F.hardswish,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "sin": torch.sin,
    "cos": torch.cos,
}


@pytest.mark.parametrize("name", TORCH)
def test_what_torch_has_is_bitwise_torchs(name: str) -> None:
    (x,) = inputs(name, 1000, scale=3.0, dtype=torch.float32)
    assert torch.equal(create_activation(name)(x), TORCH[name](x))


EQUAL: list[tuple[str, dict[str, Any], Callable[[Tensor], Tensor]]] = [
    ("swish", {}, F.silu),
    ("swish", {"beta": 1.702}, lambda x: made("quick_gelu")(x)),
    ("xsilu", {}, F.silu),
    ("xgelu", {}, F.gelu),
    ("xatlu", {}, lambda x: made("atlu")(x)),
    ("swish_t", {"alpha": 0.0}, F.silu),
    ("swish_t_a", {"alpha": 0.0}, F.silu),
    ("swish_t_b", {}, lambda x: made("swish_t_a")(x)),
    ("swish_t_c", {}, lambda x: made("swish_t_a")(x)),
    ("trrelu", {}, lambda x: x.clamp(0, 1)),
    ("shifted_relu", {"tau": 0.0}, F.relu),
    ("clipped_srelu", {"tau": 0.0, "m": 6.0}, F.relu6),
    ("clipped_st", {"tau": 0.5, "m": 1e9}, F.softshrink),
    ("gsmelu", {"alpha": 1e-9, "b": 0.01}, F.leaky_relu),
    ("gsmelu", {"alpha": 2.0, "b": 0.0}, lambda x: made("smelu")(x)),
    ("repu", {"k": 2}, lambda x: F.relu(x) ** 2),
    ("monomial", {"k": 3}, lambda x: x**3),
    ("crrelu", {"eps": 0.0}, F.relu),
    ("helu", {}, F.relu),
    ("sugar_bsilu", {}, F.relu),
    ("regelu2", {}, F.gelu),
    ("resilu2", {}, F.silu),
    ("sau", {"alpha": 0.0, "s": 1e-12}, F.relu),
    ("aptx", {}, lambda x: made("swish", beta=2.0)(x)),
    ("siren", {"w0": 1.0}, torch.sin),
    ("tesla", {}, torch.sin),
    ("poly", {"order": 2}, lambda x: (x + x**2) / 2),
]


@pytest.mark.parametrize(("name", "options", "same"), EQUAL, ids=[e[0] for e in EQUAL])
def test_special_cases(name: str, options: dict[str, Any], same: Any) -> None:
    torch.testing.assert_close(made(name, **options)(X), same(X), rtol=1e-7, atol=1e-9)


def test_dsilu_is_the_derivative_of_silu() -> None:
    x = X.clone().requires_grad_()
    (slope,) = torch.autograd.grad(F.silu(x).sum(), x)
    torch.testing.assert_close(made("dsilu")(X), slope)


@pytest.mark.parametrize(
    ("form", "init", "error"),
    [
        ("A", "leaky_relu", 0.030),
        ("A", "gelu", 0.0042),
        ("A", "swish", 1.3e-6),
        ("B", "leaky_relu", 0.034),
        ("B", "gelu", 0.00096),
        ("B", "swish", 1.3e-6),
    ],
)
def test_pau_starts_as_its_target(form: str, init: str, error: float) -> None:
    target = {"leaky_relu": F.leaky_relu, "gelu": F.gelu, "swish": F.silu}[init]
    x = torch.linspace(-3, 3, 1201, dtype=torch.float64)
    found = (
        (create_activation("pau", form=form, init=init, dtype=torch.float64)(x) - target(x))
        .abs()
        .max()
    )
    assert error / 2 < found <= error


@pytest.mark.parametrize("x", [-2.0, -0.6, 0.0, 0.3, 1.7])
def test_sau_is_a_convolution_with_a_normal_density(x: float) -> None:
    alpha, s = 0.15, 0.7

    def product(t: float) -> float:
        leaky = (x - t) if x > t else alpha * (x - t)
        return leaky * math.exp(-(t**2) / (2 * s**2)) / (s * math.sqrt(2 * math.pi))

    want = integrate.quad(product, -8, 8, points=[x], epsabs=1e-12)[0]
    module = create_activation("sau", s=s, dtype=torch.float64)
    assert module(torch.tensor([x], dtype=torch.float64)).item() == pytest.approx(want, abs=1e-9)


@pytest.mark.parametrize("beta", [0.5, 2.0])
def test_smelu_is_relu_convolved_with_a_box(beta: float) -> None:
    for x in np.linspace(-3, 3, 13):
        want = integrate.quad(lambda t: max(x - t, 0), -beta, beta, points=[x], epsabs=1e-13)[0]  # noqa: B023
        got = made("smelu", beta=beta)(torch.tensor([x], dtype=torch.float64))
        assert got.item() == pytest.approx(want / (2 * beta), abs=1e-12)


def test_hermite_starts_with_equal_mean_squares() -> None:
    points, weights = np.polynomial.hermite_e.hermegauss(20)
    weights = torch.tensor(weights / math.sqrt(2 * math.pi))
    x = torch.tensor(points).requires_grad_()
    y = create_activation("hermite", dtype=torch.float64)(x)
    (slope,) = torch.autograd.grad(y.sum(), x)
    for values in (y, slope):
        assert (weights * values**2).sum().item() == pytest.approx(2.5 / math.e)


def test_euaf_is_a_triangle_wave_of_period_2() -> None:
    x = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 7.25, -1.0, -3.0])
    assert made("euaf")(x).tolist() == [0.0, 0.5, 1.0, 0.5, 0.0, 1.0, 0.75, -0.5, -0.75]


@pytest.mark.parametrize("name", ["gsmelu", "smelu"])
def test_value_and_slope_are_continuous(name: str) -> None:
    alpha = {"gsmelu": 0.5, "smelu": 2.0}[name]
    for joint in (-alpha, alpha):
        x = torch.tensor([joint - 1e-9, joint + 1e-9]).double().requires_grad_()
        y = made(name)(x)
        (slope,) = torch.autograd.grad(y.sum(), x)
        assert y[0].item() == pytest.approx(y[1].item(), abs=1e-8)
        assert slope[0].item() == pytest.approx(slope[1].item(), abs=1e-8)


def test_derivatives_of_the_surrogates() -> None:
    """At a few points, by hand."""
    for name, points in {
        "helu": {-0.06: 0.0, -0.04: 1.0, 3.0: 1.0},
        "regelu2": {
            -4.0: 0.0,
            -1.0: -0.04922261,
            1.0: -0.04922261 + 1.09796321,
            4.0: -0.04922261 + 1.09796321 - 0.04874060,
        },
        "resilu2": {-7.0: 0.0, -1.0: -0.04060357, 7.0: 1.0},
        "sugar_bsilu": {0.0: 0.5 + 1.67 / 4},
        "clipped_relu2": {2.0: 4.0, 7.0: 14.0, 7.1: 0.0, -1.0: 0.0},
        "fatrelu": {0.005: 0.0, 0.02: 1.0},
    }.items():
        x = torch.tensor(list(points)).double().requires_grad_()
        (slope,) = torch.autograd.grad(made(name)(x).sum(), x)
        assert slope.tolist() == pytest.approx(list(points.values()), abs=1e-7)
