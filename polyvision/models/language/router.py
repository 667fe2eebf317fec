r"""Which experts each token visits, and what keeps the choice balanced.

With the router's logits :math:`l` (tokens x experts), probabilities :math:`p = softmax(l)` and K
experts chosen for each of N tokens:

.. math::
    balance = E \sum_i f_i P_i, \qquad f_i = \frac{\#\{assignments\ to\ i\}}{N K}, \qquad
    P_i = \frac1N \sum_n p_{ni}

.. math:: z = \frac1N \sum_n \big(\ln \textstyle\sum_i e^{l_{ni}}\big)^2

f is divided by K, so that a perfectly balanced router has balance 1 whatever K is. A model takes
the mean of both losses over its layers, before the weights 0.01 and 0.001. Hugging Face's OLMoE
differs twice: it does not divide by K, and it takes the means f and P over the tokens of all layers
before it multiplies them. So layers that prefer different experts balance each other there, and do
not here. The paper says nothing about either; its code base divides by K and multiplies in each
layer, as here. The gradient of the balance comes through P alone.

Source: Fedus et al. 2021 (balance), https://arxiv.org/abs/2101.03961; Zoph et al. 2022 (z-loss),
https://arxiv.org/abs/2202.08906; Muennighoff et al. 2024 (OLMoE), https://arxiv.org/abs/2409.02060.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyvision.models.language.shape import MoEShape
from polyvision.recompute import recompute

__all__ = ["Assignment", "Router", "Routing", "assign"]


class Routing(NamedTuple):
    """What a router did with a batch.

    Attributes:
        balance: () the load-balance loss; 1 for a balanced router.
        z: () the router's z-loss.
        entropy: () mean entropy of a token's probabilities, in nats; at most ln E. No gradient.
        load: (E,) each expert's share of the assignments; they sum to 1. No gradient.
    """

    balance: Tensor
    z: Tensor
    entropy: Tensor
    load: Tensor


class Assignment(NamedTuple):
    """The M = N K pairs of a token and an expert, in the order of the experts.

    Attributes:
        token: (M,) the token of each pair.
        expert: (M,) the expert of each pair, ascending.
        order: (M,) the place of each pair in the list that goes token by token.
        inverse: (M,) the place of each pair of that list in this order.
        ends: (E,) int32: the pair after the last one of each expert.
    """

    token: Tensor
    expert: Tensor
    order: Tensor
    inverse: Tensor
    ends: Tensor


def assign(chosen: Tensor, experts: int) -> Assignment:
    """Sort the choices (N, K) by expert; nothing is dropped, and nothing waits for the host.

    Sorting and searching need neither atomics nor counts on the host, as ``bincount`` would.
    """
    expert, order = chosen.flatten().sort(stable=True)
    places = torch.arange(len(order), device=order.device)
    inverse = torch.empty_like(order).scatter(0, order, places)
    ends = torch.searchsorted(
        expert, torch.arange(experts, device=order.device), right=True, out_int32=True
    )
    return Assignment(order // chosen.shape[1], expert, order, inverse, ends)


class Router(nn.Module):
    """A linear layer to one logit per expert, and the choice of the K largest.

    Computed in fp32 (fp64 for fp64) whatever autocast says: among 64 experts bf16 would decide many
    choices by its rounding. The same input gives the same choice, so that a block that runs again
    under checkpointing repeats it.

    Args:
        width: size of a token's vector.
        moe: number of experts, K, and whether weights are normalised.
    """

    def __init__(self, width: int, moe: MoEShape) -> None:
        super().__init__()
        self.moe = moe
        self.weight = nn.Parameter(torch.empty(moe.experts, width))

    def forward(self, x: Tensor) -> tuple[Tensor, Assignment, Routing]:
        """Route tokens (N, width).

        Returns:
            The weights (N, K) of the chosen experts in fp32 or wider, the assignment, and the
            record with the auxiliary losses.
        """
        logits = recompute(_logits, x, self.weight)  # (N, E)
        log_p = logits.log_softmax(-1)
        p = log_p.exp()
        weights, chosen = p.topk(self.moe.top_k, dim=-1)  # (N, K)
        if self.moe.normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        assignment = assign(chosen, self.moe.experts)
        pairs = chosen.numel()
        counts = assignment.ends.diff(prepend=assignment.ends.new_zeros(1))
        load = counts.to(p.dtype) / max(pairs, 1)
        routing = Routing(
            balance=self.moe.experts * (load * p.mean(0)).sum(),
            z=logits.logsumexp(-1).square().mean(),
            entropy=-(p.detach() * log_p.detach()).sum(-1).mean(),
            load=load,
        )
        return weights, assignment, routing

    def extra_repr(self) -> str:
        """Show the number of experts and K."""
        return f"experts={self.moe.experts}, top_k={self.moe.top_k}"


def _logits(x: Tensor, weight: Tensor) -> Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    device = x.device.type
    if not torch.amp.is_autocast_available(device):
        return F.linear(x.to(dtype), weight.to(dtype))
    with torch.autocast(device, enabled=False):
        return F.linear(x.to(dtype), weight.to(dtype))
