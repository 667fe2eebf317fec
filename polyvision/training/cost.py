"""What a step costs, without running it: FLOPs of the forward pass and bytes kept for backward."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from polyvision.analysis.flops import matrix_counter
from polyvision.analysis.saved import SavedTensors

__all__ = ["Cost", "estimate_cost"]


@dataclasses.dataclass(frozen=True)
class Cost:
    """Cost of one forward pass of a batch.

    Attributes:
        flops: floating-point operations of matrix products, convolutions and attention (two for a
            multiply-add); element-wise work, activations included, is not counted.
        saved_bytes: bytes of the tensors that are kept for the backward pass, parameters left out.
    """

    flops: int
    saved_bytes: int


def estimate_cost(model: nn.Module, make_input: Callable[[], Tensor], dtype: torch.dtype) -> Cost:
    """Trace one training forward pass of ``model`` on tensors without data.

    Args:
        model: the network.
        make_input: makes the input of a batch.
        dtype: compute dtype; below fp32 the pass runs under autocast.
    """
    flops = matrix_counter()
    low = dtype != torch.float32
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        SavedTensors() as saved,
        torch.autocast("cpu", dtype=dtype if low else torch.bfloat16, enabled=low),
        flops,
    ):
        model(make_input())
    own = sum(p.numel() * p.element_size() for p in model.parameters())
    return Cost(flops.get_total_flops(), max(saved.bytes - own, 0))
