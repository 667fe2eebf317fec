"""Base functions of PolyCom, by name or from Python."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import Tensor, nn

from polyvision.activations.registry import activation_names, create_activation
from polyvision.errors import PolyvisionError, unknown

__all__ = ["base_function"]


class _PReLU(nn.PReLU):
    """PReLU in the dtype of its input, which PolyCom has widened, whatever that of the slope."""

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.prelu(input, self.weight.to(input.dtype))


# Bases that the paper names beside ReLU and SiLU, which are registered, and the one that makes
# PolyCom a plain polynomial.
_PLAIN_BASES: dict[str, Callable[[], nn.Module]] = {
    "identity": nn.Identity,
    "prelu": _PReLU,
    "sigmoid": nn.Sigmoid,
}


def base_function(
    rho: str | Callable[[Tensor], Tensor],
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> Callable[[Tensor], Tensor]:
    """Return the function that ``rho`` names or is."""
    registered = activation_names("pointwise")
    bases = sorted({*registered, *_PLAIN_BASES})
    if isinstance(rho, str):
        if rho in _PLAIN_BASES and rho not in registered:
            return _PLAIN_BASES[rho]().to(device=device, dtype=dtype)
        if rho not in registered:
            raise unknown("base (rho) of PolyCom", rho, bases)
        return create_activation(rho).to(device=device, dtype=dtype)
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
