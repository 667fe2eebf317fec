"""Sums in float64 over large tensors, a block at a time: a whole copy would weigh twice as much."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

__all__ = ["blocks", "mean", "total"]

# Elements of a block: 32 MiB in float64.
_ELEMENTS = 1 << 22


def blocks(x: Tensor) -> Iterator[Tensor]:
    """Yield all elements of ``x`` in float64, some at a time, each block of one dimension."""
    for block in torch.split(x.detach().flatten(), _ELEMENTS):
        yield block.double()


def total(x: Tensor, of: Callable[[Tensor], Tensor] = lambda block: block) -> Tensor:
    """Return the sum of ``of(x)``, a function of each element, as a float64 scalar.

    Example:
        >>> total(torch.tensor([1.0, 2.0, 3.0]), torch.square).item()
        14.0
    """
    result = torch.zeros((), dtype=torch.float64, device=x.device)
    for block in blocks(x):
        result += of(block).sum()
    return result


def mean(x: Tensor, of: Callable[[Tensor], Tensor] = lambda block: block) -> Tensor:
    """Return the mean of ``of(x)`` as a float64 scalar; nan of no element."""
    return total(x, of) / x.numel()
