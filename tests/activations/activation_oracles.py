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
    return 1 / (1 + torch.exp(-x.clamp(min=-700.0)))  # beyond, exp has no finite value


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


def phi(x: Tensor) -> Tensor:
    return torch.special.ndtr(x)


def quotient(m: Any, x: Tensor) -> Tensor:
    terms = [b * x**k for k, b in enumerate(m.b, 1)]
    below = sum(t.abs() for t in terms) if "form=A" in repr(m) else sum(terms).abs()
    return sum(a * x**j for j, a in enumerate(m.a)) / (1 + below)


def hermite(m: Any, x: Tensor) -> Tensor:
    """Written out: the first polynomials of the probabilists, up to degree 4."""
    he = [x**0, x, x**2 - 1, x**3 - 3 * x, x**4 - 6 * x**2 + 3]
    return sum(c * he[k] / math.factorial(k) for k, c in enumerate(m.c))


def given_slope(value: Tensor, slope: Tensor, x: Tensor) -> Tensor:
    """Return ``value`` with a derivative that is not its own."""
    return value.detach() + slope.detach() * (x - x.detach())


def staircase(x: Tensor, at: list[float], jumps: list[float]) -> Tensor:
    return sum(a * (x > c).to(x.dtype) for a, c in zip(jumps, at, strict=True))


def bsilu_slope(x: Tensor) -> Tensor:
    return sigmoid(x) + (x + 1.67) * sigmoid(x) * (1 - sigmoid(x))


REGELU2 = [-3.18588100, -0.00117882, 3.19083261], [-0.04922261, 1.09796321, -0.04874060]
RESILU2 = [-6.30504610, -0.00086849, 6.32581524], [-0.04060357, 1.08092543, -0.04032186]
SELU = 1.0507009873554805, 1.6732632423543772

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
    "poly": lambda m, x: polynomial(m, powers(m, x)),
    # Of torch.
    "leaky_relu": lambda m, x: relu(x) - 0.01 * relu(-x),
    "relu6": lambda m, x: relu(x) - relu(x - 6),
    "hardtanh": lambda m, x: relu(x + 1) - relu(x - 1) - 1,
    "softshrink": lambda m, x: relu(x - 0.5) - relu(-x - 0.5),
    "elu": lambda m, x: relu(x) + torch.exp(-relu(-x)) - 1,
    "celu": lambda m, x: relu(x) + torch.exp(-relu(-x)) - 1,
    "selu": lambda m, x: SELU[0] * (relu(x) + SELU[1] * (torch.exp(-relu(-x)) - 1)),
    "softplus": lambda m, x: torch.where(x > 20, x, torch.log1p(torch.exp(x.clamp(max=20.0)))),
    "gelu_tanh": lambda m, x: (
        x * (1 + torch.tanh((2 / math.pi) ** 0.5 * (x + 0.044715 * x**3))) / 2
    ),
    "mish": lambda m, x: x * (1 - 2 / ((1 + torch.exp(x.clamp(max=50.0))) ** 2 + 1)),
    "hardswish": lambda m, x: x * (relu(x + 3) - relu(x - 3)) / 6,
    "sigmoid": lambda m, x: sigmoid(x),
    "tanh": lambda m, x: 2 * sigmoid(2 * x) - 1,
    # Rectifiers.
    "repu": lambda m, x: relu(x) ** 3,
    "clipped_relu2": lambda m, x: torch.where(x < math.sqrt(50), relu(x) ** 2, 50 + 0 * x),
    "trrelu": lambda m, x: relu(x) - relu(x - 1),
    "shifted_relu": lambda m, x: relu(x - 1),
    "clipped_srelu": lambda m, x: relu(x - 1) - relu(x - 2),
    "clipped_st": lambda m, x: relu(x - 1) - relu(x - 2) - relu(-x - 1) + relu(-x - 2),
    "fatrelu": lambda m, x: torch.where(x >= 0.01, x, 0 * x),
    "smelu": lambda m, x: torch.where(x.abs() <= 2, (x + 2) ** 2 / 8, relu(x)),
    "gsmelu": lambda m, x: torch.where(
        x.abs() <= 0.5,
        0.99 / 2 * x**2 + 1.01 / 2 * x + 0.99 / 8,
        torch.where(x > 0, x, 0.01 * x),
    ),
    "prelu": lambda m, x: relu(x) - m.weight * relu(-x),
    # Gates of their own input.
    "dsilu": lambda m, x: sigmoid(x) + x * sigmoid(x) * (1 - sigmoid(x)),
    "quick_gelu": lambda m, x: x * sigmoid(1.702 * x),
    "golu": lambda m, x: x * torch.exp(-torch.exp(-x.clamp(min=-30.0))),
    "atlu": lambda m, x: x * (0.5 + torch.arctan(x) / math.pi),
    "xatlu": lambda m, x: x * ((0.5 + torch.arctan(x) / math.pi) * (1 + 2 * m.alpha) - m.alpha),
    "xgelu": lambda m, x: x * (phi(x) * (1 + 2 * m.alpha) - m.alpha),
    "xsilu": lambda m, x: x * (sigmoid(x) * (1 + 2 * m.alpha) - m.alpha),
    "swish": lambda m, x: x * sigmoid(m.beta * x),
    "swish_t": lambda m, x: x * sigmoid(m.beta * x) + 0.1 * (2 * sigmoid(2 * x) - 1),
    "swish_t_a": lambda m, x: sigmoid(x) * (x + 0.2) - 0.1,
    "swish_t_b": lambda m, x: sigmoid(m.beta * x) * (x + 0.2) - 0.1,
    "swish_t_c": lambda m, x: sigmoid(m.beta * x) * (x + 0.2 / m.beta) - 0.1 / m.beta,
    "aptx": lambda m, x: sigmoid(2 * x) * x,
    "crrelu": lambda m, x: relu(x) + m.eps * x * torch.exp(-(x**2) / 2),
    "sau": lambda m, x: (
        m.alpha * x
        + (1 - m.alpha)
        * (x * phi(x / 5e-5) + 5e-5 * torch.exp(-((x / 5e-5) ** 2) / 2) / math.sqrt(2 * math.pi))
    ),
    "salu": lambda m, x: m.a * x / (1 + (m.a * m.b).abs() * x**2) ** 0.5,
    # Periodic.
    "sin": lambda m, x: torch.cos(x - math.pi / 2),
    "cos": lambda m, x: torch.sin(x + math.pi / 2),
    "siren": lambda m, x: torch.sin(30 * x),
    "gcu": lambda m, x: x * torch.cos(x),
    "euaf": lambda m, x: torch.where(x > 0, ((x + 1).remainder(2) - 1).abs(), x / (1 + relu(-x))),
    "snake": lambda m, x: x + (1 - torch.cos(2 * m.a * x)) / (2 * m.a),
    "tesla": lambda m, x: sum(
        (a * torch.sin(k * x) + b * torch.cos(k * x)) / k
        for k, (a, b) in enumerate(zip(m.a, m.b, strict=True), 1)
    ),
    "fourier": lambda m, x: (
        m.f0
        + sum(
            c * torch.cos(g * x - p) / math.factorial(k)
            for k, (c, g, p) in enumerate(zip(m.c, m.g, m.phi, strict=True), 1)
        )
    ),
    # Sums of basis functions.
    "monomial": lambda m, x: x**2,
    "hermite": hermite,
    "tropical": lambda m, x: (
        math.sqrt(2) / (len(m.c) - 1) * torch.stack([k * x + c for k, c in enumerate(m.c)]).amax(0)
    ),
    "pau": quotient,
    # Another derivative than their own.
    "helu": lambda m, x: given_slope(relu(x), staircase(x, [-0.05], [1.0]), x),
    "regelu2": lambda m, x: given_slope(gelu(x), staircase(x, *REGELU2), x),
    "resilu2": lambda m, x: given_slope(x * sigmoid(x), staircase(x, *RESILU2), x),
    "sugar_bsilu": lambda m, x: given_slope(relu(x), bsilu_slope(x), x),
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

# Activations that draw random numbers, in eval mode; test_stochastic.py has the other one.
ORACLES |= {
    "rrelu": lambda m, x: torch.where(x >= 0, x, (m.lower + m.upper) / 2 * x),
    "stocha": lambda m, x: relu(x),
}

# Mixtures; by themselves, without the logits of a token, every weight is 1/2.


def mixture(x: Tensor, weights: Any) -> Tensor:
    functions = [x, relu(x), relu(x) ** 2, torch.where(x > 0, x, x / 100), gelu(x), x * sigmoid(x)]
    functions.append(torch.tanh(x))
    return sum(w * f for w, f in zip(weights, functions, strict=True))


HALVES = [0.5] * 7

ORACLES |= {
    "la": lambda m, x: mixture(x, m.weight),
    "moa": lambda m, x: mixture(x, HALVES),
    "bi_moa": lambda m, gate, up: mixture(gate, HALVES) * mixture(up, HALVES),
}

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
    """Make the activation with parameters that all differ, so that none can stand for another.

    One that draws random numbers in training is in eval mode.
    """
    module = create_activation(name, **keywords)
    module.train(activation_info(name).kind != "stochastic")
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


# Options that change the formula without changing the one in ORACLES.
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "hermite": [{"degree": 1}, {"degree": 4}],
    "fourier": [{"degree": 1}, {"degree": 5}],
    "tropical": [{"degree": 1}, {"degree": 6}],
    "tesla": [{"terms": 1}, {"terms": 4}],
    "pau": [{"form": "B"}, {"init": "gelu"}],
}


def cases() -> list[tuple[str, dict[str, Any]]]:
    """List every activation with its defaults and with each value of what changes its formula."""
    listed: list[tuple[str, dict[str, Any]]] = []
    for name in activation_names():
        options = option_names(name)
        variants: list[dict[str, Any]] = [{}]
        variants += VARIANTS.get(name, [])
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
