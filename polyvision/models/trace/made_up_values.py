"""Answers to what tensors without data cannot tell: which boxes are kept, which branch is taken.

A detection network selects by value: ``nms(boxes, ...)``, ``torch.where(scores > 0.5)``. In a run
on fake tensors, which have shapes but no values, such an operation is computed on made-up values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = ["MadeUpValues"]

_UNTOLD = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)


class MadeUpValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers where a fake tensor cannot: a mode to enter after the fake one.

    Args:
        number: every value that is read as a number or a decision, as by ``if mask.any()``. Where
            only the size of a result depends on values, masks are true: selections keep all.

    Attributes:
        used: something depended on values.
        read: a value was read as a number, so another one may lead to other calls.
    """

    def __init__(self, number: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.number = number
        self.used = False
        self.read = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        try:
            return func(*args, **kwargs)
        except _UNTOLD:
            pass
        except RuntimeError:
            # PyTorch multiplies by groups in any dtype, but has no rule for the shape in most.
            if func is not torch.ops.aten._grouped_mm.default or args[1].ndim != 3:
                raise
            return args[0].new_empty(*args[0].shape[:-1], args[1].shape[-1])
        device = next(t.device for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor))
        with unset_fake_temporarily():
            output = func(*self.real(args), **self.real(kwargs))
        self.used = True
        if not isinstance(output, Tensor | tuple | list):
            self.read = True
            return type(output)(self.number)
        return tree_map_only(
            Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype, device=device), output
        )

    def real(self, given: Any) -> Any:
        """Return ``given`` with tensors that have values in place of all tensors."""
        self.used = True
        with unset_fake_temporarily():
            return tree_map_only(Tensor, _with_values, given)


def _with_values(tensor: Tensor) -> Tensor:
    """Return ones, or in floating point 1, 2, 3, ... in each row, which are boxes with an area."""
    row = torch.ones(tensor.shape[-1:], dtype=tensor.dtype, device="cpu")
    if tensor.is_floating_point():
        row = row.cumsum(-1) if row.ndim else row
    return row.expand(tensor.shape)
