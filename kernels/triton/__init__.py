"""Triton kernels for CUDA and ROCm: launch functions on plain tensors.

Importing this package does not import Triton; ``available`` tells whether the kernels can run.
"""

from __future__ import annotations

import functools
import importlib.util
import os

import torch
from polyvision.kernels.triton.launch import (
    poly_norm_backward,
    poly_norm_forward,
    poly_relu_backward,
    poly_relu_forward,
)
from torch import Tensor

__all__ = [
    "available",
    "poly_norm_backward",
    "poly_norm_forward",
    "poly_relu_backward",
    "poly_relu_forward",
    "supports",
]

_OLDEST = (8, 0)  # compute capability of the oldest NVIDIA chip with bf16


@functools.lru_cache(maxsize=1)
def available() -> tuple[bool, str]:
    """Tell whether the kernels can run here, and why or why not.

    With ``TRITON_INTERPRET=1`` they run on CPU tensors too, slowly: that is for tests.
    """
    if importlib.util.find_spec("triton") is None:
        return False, "the package 'triton' is not installed"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return True, "Triton's interpreter, because TRITON_INTERPRET=1"
    if not torch.cuda.is_available():
        return False, "no CUDA or ROCm device is visible to torch"
    name = torch.cuda.get_device_name()
    if torch.version.hip is None and torch.cuda.get_device_capability() < _OLDEST:
        return False, f"{name} is older than compute capability 8.0"
    return True, f"Triton on {name}"


def supports(x: Tensor, mul: Tensor | None = None, slope: Tensor | None = None) -> bool:
    """Tell whether the kernels take these operands: ``x`` in fp16, bf16 or fp32."""
    return x.dtype in (torch.float16, torch.bfloat16, torch.float32)
