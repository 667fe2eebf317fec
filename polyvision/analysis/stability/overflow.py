"""Overflow maps: how each activation fares over the range of input scales, by dtype and form.

``plain`` is the formula as the sources print it, every operation in the dtype of the input: for
PolyNorm and PolyReLU these are Algorithms 2 and 1 of Zhuo et al. 2024
(https://arxiv.org/abs/2411.03884), powers included. ``ours`` is what polyvision computes under that
name. The reference is ``plain`` in float64 on the same rounded inputs, coefficients and incoming
gradients, so that only the arithmetic of the function itself is judged.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from polyvision import functional
from polyvision.activations import create_activation
from polyvision.analysis.cost.flops import algorithm_1, algorithm_2

__all__ = [
    "CONTENDERS",
    "DTYPES",
    "EPS",
    "EXPONENTS",
    "FORMS",
    "QUANTITIES",
    "Cell",
    "Contender",
    "measure",
    "overflow_maps",
]

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
EXPONENTS = range(-24, 16)
FORMS = ("plain", "ours")
QUANTITIES = ("output", "dx", "dweight")
EPS = 1e-6
_ROWS, _FEATURES = 16, 256

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

    def form(self, form: str, dtype: torch.dtype, device: str = "cpu") -> tuple[Function, Tensor]:
        """Return a form with its initial coefficients for inputs of ``dtype``.

        The plain form has them in ``dtype``; ours keeps them in fp32, as training does.
        """
        plain = form == "plain"
        kind = dtype if plain else torch.float32
        weight = torch.full((self.order,), 1 / max(self.order, 1), dtype=kind, device=device)
        return self.plain if plain else self.ours, weight


def _contenders() -> dict[str, Contender]:
    relu2, gelu, swiglu = (create_activation(name) for name in ("relu2", "gelu", "swiglu"))
    found = [
        Contender(
            "polynorm",
            3,
            lambda x, w: algorithm_2(x, w, EPS),
            lambda x, w: functional.poly_norm(x, w, eps=EPS),
        ),
        *(
            Contender(
                f"polyrelu-{order}",
                order,
                lambda x, w: algorithm_1(torch.relu(x), w),
                functional.poly_relu,
            )
            for order in (2, 3, 4)
        ),
        Contender("relu2", 0, lambda x, _: torch.relu(x) ** 2, lambda x, _: relu2(x)),
        Contender(
            "gelu",
            0,
            lambda x, _: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
            lambda x, _: gelu(x),
        ),
        # Both inputs are x: x^2 sigmoid(x), the largest product that inputs of this size give.
        Contender("swiglu", 0, lambda x, _: x * torch.sigmoid(x) * x, lambda x, _: swiglu(x, x)),
    ]
    return {contender.name: contender for contender in found}


CONTENDERS = _contenders()


@dataclasses.dataclass(frozen=True)
class Cell:
    """One entry of a map.

    Attributes:
        contender: name of the activation.
        form: ``plain`` or ``ours``.
        dtype: ``fp16``, ``bf16`` or ``fp32``, of the input.
        quantity: ``output``, ``dx`` (gradient of the input) or ``dweight`` (of the coefficients).
        exponent: the largest input is 2^exponent.
        non_finite: share of values that are infinite or NaN.
        unavoidable: share of values that lie outside the dtype, so that a correct rounding is
            infinite too.
        error: relative error, norm(value - reference) / norm(reference) over the values that are
            finite and representable; None when there is none, or the reference is 0.
    """

    contender: str
    form: str
    dtype: str
    quantity: str
    exponent: int
    non_finite: float
    unavoidable: float
    error: float | None


def overflow_maps(
    exponents: Iterable[int] = EXPONENTS,
    device: str = "cpu",
    progress: Callable[[str], None] = lambda text: None,
) -> list[Cell]:
    """Measure every contender, form, dtype and quantity at the scales ``2^exponents``."""
    exponents = list(exponents)
    cells = []
    for contender in CONTENDERS.values():
        for dtype in DTYPES:
            for exponent in exponents:
                for form in FORMS:
                    cells += measure(contender, form, dtype, exponent, device)
        progress(f"overflow maps: {contender.name}")
    return cells


def measure(
    contender: Contender, form: str, dtype: str, exponent: int, device: str = "cpu"
) -> list[Cell]:
    """Measure one contender in one form and dtype at one input scale: a cell per quantity.

    Inputs are uniform on [-s, s) with s = 2^exponent, the same draw at every scale, so that every
    dtype holds them; incoming gradients are standard normal.
    """
    kind = DTYPES[dtype]
    generator = torch.Generator().manual_seed(0)
    uniform = torch.rand(_ROWS, _FEATURES, generator=generator, dtype=torch.float64) * 2 - 1
    incoming = torch.randn(_ROWS, _FEATURES, generator=generator, dtype=torch.float64).to(kind)
    x, incoming = (uniform * 2.0**exponent).to(device, kind), incoming.to(device)
    function, weight = contender.form(form, kind, device)
    values = _evaluate(function, x, weight, incoming)
    truths = _evaluate(contender.plain, x.double(), weight.double(), incoming.double())
    quantities = QUANTITIES if contender.order else QUANTITIES[:2]
    return [
        Cell(contender.name, form, dtype, quantity, exponent, *_compare(value, truth))
        for quantity, value, truth in zip(quantities, values, truths, strict=False)
    ]


def _evaluate(function: Function, x: Tensor, weight: Tensor, incoming: Tensor) -> list[Tensor]:
    """Return output and gradients, as in ``QUANTITIES``."""
    x, weight = (tensor.detach().requires_grad_() for tensor in (x, weight))
    y = function(x, weight)
    return [y.detach(), *torch.autograd.grad(y, (x, weight), incoming, materialize_grads=True)]


def _compare(value: Tensor, truth: Tensor) -> tuple[float, float, float | None]:
    """Return the shares of non-finite and of unrepresentable values, and the relative error."""
    representable = truth.to(value.dtype).isfinite()
    good = value.isfinite() & representable
    difference = (value.double() - truth)[good].norm().item()
    size = truth[good].norm().item()
    return (
        1 - value.isfinite().double().mean().item(),
        1 - representable.double().mean().item(),
        difference / size if size > 0 else None,
    )
