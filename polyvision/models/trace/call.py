"""A call of an activation: where the source code has it, and what it gets when it is executed."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch

__all__ = ["Call", "Execution", "KeptRole", "Location", "Operand"]

KeptRole = Literal["gate", "kernel", "positive"]


@dataclasses.dataclass(frozen=True)
class Location:
    """An expression in a source file, in a method of the module called ``owner``.

    No two calls end at the same character, so file, line and column of the end identify one. An
    operator (``x * y``) may end where a call does: ``start`` is where it begins, None for a call.
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
    """Where the source has the tensor that an activation is applied to.

    Attributes:
        name: a local variable that holds it; else None, and the rest says where it is.
        location: the call or operator that takes it.
        index: the argument's position.
        method: the call is a method of a tensor, which is the argument at 0.
    """

    name: str | None
    location: Location | None = None
    index: int = 0
    method: bool = False


@dataclasses.dataclass(frozen=True)
class Call:
    """A place in the source that applies an activation: it calls one, or spells one out.

    Attributes:
        module: name of the activation module, None for a function.
        kind: name of the module's class or of the function.
        location: where the call is written; None if in no module's own method.
        caller: for messages: the function that makes the call.
        operand: of a function or expression: its input; None if that cannot be told.
        inplace: a function that changes its argument, such as ``relu_``.
        dropped: the call of a module is a statement, made only for what it does to its argument.
        expression: several functions or an operator, not one call of an activation.
        known: the function is an activation, not just pointwise and nonlinear.
    """

    module: str | None
    kind: str
    location: Location | None
    caller: str
    operand: Operand | None = None
    inplace: bool = False
    dropped: bool = False
    expression: bool = False
    known: bool = True


@dataclasses.dataclass(frozen=True)
class Execution:
    """One execution of a call in a forward pass.

    Attributes:
        shape: of the input.
        device: of the input.
        dtype: of the input.
        dim: the feature dimension according to the layers before and after, None if unknown.
        keeps_shape: the output has the input's shape.
        role: ``gate``, ``kernel`` or ``positive``, which stay (``sites.find_sites``); else None.
    """

    shape: torch.Size
    device: torch.device
    dtype: torch.dtype
    dim: int | None
    keeps_shape: bool = True
    role: KeptRole | None = None
