"""Base functions of PolyCom, by name or from Python."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import Tensor, nn

from polyvision.activations.registry import activation_names, create_activation
from polyvision.errors import PolyvisionError, unknown

__all__ = ["base_function"]


def base_function(
    rho: str | Callable[[Tensor], Tensor],
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> Callable[[Tensor], Tensor]:
    """Return the function that ``rho`` names or is."""
    # The identity makes PolyCom a plain polynomial; as an activation it would be none.
    bases = sorted(["identity", *activation_names("pointwise")])
    if isinstance(rho, str):
        if rho not in bases:
            raise unknown("base (rho) of PolyCom", rho, bases)
        base = nn.Identity() if rho == "identity" else create_activation(rho)
        return base.to(device=device, dtype=dtype)
    if inspect.isclass(rho):
        raise PolyvisionError(
            f"PolyCom: rho must be a function or module, got the class {rho.__name__}; "
            f"pass an instance: rho={rho.__name__}()"
        )
    if not callable(rho):
        raise PolyvisionError(
            f"PolyCom: rho must be a function or module of one tensor, or one of "
            f"{', '.join(bases)}, got {rho!r}"
        )
    return rho
