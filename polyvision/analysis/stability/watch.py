"""What passes through a network in one step: the largest values, and the first non-finite one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Sighting", "Watch"]


@dataclasses.dataclass(frozen=True)
class Sighting:
    """The first non-finite value of a step.

    Attributes:
        step: number of the step, from 1.
        kind: ``output`` (forward pass), ``gradient`` (with respect to a layer's output; computed
            from the last layer to the first) or ``weight gradient``.
        layer: dotted name of the module, or of the parameter.
    """

    step: int
    kind: str
    layer: str


class Watch:
    """Follow the outputs of every leaf module, their gradients, and those of the parameters.

    The largest magnitude of each tensor stays on its device until ``read``, so that watching adds
    few synchronisations to a step.

    Args:
        model: the network; hooks stay on it until ``close``.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._outputs: list[tuple[str, Tensor]] = []
        self._gradients: list[tuple[str, Tensor]] = []
        leaves = [(name, m) for name, m in model.named_modules() if not any(m.children())]
        self._handles = [m.register_forward_hook(self._hook(name)) for name, m in leaves]

    def _hook(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_: nn.Module, __: Any, output: Tensor) -> None:
            self._outputs.append((name, _peak(output)))
            if output.requires_grad:
                register: Callable[..., Any] = output.register_hook
                register(lambda g: self._gradients.append((name, _peak(g))))

        return hook

    def read(self, step: int) -> tuple[float, Sighting | None]:
        """Return the largest magnitude of the forward pass and the first non-finite value.

        Call it after the backward pass, before the gradients are cleared.

        Args:
            step: number of the step, for the sighting.

        Returns:
            The magnitude, infinite when the pass was not finite, and the sighting or None. What was
            collected is forgotten.
        """
        gradients = [(n, p.grad) for n, p in self._model.named_parameters() if p.grad is not None]
        weights = [(name, _peak(gradient)) for name, gradient in reversed(gradients)]
        found = None
        for kind, entries in (
            ("output", self._outputs),
            ("gradient", self._gradients),
            ("weight gradient", weights),
        ):
            broken = [name for name, value in _values(entries) if not math.isfinite(value)]
            if broken and found is None:
                found = Sighting(step, kind, broken[0])
        passed = [value for _, value in _values(self._outputs)]
        self._outputs.clear()
        self._gradients.clear()
        finite = all(map(math.isfinite, passed))
        return max(passed, default=0.0) if finite else math.inf, found

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()


def _peak(tensor: Tensor) -> Tensor:
    """Largest magnitude; NaN when the tensor holds one."""
    return tensor.detach().abs().amax().float()


def _values(entries: list[tuple[str, Tensor]]) -> list[tuple[str, float]]:
    """Bring all values to the host at once."""
    values = torch.stack([value for _, value in entries]).tolist() if entries else []
    return [(name, value) for (name, _), value in zip(entries, values, strict=True)]
