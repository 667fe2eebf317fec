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
    y = polynomial(m, [p / (p**2).mean(m.dim, True).add(m.eps).sqrt() for p in powers(m, x)])
    return y if m.norm == "rms" else y / x.shape[m.dim] ** 0.5


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

# Gated activations, of two projections.


def expanded(gating: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def formula(m: Any, gate: Tensor, up: Tensor) -> Tensor:
        y = (gating(gate) * (1 + 2 * m.alpha) - m.alpha) * up
        return y * gate if m.second_order else y

    return formula


def powlu(m: Any, gate: Tensor, up: Tensor) -> Tensor:
    f = torch.zeros_like(gate)
    above = gate > 0
    t, below = gate[above], gate[~above]
    f = f.masked_scatter(above, t ** (m.m / (t**0.5 + 1)) * sigmoid(t))
    return f.masked_scatter(~above, below * sigmoid(below)) * up


def swiglu_clip(m: Any, gate: Tensor, up: Tensor) -> Tensor:
    g = torch.where(gate < m.limit, gate, m.limit)
    linear = relu(up + m.limit) - relu(up - m.limit) - m.limit
    return g / (1 + torch.exp(-m.alpha * g)) * (linear + m.shift)


ORACLES |= {
    "bilinear": lambda m, gate, up: gate * up,
    "drelu": lambda m, gate, up: relu(gate) * relu(up),
    "polynorm_glu": lambda m, gate, up: poly_norm(m, gate) * up,
    "polyrelu_glu": lambda m, gate, up: polynomial(m, powers(m, relu(gate))) * up,
    "powlu": powlu,
    "swiglu_clip": swiglu_clip,
    "xatglu": expanded(lambda x: torch.atan(x) / math.pi + 0.5),
    "xgeglu": expanded(lambda x: (1 + torch.special.erf(x / math.sqrt(2))) / 2),
    "xswiglu": expanded(sigmoid),
}

# Activations that normalise.


def norm_silu(m: Any, x: Tensor) -> Tensor:
    c = x - x.mean(m.dim, True) if m.subtract_mean else x
    if m.gain is None:
        return c * sigmoid(c)
    c = m.gain * c / ((c**2).mean(m.dim, True) + m.eps).sqrt()
    return c * sigmoid(c)


def ash(m: Any, x: Tensor) -> Tensor:
    dims = tuple(range(1, x.ndim)) if m.over == "sample" else m.dim
    variance = x.var(dims, correction=0, keepdim=True)
    threshold = x.mean(dims, keepdim=True) + m.z * (variance + m.eps).sqrt()
    return x * sigmoid(2 * m.alpha * (x - threshold))


def radial_bounding(m: Any, x: Tensor) -> Tensor:
    lengths = [
        torch.linalg.vector_norm(group, dim=m.dim, keepdim=True).expand_as(group)
        for group in x.split(m.size, m.dim)
    ]
    length = torch.cat(lengths, m.dim)
    return torch.where(length > 1, x / length, x)


ORACLES |= {"ash": ash, "normsilu": norm_silu, "radial_bounding": radial_bounding}

# Activations that normalise over a dimension that is chosen.
OVER_A_DIM = [*activation_names("normalising"), "polynorm_glu"]

# Values of the options that change a formula, beside those that ``cases`` knows by their name.
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "powlu": [{"m": 1.0}, {"m": 9.5}],
    "swiglu_clip": [{"alpha": 1.0, "shift": 0.0}, {"limit": 0.5}],
    "ash": [{"over": "sample"}],
    "normsilu": [{"subtract_mean": False}, {"rms": False}, {"features": 7}],
    "radial_bounding": [{"size": 1}, {"size": 3}, {"size": 100}],
    "xatglu": [{"second_order": True}],
    "xgeglu": [{"second_order": True}],
    "xswiglu": [{"second_order": True}],
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
        if "norm" in options:
            variants += [{"norm": "l2"}, {"norm": "l2", "bias": False, "eps": 0.3}]
        if name in OVER_A_DIM:
            variants += [{"dim": dim} for dim in (0, 1, -2)]
        variants += VARIANTS.get(name, [])
        listed += [(name, variant) for variant in variants]
    return listed
