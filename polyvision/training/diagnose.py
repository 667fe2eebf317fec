"""Where a run broke: the first module that made a non-finite value, for the error text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["first_non_finite", "non_finite_samples"]


def non_finite_samples(batch: Any) -> list[int]:
    """Return the places of the samples in a batch of tensors that hold a non-finite value."""
    tensors = [part for part in batch if isinstance(part, Tensor) and part.is_floating_point()]
    bad = [(~t.isfinite()).reshape(len(t), -1).any(1) for t in tensors]
    return sorted({int(i) for rows in bad for i in rows.nonzero()})


def first_non_finite(model: nn.Module, forward: Callable[[], Any]) -> str:
    """Run ``forward`` again and name the first module of ``model`` with a non-finite output.

    When the forward pass is clean, the first parameter with a non-finite gradient is named.
    """
    found: list[str] = []

    def watch(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            if isinstance(output, Tensor) and not output.isfinite().all():
                found.append(name)

        return hook

    modules = {n or type(model).__name__: m for n, m in model.named_modules()}
    handles = [m.register_forward_hook(watch(n)) for n, m in modules.items()]
    try:
        with torch.no_grad():
            forward()
    finally:
        for handle in handles:
            handle.remove()
    if found:
        return f"first non-finite output: {found[0]}"
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not parameter.grad.isfinite().all():
            return f"finite outputs; first non-finite gradient: {name}"
    return "all outputs and gradients of the model are finite"
