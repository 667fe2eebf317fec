"""Overflow maps: how each activation fares over the range of input scales, by dtype and form.

The reference is the formula in float64 on the same rounded inputs, coefficients and incoming
gradients, so that only the arithmetic of the function itself is judged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from polyvision.analysis.stability.contenders import CONTENDERS, FORMS, Contender, Function

__all__ = ["DTYPES", "EXPONENTS", "QUANTITIES", "Cell", "measure", "overflow_maps"]

DTYPES: dict[str, torch.dtype] = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
}
EXPONENTS = range(-24, 16)
QUANTITIES = ("output", "dx", "dweight")

_ROWS, _FEATURES = 16, 256


@dataclasses.dataclass(frozen=True)
class Cell:
    """One entry of a map.

    Attributes:
        contender: name of the activation.
        form: ``plain`` or ``ours``.
        dtype: ``fp16``, ``bf16`` or ``fp32``: of the input, and of the coefficients in the plain
            form; ours keeps them in fp32, as training does.
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
    weight = contender.weight(kind if form == "plain" else torch.float32, device)
    function = contender.plain if form == "plain" else contender.ours
    values = _evaluate(function, x, weight, incoming)
    truths = _evaluate(contender.plain, x.double(), weight.double(), incoming.double())
    cells = []
    for quantity in QUANTITIES if contender.order else QUANTITIES[:2]:
        figures = _compare(values[quantity], truths[quantity])
        cells.append(Cell(contender.name, form, dtype, quantity, exponent, *figures))
    return cells


def _evaluate(function: Function, x: Tensor, weight: Tensor, incoming: Tensor) -> dict[str, Tensor]:
    """Return output and gradients."""
    x = x.detach().requires_grad_()
    weight = weight.detach().requires_grad_()
    y = function(x, weight)
    dx, dweight = torch.autograd.grad(y, (x, weight), incoming, materialize_grads=True)
    return {"output": y.detach(), "dx": dx, "dweight": dweight}


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
