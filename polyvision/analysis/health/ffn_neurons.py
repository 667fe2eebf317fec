"""The neurons of a feed-forward network, or of the experts of a mixture, seen in a forward pass."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from polyvision.analysis.layers import FeedForwardPart, feed_forwards, matrix
from polyvision.models.language.grouped import grouped_matmul
from polyvision.models.language.moe import MoE

__all__ = ["Neurons", "Part", "neuron_parts", "watch_neurons"]

Part = FeedForwardPart | MoE


@dataclasses.dataclass(frozen=True)
class Neurons:
    """What the neurons of a hidden layer put out on a batch, and what becomes of it.

    In a mixture a row is a pair of a token and one of its experts, ordered by experts, and its
    values are those of the expert's hidden layer times the router's weight of the pair: so a
    neuron's value times its column of W_down is what it adds to the output, as without experts.

    Attributes:
        values: (rows, neurons).
        down: W_down as (width, neurons), or (experts, width, neurons).
        bias: that of the down projection, (width,).
        token: (rows,) the token of each row in a mixture; None: each row is a token.
        expert: (rows,) its expert, ascending.
        tokens: number of tokens in a mixture.
    """

    values: Tensor
    down: Tensor
    bias: Tensor | None = None
    token: Tensor | None = None
    expert: Tensor | None = None
    tokens: int = 0

    def sizes(self) -> Tensor:
        """Return what each neuron adds to its token's output, as a norm: |a_i| ||W_down[:, i]||_2.

        Returns:
            (rows, neurons).
        """
        norms = torch.linalg.vector_norm(self.down, dim=-2)
        sizes: Tensor = self.values.abs() * (norms if self.expert is None else norms[self.expert])
        return sizes

    def output(self, values: Tensor) -> Tensor:
        """Project values in the place of the neurons' own; no bias is added.

        Args:
            values: (rows, neurons).

        Returns:
            (tokens, width).
        """
        with torch.autocast(values.device.type, enabled=False):
            if self.expert is None or self.token is None:
                return values @ self.down.T
            experts = torch.arange(len(self.down), device=values.device)
            ends = torch.searchsorted(self.expert, experts, right=True, out_int32=True)
            rows: Tensor = grouped_matmul(values, self.down.mT, ends)
            return rows.new_zeros(self.tokens, rows.shape[1]).index_add(0, self.token, rows)

    def few(self, tokens: int) -> Neurons:
        """Return those of at most ``tokens`` tokens, evenly spread, in fp32."""
        wide = self.down.float()
        bias = None if self.bias is None else self.bias.float()
        if self.token is None or self.expert is None:
            step = math.ceil(len(self.values) / tokens)
            return Neurons(self.values[::step].float(), wide, bias)
        step = math.ceil(self.tokens / tokens)
        chosen = self.token % step == 0
        return Neurons(
            self.values[chosen].float(),
            wide,
            bias,
            self.token[chosen] // step,
            self.expert[chosen],
            math.ceil(self.tokens / step),
        )


def neuron_parts(model: nn.Module) -> dict[str, Part]:
    """Find the feed-forward networks and the mixtures of experts of ``model``, in its order."""
    found: dict[str, Part] = dict(feed_forwards(model))
    found |= {name: module for name, module in model.named_modules() if isinstance(module, MoE)}
    return {name: found[name] for name, _ in model.named_modules() if name in found}


@contextmanager
def watch_neurons(
    parts: Mapping[str, Part], see: Callable[[str, Neurons], Tensor | None]
) -> Iterator[None]:
    """Call ``see(name, neurons)`` in each forward pass of each part.

    Where it returns a mask (rows, neurons), the values outside are set to 0 before they are
    projected down.
    """
    handles: list[Any] = []
    try:
        for name, part in parts.items():
            if isinstance(part, MoE):
                handles += _watch_mixture(part, name, see)
            else:
                handles.append(_watch_down(part.down, name, see))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _watch_down(down: nn.Module, name: str, see: Callable[[str, Neurons], Tensor | None]) -> Any:
    last = isinstance(down, nn.Linear)  # else a 1x1 convolution, whose features are dimension 1

    def before(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Tensor] | None:
        hidden: Tensor = inputs[0] if last else inputs[0].movedim(1, -1)
        rows = hidden.detach().flatten(0, -2)
        bias = getattr(down, "bias", None)
        mask = see(name, Neurons(rows, matrix(down).to(rows.dtype), bias))
        if mask is None:
            return None
        kept = hidden * mask.view(hidden.shape)
        return (kept if last else kept.movedim(-1, 1),)

    return down.register_forward_pre_hook(before)


def _watch_mixture(moe: MoE, name: str, see: Callable[[str, Neurons], Tensor | None]) -> list[Any]:
    routed: list[Any] = []

    def after_router(_: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        routed[:] = [*output[:2], len(inputs[0])]

    def after_activation(_: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor | None:
        weights, assignment, tokens = routed
        share = weights.flatten()[assignment.order].to(output.dtype)
        values = output.detach() * share[:, None]
        down = moe.down.detach().to(values.dtype)
        pairs = assignment.token, assignment.expert, tokens
        mask = see(name, Neurons(values, down, None, *pairs))
        return None if mask is None else output * mask

    return [
        moe.router.register_forward_hook(after_router),
        moe.activation.register_forward_hook(after_activation),
    ]
