"""The formula of every registered activation, written out in torch for float64 inputs.

Each takes the module, for its parameters and settings, and its inputs. Nothing here calls
polyvision or a fused torch activation, so autograd through it is an oracle of the gradients too.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from polyvision.activations import activation_info, activation_names, create_activation

UNGATED = activation_names("pointwise", "normalising", "stochastic")


def relu(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, torch.zeros_like(x))


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.special.erf(x / math.sqrt(2))) / 2


def polynomial(m: Any, terms: list[Tensor]) -> Tensor:
    """Weigh the terms of power 1, 2, ... with the module's coefficients, in ascending order."""
    y = sum(weight * term for weight, term in zip(m.weight, terms, strict=True))
    return y if m.bias is None else y + m.bias


def powers(m: Any, x: Tensor) -> list[Tensor]:
    return [x**i for i in range(1, m.order + 1)]


def poly_norm(m: Any, x: Tensor) -> Tensor:
    return polynomial(m, [p / (p**2).mean(m.dim, True).add(m.eps).sqrt() for p in powers(m, x)])


ORACLES: dict[str, Callable[..., Tensor]] = {
    "relu": lambda m, x: relu(x),
    "relu2": lambda m, x: relu(x) ** 2,
    "gelu": lambda m, x: gelu(x),
    "silu": lambda m, x: x * sigmoid(x),
    "glu": lambda m, gate, up: sigmoid(gate) * up,
    "reglu": lambda m, gate, up: relu(gate) * up,
    "geglu": lambda m, gate, up: gelu(gate) * up,
    "swiglu": lambda m, gate, up: gate * sigmoid(gate) * up,
    "polynorm": poly_norm,
    "polyrelu": lambda m, x: polynomial(m, powers(m, relu(x))),
    "polyprelu": lambda m, x: polynomial(m, powers(m, relu(x) - m.slope * relu(-x))),
    "polyrelunorm": lambda m, x: poly_norm(m, relu(x)),
    "formula": lambda m, x: x * sigmoid(x),
    "polycom": lambda m, x: polynomial(m, powers(m, x * sigmoid(x))),
}


def build(name: str, **keywords: Any) -> nn.Module:
    """Make the activation with parameters that all differ, so that none can stand for another."""
    module = create_activation(name, **keywords)
    with torch.no_grad():
        flat = torch.cat([p.flatten() for p in module.parameters()] or [torch.zeros(0)])
        steps = torch.arange(flat.numel(), dtype=flat.dtype)
        nn.utils.vector_to_parameters((0.7 - 0.13 * steps) * (-1) ** steps, module.parameters())
    return module


def inputs(
    name: str, *shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """Random inputs of the activation that require gradients: two for a gated one, else one."""
    count = 2 if activation_info(name).kind == "gated" else 1
    values = [scale * torch.randn(shape, dtype=torch.float64) for _ in range(count)]
    return [x.to(dtype).requires_grad_() for x in values]


def option_names(name: str) -> set[str]:
    """Return the names of the options of an activation."""
    return {field.name for field in dataclasses.fields(activation_info(name).options)}


def cases() -> list[tuple[str, dict[str, Any]]]:
    """List every activation with its defaults and with each value of what changes its formula."""
    listed: list[tuple[str, dict[str, Any]]] = []
    for name in activation_names():
        options = option_names(name)
        variants: list[dict[str, Any]] = [{}]
        if "order" in options:
            variants += [{"order": order} for order in (1, 2, 5, 8)]
        if "bias" in options:
            variants += [{"bias": False}]
        if "eps" in options:
            variants += [{"eps": 0.3}]
        if activation_info(name).kind == "normalising":
            variants += [{"dim": dim} for dim in (0, 1, -2)]
        listed += [(name, variant) for variant in variants]
    return listed
