"""Dead neurons: those that put out nothing but 0, on a whole batch or on one sample of it.

The dynamic dead neuron rate is named in the literature without a formula; the one here is this
project's.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from polyvision.analysis.layers import rows_of

__all__ = ["Deaths", "neuron_deaths"]


@dataclasses.dataclass(frozen=True)
class Deaths:
    """Shares of neurons that put out nothing but 0.

    Attributes:
        static: share of neurons (features) that are 0 on the whole batch: dead units.
        dynamic: share of (neuron, sample) pairs that are 0 at every place of the sample while the
            neuron lives on another sample of the batch: the dynamic dead neuron rate.
    """

    static: float
    dynamic: float


def neuron_deaths(x: Tensor, dim: int | None = None) -> Deaths:
    """Count dead neurons in a batch of activations.

    A pair (neuron, sample) is dead if the neuron is 0 at every place of the sample: all tokens of a
    sequence, all pixels of a map. The share of dead pairs is ``static + dynamic``.

    Args:
        x: (samples, ...) with the neurons along ``dim``.
        dim: the feature dimension; None for the second of four dimensions, else the last.

    Example:
        >>> neuron_deaths(torch.tensor([[0.0, 0.0, 1.0, 1.0], [0.0, 2.0, 3.0, 1.0]]))
        Deaths(static=0.25, dynamic=0.125)
    """
    alive = torch.stack([(rows_of(sample, dim) != 0).any(0) for sample in torch.split(x, 1)])
    static = 1 - float(alive.any(0).double().mean())
    return Deaths(static, 1 - float(alive.double().mean()) - static)
