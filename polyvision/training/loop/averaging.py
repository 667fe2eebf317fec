"""An exponential moving average of the weights, beside the weights that are trained."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from timm.utils import ModelEmaV3
from torch import Tensor, nn

__all__ = ["WeightAverage", "averaged_tag"]


class WeightAverage:
    """timm's ``ModelEmaV3``: ``e <- d e + (1 - d) w`` after each optimizer step, buffers included.

    With warm-up, d grows with step t as ``min(decay, 1 - t^(-2/3))``, so that the average forgets
    the first weights soon. It is no submodule of anything: an optimizer, a clipping norm or a
    distributed wrapper never meets it.

    Args:
        model: the network; the average starts as a copy of it.
        decay: d, less than 1.
        warmup: let d grow.
    """

    def __init__(self, model: nn.Module, decay: float, *, warmup: bool) -> None:
        self._ema = ModelEmaV3(model, decay=decay, use_warmup=warmup)
        self._ema.requires_grad_(False)

    @property
    def model(self) -> nn.Module:
        """The network with averaged weights, in eval mode."""
        averaged: nn.Module = self._ema.module
        return averaged

    def to(self, device: torch.device) -> None:
        """Move the average to ``device``."""
        self._ema.to(device)

    def update(self, model: nn.Module, step: int) -> None:
        """Take in the weights of ``model`` after optimizer step ``step``; those of 1 are copied."""
        self._ema.update(model, step=step)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the averaged weights, under the names of the trained ones in a checkpoint."""
        return {f"model.{name}": value for name, value in self.model.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what ``state_dict`` returned, bit by bit."""
        self.model.load_state_dict({k.removeprefix("model."): v for k, v in state.items()})


def averaged_tag(tag: str) -> str:
    """Return the tag of a validation metric of the averaged weights: ``val/x`` is ``val_ema/x``."""
    return tag.replace("val/", "val_ema/", 1)
