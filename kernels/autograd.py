"""The differentiable functions, and the way each call takes.

Plain eager tensors go through an ``autograd.Function`` that calls the backend directly. The
compiler, tensor subclasses and dispatch modes go through the ``torch.library`` operations of
``ops``, whose gradient is the same code, so that both ways agree bit by bit. Function transforms
and exports take the composed formula of ``reference``; so does a backward pass that is itself
differentiated.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from polyvision.kernels import ops, reference, selection
from torch import Tensor
from torch.autograd import forward_ad

from polyvision.recompute import gradients, under_transform

__all__ = ["poly_norm", "poly_relu"]

Gradients = Sequence[Tensor | None]


def _recorded() -> bool:
    """Tell whether the backward pass that runs is itself differentiated (create_graph=True)."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def _setup_norm(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, bias, eps, dim, mul, group, rectify, backend = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, weight, bias, mul, group, output[1])
    ctx.settings = eps, dim, rectify, backend


def _norm_gradients(ctx: Any, grad: Tensor, run: Callable[..., Gradients]) -> Gradients:
    x, weight, bias, mul, group, stats = ctx.saved_tensors
    eps, dim, rectify, backend = ctx.settings
    needs = [ctx.needs_input_grad[i] for i in (0, 1, 2, 5)]
    if _recorded():

        def formula(x: Tensor, weight: Tensor, bias: Tensor | None, mul: Tensor | None) -> Tensor:
            return reference.poly_norm(x, weight, bias, eps, dim, mul, group, rectify)

        dx, dweight, dbias, dmul = gradients(
            formula, grad, (x, weight, bias, mul), needs, differentiable=True
        )
    else:
        dx, dweight, dbias, dmul = run(
            backend, grad, x, stats, weight, bias, eps, dim, mul, group, rectify, needs
        )
    return dx, dweight, dbias, None, None, dmul, None, None, None


def _setup_relu(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, backend = inputs
    ctx.save_for_backward(*tensors)
    ctx.backend = backend


def _relu_gradients(ctx: Any, grad: Tensor, run: Callable[..., Gradients]) -> Gradients:
    *inputs, group = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:5])
    found: Gradients
    if _recorded():

        def formula(*operands: Any) -> Tensor:
            x, weight, bias, slope, mul = operands
            return reference.poly_relu(x, weight, bias, slope, mul, group)

        found = gradients(formula, grad, inputs, needs, differentiable=True)
    else:
        found = run(ctx.backend, grad, *inputs, group, needs)
    return *found, None, None


def _in_memory(values: Sequence[Any]) -> list[Any]:
    """Write out what PyTorch only notes: a negated view, or zeros that have no memory.

    The dispatcher does this for the operations of ``ops``; kernels that are called directly would
    read the wrong numbers.
    """
    return [_written_out(v) if isinstance(v, Tensor) else v for v in values]


def _written_out(tensor: Tensor) -> Tensor:
    if tensor._is_zerotensor():
        return tensor.new_zeros(tensor.shape)
    return tensor.resolve_neg() if tensor.is_neg() else tensor


class _PolyNorm(torch.autograd.Function):
    @staticmethod
    def forward(*arguments: Any) -> Any:
        *operands, backend = arguments
        return selection.load(backend).poly_norm_forward(*_in_memory(operands))

    setup_context = staticmethod(_setup_norm)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        def run(backend: str, *arguments: Any) -> Any:
            return selection.load(backend).poly_norm_backward(*_in_memory(arguments))

        return _norm_gradients(ctx, grads[0], run)


class _PolyReLU(torch.autograd.Function):
    @staticmethod
    def forward(*arguments: Any) -> Any:
        *operands, backend = arguments
        return selection.load(backend).poly_relu_forward(*_in_memory(operands))

    setup_context = staticmethod(_setup_relu)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        def run(backend: str, *arguments: Any) -> Any:
            return selection.load(backend).poly_relu_backward(*_in_memory(arguments))

        return _relu_gradients(ctx, grads[0], run)


def _through_library(operation: Any) -> Callable[..., Gradients]:
    def run(backend: str, *arguments: Any) -> Gradients:
        *operands, needs = arguments
        found = operation(*operands, backend, needs)
        return [g if need else None for g, need in zip(found, needs, strict=True)]

    return run


def _norm_backward(ctx: Any, grad: Tensor, _: Any) -> Any:
    return _norm_gradients(ctx, grad, _through_library(ops.norm_backward))


def _relu_backward(ctx: Any, grad: Tensor) -> Any:
    return _relu_gradients(ctx, grad, _through_library(ops.relu_backward))


ops.norm.register_autograd(_norm_backward, setup_context=_setup_norm)
ops.relu.register_autograd(_relu_backward, setup_context=_setup_relu)


def _choose(device: str) -> str:
    if "torch.distributed.tensor" in sys.modules:
        from polyvision.kernels import sharding

        sharding.register()
    return selection.choose(device)


# A choice of the machine, not of the traced program. This is what
# torch.compiler.assume_constant_result does, without importing the compiler now.
_choose._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _backend(x: Tensor, mul: Tensor | None, slope: Tensor | None = None) -> str:
    name = _choose(x.device.type)
    return name if selection.load(name).supports(x, mul, slope) else "reference"


def _composed(backend: str) -> bool:
    """Tell whether the call takes the composed formula: exports, traces and function transforms."""
    if under_transform():
        return True
    # Without a fused kernel the compiler does best with the formula itself.
    return torch.compiler.is_exporting() or (
        torch.compiler.is_compiling() and backend == "reference"
    )


def _direct(x: Tensor) -> bool:
    """Tell whether x is a plain eager tensor: no compiler, subclass or dispatch mode."""
    return (
        not torch.compiler.is_compiling()
        and type(x) in (Tensor, torch.nn.Parameter)
        and torch._C._len_torch_dispatch_stack() == 0
    )


def _recorded_by_autograd(*tensors: Tensor | None) -> bool:
    """Tell whether a backward pass may follow, or forward-mode AD runs, which is then refused."""
    needed = any(t is not None and t.requires_grad for t in tensors)
    return (needed and torch.is_grad_enabled()) or forward_ad._current_level >= 0


def poly_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    dim: int = -1,
    mul: Tensor | None = None,
    group: Tensor | None = None,
    rectify: bool = False,
) -> Tensor:
    """Compute ``reference.poly_norm`` with the backend of the device of ``x``; differentiable."""
    backend = _backend(x, mul)
    if _composed(backend):
        return reference.poly_norm(x, weight, bias, eps, dim, mul, group, rectify)
    operands = x, weight, bias, float(eps), dim, mul, group, rectify
    y: Tensor
    if not _direct(x):
        y = ops.norm(*operands, backend)[0]
    elif _recorded_by_autograd(x, weight, bias, mul):
        y = _PolyNorm.apply(*operands, backend)[0]
    else:  # no backward pass, which alone reads the statistics
        run = selection.load(backend).poly_norm_forward
        y = run(*_in_memory(operands), save_stats=False)[0]
    return y


def poly_relu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    slope: Tensor | None = None,
    mul: Tensor | None = None,
    group: Tensor | None = None,
) -> Tensor:
    """Compute ``reference.poly_relu`` with the backend of the device of ``x``; differentiable."""
    backend = _backend(x, mul, slope)
    if _composed(backend):
        return reference.poly_relu(x, weight, bias, slope, mul, group)
    run = _PolyReLU.apply if _direct(x) else ops.relu
    y: Tensor = run(x, weight, bias, slope, mul, group, backend)
    return y
