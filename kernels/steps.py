"""Derivatives that are steps: which step an element is on is kept, in one or two bits.

A rectifier is constant in its derivative on both sides of a threshold, and so is every piecewise
linear function; some smooth functions are trained with such a derivative instead of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from polyvision.kernels.reference import compute_dtype
from torch import Tensor

from polyvision.recompute import under_compiler_or_transform

__all__ = ["Steps", "integral", "stepped", "straight_through"]


class Steps(NamedTuple):
    """The derivative ``base + sum_j jumps[j] * 1[x > at[j]]``, with one to three thresholds."""

    base: float
    at: tuple[float, ...]
    jumps: tuple[float, ...]


def _number(x: Tensor, at: tuple[float, ...]) -> Tensor:
    """Return how many thresholds each element is above, as uint8."""
    wide = x.to(compute_dtype(x))  # a threshold is not rounded to fp16
    number: Tensor = (wide > at[0]).to(torch.uint8)
    for threshold in at[1:]:
        number = number + (wide > threshold)
    return number


def _bits(steps: Steps) -> int:
    return 1 if len(steps.at) == 1 else 2


def _pack(number: Tensor, bits: int) -> Tensor:
    """Put 8 or 4 small numbers into each byte, in logical order."""
    flat, share = number.flatten(), 8 // bits
    flat = torch.nn.functional.pad(flat, (0, -len(flat) % share)).view(-1, share)
    packed = flat[:, 0].clone()
    for place in range(1, share):
        packed |= flat[:, place] << (bits * place)
    return packed


def _unpack(packed: Tensor, bits: int, shape: torch.Size) -> Tensor:
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    numbers: Tensor = (packed[:, None] >> shifts) & (2**bits - 1)
    return numbers.flatten()[: math.prod(shape)].view(shape)


class _Stepped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[[Tensor], Tensor], steps: Steps, x: Tensor) -> Tensor:
        ctx.steps, ctx.shape = steps, x.shape
        ctx.save_for_backward(_pack(_number(x, steps.at), _bits(steps)))
        return function(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (packed,), steps, grad = ctx.saved_tensors, ctx.steps, grads[0]
        number = _unpack(packed, _bits(steps), ctx.shape)
        wide = grad.to(compute_dtype(grad))
        slope = torch.full((), steps.base, dtype=wide.dtype, device=wide.device)
        for place, jump in enumerate(steps.jumps):
            slope = slope + jump * (number > place).to(wide.dtype)
        return None, None, (wide * slope).to(grad.dtype)


def stepped(function: Callable[[Tensor], Tensor], steps: Steps, x: Tensor) -> Tensor:
    """Compute ``function(x)``; its derivative is taken to be ``steps``.

    One bit an element is kept for one threshold, two bits for two or three. The compiler, exports
    and function transforms get the same function and derivative in plain operations.
    """
    if under_compiler_or_transform():
        return straight_through(function(x), integral(x.to(compute_dtype(x)), steps))
    result: Tensor = _Stepped.apply(function, steps, x)
    return result


def integral(x: Tensor, steps: Steps) -> Tensor:
    """Return a function of ``x`` with the derivative ``steps``, for its gradient alone."""
    y = steps.base * x
    for threshold, jump in zip(steps.at, steps.jumps, strict=True):
        y = y + jump * torch.where(x > threshold, x, x.detach())
    return y


def straight_through(value: Tensor, other: Tensor) -> Tensor:
    """Return ``value``, exactly, with the gradient of ``other``, which must be finite."""
    return value.detach() + (other - other.detach()).to(value.dtype)
