"""The contenders of the overflow maps, each in three forms of the same function.

``plain`` writes the formula as the sources print it, every operation in the dtype of the input: for
PolyNorm and PolyReLU these are Algorithms 2 and 1 of Zhuo et al. 2024
(https://arxiv.org/abs/2411.03884), powers included. ``ours`` is what polyvision computes under that
name. Both take the coefficients as given; evaluated in float64, ``plain`` is the reference.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor

from polyvision import functional
from polyvision.activations import create_activation

__all__ = ["CONTENDERS", "EPS", "FORMS", "Contender"]

FORMS = ("plain", "ours")
EPS = 1e-6

# (x, weight) -> y; those without coefficients ignore the weight.
Function = Callable[[Tensor, Tensor], Tensor]


@dataclasses.dataclass(frozen=True)
class Contender:
    """One activation of the maps.

    Attributes:
        name: its name in tables.
        order: number of coefficients, each 1/order as at the start of training; 0 for none.
        plain: the formula in the dtype of the input.
        ours: as polyvision computes it.
    """

    name: str
    order: int
    plain: Function
    ours: Function

    def weight(self, dtype: torch.dtype, device: str = "cpu") -> Tensor:
        """Return the initial coefficients, rounded to ``dtype``."""
        return torch.full((self.order,), 1 / max(self.order, 1), dtype=dtype, device=device)


def _poly_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Algorithm 2: sum_i w_i x^i rsqrt(mean(x^(2i)) + eps), over the last dimension."""
    y = torch.zeros_like(x)
    for i in range(len(weight)):
        power = x ** (i + 1)
        y = y + weight[i] * (power * torch.rsqrt(power.square().mean(-1, keepdim=True) + EPS))
    return y


def _poly_relu(x: Tensor, weight: Tensor) -> Tensor:
    """Algorithm 1: sum_i w_i max(x, 0)^i."""
    rectified = torch.relu(x)
    y = torch.zeros_like(x)
    for i in range(len(weight)):
        y = y + weight[i] * rectified ** (i + 1)
    return y


def _gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def _swiglu(x: Tensor) -> Tensor:
    """Both inputs are ``x``: a^2 sigmoid(a), the largest product that inputs of this size give."""
    return x * torch.sigmoid(x) * x


def _without(function: Callable[[Tensor], Tensor]) -> Function:
    """Ignore the coefficients."""
    return lambda x, _: function(x)


def _make() -> dict[str, Contender]:
    made = [
        Contender("polynorm", 3, _poly_norm, lambda x, w: functional.poly_norm(x, w, eps=EPS)),
        *(
            Contender(f"polyrelu-{order}", order, _poly_relu, functional.poly_relu)
            for order in (2, 3, 4)
        ),
        Contender(
            "relu2",
            0,
            _without(lambda x: torch.relu(x) ** 2),
            _without(create_activation("relu2")),
        ),
        Contender("gelu", 0, _without(_gelu), _without(create_activation("gelu"))),
    ]
    swiglu = create_activation("swiglu")
    made.append(Contender("swiglu", 0, _without(_swiglu), _without(lambda x: swiglu(x, x))))
    return {contender.name: contender for contender in made}


CONTENDERS = _make()
