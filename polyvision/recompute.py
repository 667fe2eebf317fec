"""Recomputation: save a function's inputs for the backward pass, which computes it again.

Unlike ``torch.utils.checkpoint`` it costs no hooks on saved tensors, and a linear layer after the
function can be part of it. The function must be deterministic: no dropout inside.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

__all__ = [
    "autocast_now",
    "ffn_down",
    "gradients",
    "leaf_gradients",
    "make_functional",
    "recompute",
    "repeated",
    "under_compiler_or_transform",
    "under_transform",
]

Function = Callable[..., Tensor]


def gradients(
    formula: Function,
    grad: Tensor,
    inputs: Sequence[Any],
    needs: Sequence[bool],
    differentiable: bool,
) -> list[Tensor | None]:
    """Return the gradients of ``formula(*inputs)`` for those inputs that need one."""
    with torch.enable_grad():
        # Aliases, since the same tensor may be given twice; detached ones are cut off the graph.
        aliases = [
            v if not n else v.view_as(v) if differentiable else v.detach().requires_grad_()
            for v, n in zip(inputs, needs, strict=True)
        ]
        wanted = [v for v, n in zip(aliases, needs, strict=True) if n]
        found = torch.autograd.grad(
            formula(*aliases), wanted, grad, create_graph=differentiable, materialize_grads=True
        )
    rest = iter(found)
    return [next(rest) if need else None for need in needs]


def leaf_gradients(output: Tensor, leaves: Sequence[Tensor], grad: Tensor) -> list[Tensor | None]:
    """Return the gradients of the leaves that need one, zeros where ``output`` ignores them.

    By ``backward``, not ``grad``: the hooks by which torch's FLOP counter follows modules refuse
    the latter inside a backward pass.
    """
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    torch.autograd.backward(output, grad, inputs=wanted)
    return [
        None if not v.requires_grad else torch.zeros_like(v) if v.grad is None else v.grad
        for v in leaves
    ]


def under_transform() -> bool:
    """Tell whether a transform of torch.func or torch.jit.trace runs: no autograd.Function then."""
    return torch._C._are_functorch_transforms_active() or torch._C._get_tracing_state() is not None


def under_compiler_or_transform() -> bool:
    """Tell whether torch.compile or a transform runs: these decide what is saved."""
    return torch.compiler.is_compiling() or under_transform()


def repeated(function: Function, *tensors: Tensor) -> Tensor:
    """Compute ``function(*tensors)``; tell the compiler to recompute the result, not to save it.

    By itself it would save what the next matrix product reads.
    """
    if torch.compiler.is_exporting() or not torch.compiler.is_compiling():
        return function(*tensors)
    result: Tensor = checkpoint(function, *tensors, use_reentrant=False, preserve_rng_state=False)
    return result


def autocast_now(device: str) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Return a context manager of the current autocast state, for the forward pass run again."""
    if not torch.amp.is_autocast_available(device):
        return contextlib.nullcontext
    dtype, enabled = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
    return lambda: torch.autocast(device, dtype, enabled=enabled)


def make_functional(function: Function, inputs: int) -> tuple[Function, list[Tensor]]:
    """Return a module as a function of inputs and parameters, and its parameters."""
    if not isinstance(function, nn.Module) or torch._C._get_tracing_state() is not None:
        return function, []  # torch.jit.trace refuses functional_call
    names = [name for name, _ in function.named_parameters()]
    if not names:
        return function, []

    def call(*tensors: Tensor) -> Tensor:
        parameters = dict(zip(names, tensors[inputs:], strict=True))
        result: Tensor = torch.func.functional_call(function, parameters, tensors[:inputs])
        return result

    return call, list(function.parameters())


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(function: Function, *tensors: Any) -> Tensor:
        return function(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.function, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.autocast = autocast_now(output.device.type)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        recorded = torch.is_grad_enabled()
        with ctx.autocast():
            found = gradients(
                ctx.function, grads[0], ctx.saved_tensors, ctx.needs_input_grad[1:], recorded
            )
        return None, *found


def recompute(function: Function, *tensors: Tensor | None) -> Tensor:
    """Compute ``function(*tensors)``, saving only the tensors for the backward pass."""
    if under_compiler_or_transform():
        return function(*tensors)
    result: Tensor = _Recompute.apply(function, *tensors)
    return result


class _Down(torch.autograd.Function):
    @staticmethod
    def forward(
        function: Function, weight: Tensor, bias: Tensor | None, *tensors: Tensor
    ) -> Tensor:
        return linear(function(*tensors), weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.function, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.autocast = autocast_now(output.device.type)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        weight, bias, *tensors = ctx.saved_tensors
        needs = ctx.needs_input_grad[1:]
        with ctx.autocast():
            if torch.is_grad_enabled():

                def formula(weight: Tensor, bias: Tensor | None, *tensors: Tensor) -> Tensor:
                    return linear(ctx.function(*tensors), weight, bias)

                return None, *gradients(formula, grads[0], (weight, bias, *tensors), needs, True)
            return None, *_down_gradients(ctx.function, grads[0], weight, bias, tensors, needs)


def _down_gradients(
    function: Function,
    grad: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tensors: Sequence[Tensor],
    needs: Sequence[bool],
) -> list[Tensor | None]:
    with torch.enable_grad():
        aliases = [v.detach().requires_grad_(n) for v, n in zip(tensors, needs[2:], strict=True)]
        active = function(*aliases)
    flat = grad.reshape(-1, grad.shape[-1])
    dweight = dbias = None
    if needs[0]:
        rows = active.detach().reshape(-1, active.shape[-1]).to(grad.dtype)
        dweight = (flat.T @ rows).to(weight.dtype)
    if bias is not None and needs[1]:
        dbias = flat.sum(0).to(bias.dtype)
    dtensors: list[Tensor | None] = [None] * len(aliases)
    if any(needs[2:]):
        dactive = (grad @ weight.to(grad.dtype)).to(active.dtype)
        dtensors = leaf_gradients(active, aliases, dactive)
    return [dweight, dbias, *dtensors]


def ffn_down(
    inputs: Sequence[Tensor], weight: Tensor, activation: Function, bias: Tensor | None
) -> Tensor:
    """Compute ``linear(activation(*inputs), weight, bias)``, saving only the inputs."""
    if under_compiler_or_transform():
        return linear(repeated(activation, *inputs), weight, bias)
    function, parameters = make_functional(activation, len(inputs))
    result: Tensor = _Down.apply(function, weight, bias, *inputs, *parameters)
    return result
