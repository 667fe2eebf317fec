"""The derivations of docs/stability.md: how variances pass through deep networks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from polyvision import functional
from polyvision.analysis.stability.networks import draw_weights, mlp

C = math.sqrt(2 / math.pi)  # E|z|^3 = 2C, E|z|^5 = 8C for a standard normal z


def poly_relu_map(q: float, gain: float = 1.0) -> float:
    terms = q + 4 * C * q**1.5 + 9 * q**2 + 16 * C * q**2.5 + 15 * q**3
    return gain**2 / 9 * terms


def poly_norm_map(q: float, gain: float = 1.0) -> float:
    return gain**2 * 2 / 9 * (3 + 6 / math.sqrt(15))


MAPS = {"polynorm": poly_norm_map, "polyrelu": poly_relu_map, "relu": lambda q, g=1.0: g**2 * q}


def drawn(activation: str, width: int, depth: int, gain: float) -> nn.Sequential:
    model = mlp(width, width, depth, 10, activation)
    draw_weights(model, gain)
    return model


def pre_activations(model: nn.Sequential, x: torch.Tensor) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def keep(_: nn.Module, __: object, output: torch.Tensor) -> None:
        output.retain_grad()
        found.append(output)

    for layer in model.layers:
        if isinstance(layer, nn.Linear):
            layer.register_forward_hook(keep)
    model(x).sum().backward()
    return found


@pytest.mark.parametrize("activation", MAPS)
def test_variance_follows_the_map(activation: str) -> None:
    torch.manual_seed(1)
    found = pre_activations(drawn(activation, 1024, 4, gain=0.7), torch.randn(256, 1024))
    variances = [h.square().mean().item() for h in found]
    assert variances[0] == pytest.approx(2 * 0.49, rel=0.02)
    expected = [MAPS[activation](before, 0.7) for before in variances[:-1]]
    # Samples drift apart in PolyReLU, and the sixth powers of the largest then lift the mean.
    exact = 1 if activation == "polyrelu" else 3
    assert variances[1 : 1 + exact] == pytest.approx(expected[:exact], rel=0.05)
    assert all(v > 0.95 * e for v, e in zip(variances[1:], expected, strict=True))


@pytest.mark.parametrize("gain", [0.25, 1.0, 4.0])
def test_gradients_of_poly_norm_grow_by_a_quarter_per_layer_whatever_the_gain(gain: float) -> None:
    expected = (1 + 4 / 3 + 27 / 15 + 6 / math.sqrt(15)) / (3 + 6 / math.sqrt(15))
    assert expected == pytest.approx(1.249, abs=1e-3)
    torch.manual_seed(2)
    sample = torch.randn(64, 512)
    growth = []
    for _ in range(4):
        found = pre_activations(drawn("polynorm", 512, 8, gain), sample)
        sizes = [h.grad.square().mean().item() for h in found if h.grad is not None]
        growth.append((sizes[1] / sizes[-1]) ** (1 / (len(sizes) - 2)))
    assert sum(growth) / len(growth) == pytest.approx(expected, rel=0.08)


def test_poly_relu_has_an_unstable_fixed_point() -> None:
    low, high = 0.01, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if poly_relu_map(middle) < middle else (low, middle)
    assert low == pytest.approx(0.303, abs=2e-3)
    assert poly_relu_map(1.1 * low) > 1.1 * low  # away from it on both sides
    assert poly_relu_map(0.9 * low) < 0.9 * low


def test_the_map_names_the_layer_that_overflows_first() -> None:
    # Standard inputs and He's weights: q = 2 at the first activation, fp16 ends at 57.8.
    q, layer = 2.0, 1
    while 4 * math.sqrt(q) < 57.8:  # 4 sigma, the largest of about 10^4 values
        q, layer = poly_relu_map(q), layer + 1
    assert layer == 3


def test_poly_norm_is_bounded_by_the_root_of_the_width() -> None:
    for width in (8, 128, 8192):
        x = torch.zeros(1, width)
        x[0, 0] = 1e4  # the extreme case: one feature holds everything
        y = functional.poly_norm(x, torch.full((3,), 1 / 3))
        assert y.max().item() == pytest.approx(math.sqrt(width), rel=1e-6)
