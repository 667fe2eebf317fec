"""Where the features of each tensor are, followed from layer to layer through a forward pass.

Convolutions, batch and group norms define the layout of what they read and write, as linear layers
do. Any other module that returns the shape it was given (other norms, dropout, identities,
activations) passes the layout on, and inside a module a new tensor of the shape of the module's
input is laid out like it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor, nn

__all__ = ["Layout", "Layouts"]

_Conv = nn.modules.conv._ConvNd
_BatchNorm = nn.modules.batchnorm._BatchNorm


@dataclasses.dataclass
class Layout:
    """The feature dimension as far as known; shared by all tensors that are laid out alike."""

    dim: int | None = None


class Layouts:
    """The layouts of all tensors of one pass; ``before`` and ``after`` are a module's hooks."""

    def __init__(self) -> None:
        self._of: dict[int, Layout] = {}  # by id of the tensor
        self._alive: list[Tensor] = []  # no tensor dies, so no id is used twice
        self.running: list[tuple[nn.Module, Tensor | None]] = []  # modules in action, their inputs

    def of(self, tensor: Tensor, like: Tensor | None = None) -> Layout:
        """Return the layout of ``tensor``; a new tensor takes that of ``like`` if shapes agree."""
        if id(tensor) not in self._of:
            if like is None or like is tensor or like.shape != tensor.shape:
                self._of[id(tensor)] = Layout()
            else:
                self._of[id(tensor)] = self.of(like)
            self._alive.append(tensor)
        return self._of[id(tensor)]

    def adopt(self, tensor: Tensor, layout: Layout) -> None:
        """Lay out a new tensor like the one that it was made from."""
        if id(tensor) not in self._of:
            self._of[id(tensor)] = layout
            self._alive.append(tensor)

    def here(self, tensor: Tensor) -> Layout:
        """Return the layout of ``tensor`` as seen by the module that runs now."""
        return self.of(tensor, like=self.running[-1][1] if self.running else None)

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Note what ``module`` is given."""
        given = args[0] if args and isinstance(args[0], Tensor) else None
        if given is not None:
            self.here(given)
            self._define(module, given)
        self.running.append((module, given))

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Note what ``module`` returned."""
        _, given = self.running.pop()
        if isinstance(output, Tensor):
            self._define(module, output)
            self.of(output, like=given)

    def _define(self, module: nn.Module, tensor: Tensor) -> None:
        dim = _defined_dim(module)
        if dim is not None and self.of(tensor).dim is None:
            self.of(tensor).dim = dim


def _defined_dim(module: nn.Module) -> int | None:
    if isinstance(module, _Conv | _BatchNorm | nn.GroupNorm):
        return 1
    return -1 if isinstance(module, nn.Linear) else None
