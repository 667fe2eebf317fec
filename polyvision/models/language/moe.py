"""Mixture of experts in the place of a feed-forward network: dropless, top-k, any activation.

Source: Muennighoff et al. 2024 (OLMoE, whose model the PolyCom paper trains),
https://arxiv.org/abs/2409.02060; Gale et al. 2022 (dropless experts),
https://arxiv.org/abs/2211.15841; Zhuo et al. 2024 (Table 6), https://arxiv.org/abs/2411.03884.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from polyvision.activations import activation_info, activation_names
from polyvision.errors import PolyvisionError
from polyvision.models.language.experts import expert_down, expert_up
from polyvision.models.language.ffn import gated_hidden, hidden_activation
from polyvision.models.language.router import Router, Routing
from polyvision.models.language.shape import Draw, MoEShape

__all__ = ["MoE"]


class MoE(nn.Module):
    """Experts, each a feed-forward network; every token visits the K that its router picks.

    ``y = sum_{i in top-K} p_i down_i(act(up_i(x)))`` with the router's probabilities p; gated
    activations have a third matrix. No token is dropped, however full an expert is, and an expert
    without tokens gets zero gradients. A normalising activation normalises within a row of one
    expert's hidden layer.

    Args:
        width: size of the input and of the output.
        hidden: hidden size of an ungated expert; a gated one takes ``gated_hidden(hidden)``.
        moe: number of experts, K, and how coefficients are shared.
        activation: a registered name that is not stochastic.
        options: keywords of the activation's constructor.

    Shape:
        (..., width) -> (..., width), and the router's record.

    Raises:
        PolyvisionError: unknown activation or option, or one that has no per-expert form.

    Example:
        >>> moe = MoE(16, 24, MoEShape(experts=4, top_k=2), "polynorm")
        >>> moe.init_matrices(lambda matrix, _: nn.init.normal_(matrix, std=0.1))
        >>> y, routing = moe(torch.randn(2, 5, 16))
        >>> y.shape, routing.load.shape
        (torch.Size([2, 5, 16]), torch.Size([4]))
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        moe: MoEShape,
        activation: str,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        gated = activation_info(activation).kind == "gated"
        if gated:
            hidden = gated_hidden(hidden)
        self.activation = _activation(activation, options or {}, hidden, moe)
        self.router = Router(width, moe)
        self.gate = nn.Parameter(torch.empty(moe.experts, hidden, width)) if gated else None
        self.up = nn.Parameter(torch.empty(moe.experts, hidden, width))
        self.down = nn.Parameter(torch.empty(moe.experts, width, hidden))

    def forward(self, x: Tensor) -> tuple[Tensor, Routing]:
        """Apply each token's experts to the last dimension of ``x``."""
        tokens = x.flatten(0, -2)  # (N, width)
        weights, assignment, routing = self.router(tokens)
        share = weights.flatten()[assignment.order]  # (M,)
        hidden = [
            expert_up(tokens, w, assignment) for w in (self.gate, self.up) if w is not None
        ]  # (M, hidden) each
        if self.router.moe.expert_coefficients:
            hidden.append(assignment.expert)  # whose coefficients each row takes
        y = expert_down(hidden, share, self.down, self.activation, assignment, len(tokens))
        return y.view(x.shape), routing

    def init_matrices(self, draw: Draw) -> None:
        """Draw the matrices; the activation keeps its own values."""
        for matrix in (self.router.weight, self.gate, self.up):
            if matrix is not None:
                draw(matrix, False)
        draw(self.down, True)

    def extra_repr(self) -> str:
        """Show the size of the experts."""
        experts, hidden, width = self.up.shape
        gated = ", gated" if self.gate is not None else ""
        return f"experts={experts}, width={width}, hidden={hidden}{gated}"


def _activation(name: str, options: Mapping[str, Any], hidden: int, moe: MoEShape) -> nn.Module:
    info = activation_info(name)
    if info.kind == "stochastic":
        valid = activation_names("pointwise", "normalising", "gated")
        raise PolyvisionError(
            f"activation {name!r} draws random numbers, which experts cannot repeat in the "
            f"backward pass: choose act= one of: {', '.join(valid)}, or a model without experts"
        )
    if getattr(info.factory, "mixing", 0):
        valid = [n for n in activation_names() if not hasattr(activation_info(n).factory, "mixing")]
        raise PolyvisionError(
            f"activation {name!r} weighs its functions by the token, which experts do not do: "
            f"choose act= one of: {', '.join(valid)}, or a model without experts"
        )
    if not moe.expert_coefficients:
        return hidden_activation(name, options, hidden)
    valid = [n for n in activation_names() if _takes_groups(n)]
    if name not in valid:
        raise PolyvisionError(
            f"moe.expert_coefficients=true needs an activation with coefficients for each expert, "
            f"and {name!r} has none: choose act= one of: {', '.join(valid)}, or "
            f"moe.expert_coefficients=false"
        )
    return hidden_activation(name, options, hidden, groups=moe.experts)


def _takes_groups(name: str) -> bool:
    return "groups" in inspect.signature(activation_info(name).factory).parameters
