"""What can get an activation of its own: a call or expression, and where the source has it."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch

from polyvision.models.trace.layout import Layout

__all__ = ["Call", "KeptRole", "Operand", "Place", "Target"]

KeptRole = Literal["gate", "kernel", "positive"]


@dataclasses.dataclass(frozen=True)
class Place:
    """One expression in the source: ``owner`` is the module whose method holds it.

    No two calls end at the same character, so file, line and column of the end name one. An
    operator (``x * y``) may end where a call does: ``start`` is its begin, None for a call.
    ``after`` is the child of the owner that ran last before.
    """

    owner: str
    file: str
    line: int
    column: int
    start: tuple[int, int] | None = None
    after: str | None = dataclasses.field(default=None, compare=False)


@dataclasses.dataclass(frozen=True)
class Operand:
    """Where the source of an expression has the tensor that it is a function of.

    Attributes:
        name: a local variable that holds it; else None, and the rest tells.
        place: the call or operator that takes it.
        index: the argument's position.
        method: the call is a method of a tensor, which is the argument at 0.
    """

    name: str | None
    place: Place | None = None
    index: int = 0
    method: bool = False


@dataclasses.dataclass(frozen=True)
class Target:
    """What is called, and from where; the unit that can get an activation of its own.

    Attributes:
        module: name of the activation module, None for a function.
        kind: name of the module's class or of the function.
        place: where the call is written; None if in no module's own method.
        caller: for messages: the function that makes the call.
        method: a function that is called as a method of the tensor, ``x.relu()``.
        inplace: a function that changes its argument, such as ``relu_``.
        dropped: the call is a statement, made only for what it does to its argument.
        expression: several functions or an operator, not one call of an activation.
        operand: of an expression: where its source has the tensor it is a function of; None if it
            cannot be told.
        known: the function is an activation, not just pointwise and nonlinear.
    """

    module: str | None
    kind: str
    place: Place | None
    caller: str
    method: bool = False
    inplace: bool = False
    dropped: bool = False
    expression: bool = False
    operand: Operand | None = None
    known: bool = True


@dataclasses.dataclass
class Call:
    """One call in one pass.

    Attributes:
        shape: of the input.
        layout: of the input.
        device: of the input.
        dtype: of the input.
        keeps_shape: the output has the input's shape.
        role: ``gate``, ``kernel`` or ``positive``, which stay (``sites.find_uses``); else None.
    """

    shape: torch.Size
    layout: Layout
    device: torch.device
    dtype: torch.dtype
    keeps_shape: bool = True
    role: KeptRole | None = None
