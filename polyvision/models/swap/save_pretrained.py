"""What a swapped network of transformers must be told about its own ``save_pretrained``."""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["guard_save_pretrained"]

_METHODS = ("save_pretrained", "from_pretrained")
_PLAIN = "from_pretrained builds the plain network, with the activation that its config names"


def guard_save_pretrained(model: nn.Module, *, coefficients: bool) -> tuple[str, ...]:
    """Let ``model.save_pretrained`` warn that ``from_pretrained`` will not bring the model back.

    Args:
        model: a network whose activations were swapped.
        coefficients: whether they have parameters.

    Returns:
        Notes for the report of the swap; none for a network without these two methods.
    """
    if not all(callable(getattr(type(model), n, None)) for n in _METHODS):
        return ()
    save: Callable[..., Any] = getattr(type(model), "save_pretrained")  # noqa: B009

    @functools.wraps(save)
    def save_pretrained(self: nn.Module, *args: Any, **keywords: Any) -> Any:
        warnings.warn(
            f"{type(self).__name__} has swapped activations, and {_PLAIN}. Keep a file of "
            f"torch.save(model.state_dict(), file) too, and read it with "
            f"polyvision.load_pretrained after the same swap.",
            stacklevel=2,
        )
        return save(self, *args, **keywords)

    # On the object: a copy of it is guarded too, and a pickled one is not.
    setattr(model, "save_pretrained", types.MethodType(save_pretrained, model))  # noqa: B010
    notes = [f"{_PLAIN}: save model.state_dict() instead (docs/swap.md)"]
    if coefficients:
        notes.append(
            "transformers.Trainer decays the coefficients unless it is told not to (docs/swap.md)"
        )
    return tuple(notes)
