"""What activations of several kinds share: arithmetic in fp32, checks of numbers."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from polyvision.errors import PolyvisionError
from polyvision.kernels.reference import compute_dtype

__all__ = ["Device", "Dtype", "finite", "number", "parameter", "wide"]

Device: TypeAlias = torch.device | str | None
Dtype: TypeAlias = torch.dtype | None


def wide(x: Tensor) -> Tensor:
    """Return ``x`` in the dtype of the arithmetic: fp32, or fp64 where it is fp64.

    A file that imports it calls ``torch.fx.wrap("wide")``, since a traced dtype decides nothing.
    """
    return x.to(compute_dtype(x))


def finite(value: Any) -> bool:
    """Tell whether ``value`` is a number that is finite in fp32 too, and no bool."""
    given = isinstance(value, int | float) and not isinstance(value, bool)
    return given and abs(value) <= torch.finfo(torch.float32).max


def number(
    owner: nn.Module, key: str, value: Any, *, above: float = -math.inf, below: float = math.inf
) -> float:
    """Return ``value`` if it is a finite number within the bounds, which are excluded.

    Raises:
        PolyvisionError: it is not; the text names the class and the keyword.
    """
    if not finite(value) or not above < value < below:
        bounds = "" if math.isinf(above) else f" greater than {above:g}"
        bounds += "" if math.isinf(below) else f"{' and' * bool(bounds)} less than {below:g}"
        raise PolyvisionError(
            f"{type(owner).__name__}: {key} must be a finite number{bounds}, got {value!r}"
        )
    return float(value)


def parameter(owner: nn.Module, values: list[float], device: Device, dtype: Dtype) -> nn.Parameter:
    """Return a parameter of these initial values.

    Raises:
        PolyvisionError: the dtype is none of floating-point numbers.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise PolyvisionError(
            f"{type(owner).__name__}: dtype must be a floating-point torch.dtype, got {dtype!r}"
        )
    dtype = dtype or torch.get_default_dtype()
    return nn.Parameter(torch.tensor(values, device=device, dtype=dtype))
