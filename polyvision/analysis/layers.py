"""Where an analysis looks: the layers of a network, and its feed-forward networks."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from polyvision.errors import first_line, some
from polyvision.models.language.generation import eval_mode
from polyvision.models.language.moe import MoE
from polyvision.models.language.transformer import Transformer
from polyvision.models.swap.sites import feature_dim
from polyvision.models.trace.inputs import Inputs, other_sizes
from polyvision.models.trace.tracer import Tracer

__all__ = [
    "FeedForwardPart",
    "feature_dims",
    "feed_forwards",
    "forward",
    "inference",
    "layers",
    "matrix",
    "rows_of",
    "watch_outputs",
    "weight_matrices",
]

_Conv = nn.modules.conv._ConvNd
# Attribute names of (up, gate, down): ours and those of timm's Mlp.
_FORMS = (("up", "gate", "down"), ("fc1", None, "fc2"))


@dataclasses.dataclass(frozen=True)
class FeedForwardPart:
    """The matrices around one hidden layer: ``down(act(up(x)))``, gated or not.

    Attributes:
        up: the projection into the hidden layer.
        gate: the second one of a gated network; else None.
        down: the projection out of it: a linear layer or a 1x1 convolution.
    """

    up: nn.Module
    gate: nn.Module | None
    down: nn.Module

    def matrices(self) -> dict[str, Tensor]:
        """Return the weights as (out, in) matrices by role."""
        parts = {"up": self.up, "gate": self.gate, "down": self.down}
        return {role: matrix(module) for role, module in parts.items() if module is not None}


def matrix(module: nn.Module) -> Tensor:
    """Return a weight as (out, in x kernel)."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight.detach().flatten(1)


def feed_forwards(model: nn.Module) -> dict[str, FeedForwardPart]:
    """Find the feed-forward networks of ``model`` by name: our transformer's and timm's ``Mlp``."""
    found = {}
    for name, module in model.named_modules():
        for up, gate, down in _FORMS:
            parts = [getattr(module, part, None) if part else None for part in (up, gate, down)]
            if _is_matrix(parts[0]) and _is_matrix(parts[2]):
                assert parts[0] is not None
                assert parts[2] is not None
                found[name] = FeedForwardPart(parts[0], parts[1], parts[2])
    return found


def _is_matrix(module: Any) -> bool:
    if isinstance(module, _Conv):
        return all(size == 1 for size in module.kernel_size) and module.groups == 1
    return isinstance(module, nn.Linear)


def weight_matrices(model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Return layer -> role -> matrix (out, in).

    The roles are ``up``, ``gate`` and ``down`` of every feed-forward network, and of every expert
    of a mixture, whose number ends its name. A network without any, such as a ResNet, gives all its
    linear layers and ungrouped convolutions instead, each under the role ``weight`` as (out, in x
    kernel height x kernel width).
    """
    parts = {name: part.matrices() for name, part in feed_forwards(model).items()}
    for name, module in model.named_modules():
        if isinstance(module, MoE):
            parts |= _experts(name, module)
    if parts:
        return parts
    return {
        name: {"weight": matrix(module)}
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) or (isinstance(module, _Conv) and module.groups == 1)
    }


def _experts(name: str, moe: MoE) -> dict[str, dict[str, Tensor]]:
    stacks = {"up": moe.up, "gate": moe.gate, "down": moe.down}
    return {
        f"{name}.{i}": {role: w[i].detach() for role, w in stacks.items() if w is not None}
        for i in range(len(moe.up))
    }


def layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers that hidden states are taken after, in order.

    They are the children of each ``ModuleList`` or ``Sequential`` whose children all have one
    class, which is not one of torch's own: transformer blocks, the residual blocks of each stage.
    Of nested ones the innermost count.
    """
    stacks = {
        name: stack
        for name, stack in model.named_modules()
        if isinstance(stack, nn.ModuleList | nn.Sequential) and _is_stack(stack)
    }
    inner = [n for n in stacks if not any(o.startswith(f"{n}.") for o in stacks)]
    return {f"{n}.{key}": child for n in inner for key, child in stacks[n].named_children()}


def _is_stack(stack: nn.Module) -> bool:
    kinds = {type(child) for child in stack.children()}
    return len(kinds) == 1 and not kinds.pop().__module__.startswith(("torch.", "timm.layers."))


@contextmanager
def watch_outputs(
    modules: dict[str, nn.Module], see: Callable[[str, tuple[Any, ...], Tensor], None]
) -> Iterator[None]:
    """Call ``see(name, inputs, output)`` after each forward pass of each module."""

    def hook(name: str) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def after(_: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            see(name, inputs, output)

        return after

    handles = [module.register_forward_hook(hook(name)) for name, module in modules.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """Evaluate without gradients and without ``torch.compile``; leave ``model`` as it was.

    Compiled code would pass by the hooks.
    """
    compiled, model._compiled_call_impl = model._compiled_call_impl, None
    try:
        with eval_mode(model), torch.no_grad():
            yield
    finally:
        model._compiled_call_impl = compiled


def forward(model: nn.Module, inputs: Tensor) -> None:
    """Run ``model`` for what hooks see; a language model never holds all its logits."""
    if isinstance(model, Transformer):
        model(inputs, inputs)  # the loss takes a few logits at a time
    else:
        model(inputs)


def feature_dims(model: nn.Module, inputs: Tensor, names: Sequence[str]) -> dict[str, int]:
    """Find the feature dimension of what the modules called ``names`` give out.

    An image network is run on fake images of two sizes, as for activations; a module that does not
    tell is left out. In a network that reads no images every feature dimension is the last.

    Warns:
        UserWarning: the network fails at the other size, and for some module that was needed.
    """
    if inputs.ndim != 4:
        return dict.fromkeys(names, -1)
    tracer, given = Tracer(model), Inputs.of(inputs)
    (other,) = other_sizes(given)
    runs, failure = [tracer.outputs(given, names)], ""
    try:
        runs.append(tracer.outputs(other, names))
    except Exception as error:  # whatever a foreign forward raises
        failure = f"{type(error).__name__}: {first_line(error)}"
    found = {
        name: dim
        for name in names
        if all(name in run for run in runs)
        and (dim := feature_dim([run[name] for run in runs])) is not None
    }
    missing = [name for name in names if name not in found]
    if failure and missing:
        warnings.warn(
            f"{type(model).__name__} does not run on images of {tuple(other.args[0].shape)} "
            f"({failure}), so the feature dimension of {some(missing)} is not known: their maps "
            f"are taken as NCHW",
            stacklevel=2,
        )
    return found


def rows_of(state: Tensor, dim: int | None) -> Tensor:
    """Return (rows, features); where ``dim`` is not known, maps count as NCHW."""
    if dim is None:
        dim = 1 if state.ndim == 4 else -1
    return state.movedim(dim, -1).flatten(0, -2)
