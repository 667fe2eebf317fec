"""Networks without values, for what depends on shapes alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

__all__ = ["empty", "on_meta"]

T = TypeVar("T")


def on_meta(build: Callable[[], T]) -> T:
    """Build on the meta device, where tensors have no values and take no memory, if that works."""
    try:
        with torch.device("meta"):
            return build()
    except NotImplementedError:  # some constructors compute with the values of tensors
        return build()


def empty(build: Callable[[], T], network: Callable[[T], nn.Module]) -> T:
    """Build without values, unless the network needs them to run on fake tensors.

    Args:
        build: builds a network, and what describes it.
        network: finds the network in what ``build`` returns.
    """
    try:
        with torch.device("meta"):
            built = build()
    except Exception:  # a constructor that computes with values; a mistake of the user comes again
        return build()
    return build() if _holds_tensors(network(built)) else built


def _holds_tensors(model: nn.Module) -> bool:
    """Say whether modules keep tensors that nothing can put in the place of, on any device."""
    return any(isinstance(v, Tensor) for module in model.modules() for v in vars(module).values())
