"""What all polynomial activations share: their coefficients, and what these are to begin with."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from polyvision import functional
from polyvision.errors import unknown

__all__ = ["FUNCTION_KEY", "Coefficients", "Polynomial", "integer", "is_traced", "step_of_a_graph"]

# Of a module's entry in the ``_metadata`` of a state_dict.
FUNCTION_KEY = "polyvision_function"

_INITIAL = ("equal", "base")


def integer(value: Any) -> bool:
    """Tell whether ``value`` is an int, and no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_traced(x: Any) -> bool:
    """Tell whether ``x`` stands for a tensor in a graph that torch.fx traces."""
    return isinstance(x, torch.fx.Proxy)


def step_of_a_graph(module: nn.Module, x: Any) -> Any:
    """Enter ``module`` into the graph that torch.fx traces, as one step with its parameters.

    None if the module is traced by itself.
    """
    name = x.tracer.path_of_module(module)
    return x.tracer.create_proxy("call_module", name, (x,), {}) if name else None


class Coefficients(nn.Module):
    """A module whose ``state_dict`` names the function that its parameters belong to.

    PolyNorm's coefficients would load into a PolyReLU without a word, so the entry of the module in
    the ``_metadata`` of a state_dict names the function. It lasts through ``torch.save``.
    """

    _function: str

    def function_name(self) -> str:
        """Name the function that the coefficients belong to: others have the same shapes."""
        return self._function

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        entry = getattr(destination, "_metadata", {}).get(prefix[:-1])
        if entry is not None:
            entry[FUNCTION_KEY] = self.function_name()

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        trained = local_metadata.get(FUNCTION_KEY)
        if trained not in (None, self.function_name()):
            error_msgs.append(
                f"{prefix[:-1] or 'the activation'} is {self.function_name()}, and its "
                f"coefficients in the state_dict are those of {trained}"
            )
            return
        super()._load_from_state_dict(
            state_dict,
            prefix,
            local_metadata,
            strict,
            missing_keys,
            unexpected_keys,
            error_msgs,
        )


class Polynomial(Coefficients):
    """The coefficients of the family: ``weight`` of shape (order,) and ``bias`` of shape (1,).

    Args:
        order: number of coefficients, 1 to 8.
        bias: learn a constant term.
        device: where the coefficients live.
        dtype: their dtype.
        groups: a set for each group of rows, (groups, order) and (groups, 1); None for one set.
        init: ``equal`` for 1/order each, the paper's; ``base`` for (1, 0, ..., 0), with which a
            polynomial of a function starts as that function.

    Raises:
        ValueError: a value is out of range.
    """

    def __init__(
        self,
        order: int,
        bias: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        groups: int | None = None,
        init: str = "equal",
    ) -> None:
        super().__init__()
        if init not in _INITIAL:
            raise unknown(f"init of {type(self).__name__}", init, _INITIAL)
        if not integer(order) or not 1 <= order <= functional.MAX_ORDER:
            raise ValueError(
                f"{type(self).__name__}: order must be an integer from 1 to "
                f"{functional.MAX_ORDER}, got {order!r}"
            )
        if not isinstance(bias, bool):
            raise ValueError(f"{type(self).__name__}: bias must be True or False, got {bias!r}")
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(
                f"{type(self).__name__}: dtype must be a floating-point torch.dtype, got {dtype!r}"
            )
        if groups is not None and (not integer(groups) or groups < 1):
            raise ValueError(
                f"{type(self).__name__}: groups must be a positive integer or None, got {groups!r}"
            )
        self.order, self.groups, self.init = order, groups, init
        sets = () if groups is None else (groups,)
        self.weight = nn.Parameter(torch.empty(*sets, order, device=device, dtype=dtype))
        self.bias = (
            nn.Parameter(torch.empty(*sets, 1, device=device, dtype=dtype)) if bias else None
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the coefficients to what ``init`` names, and the bias to 0."""
        nn.init.constant_(self.weight, 1.0 / self.order if self.init == "equal" else 0.0)
        if self.init == "base":
            nn.init.ones_(self.weight[..., 0])
        if self.bias is not None:
            nn.init.zeros_(self.bias)
