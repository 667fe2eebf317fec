r"""Sparsity of feed-forward networks: how many neurons a token needs.

Neuron i is active on a token if what it adds to the output is larger than a threshold,
:math:`|a_i|\,\|W_{down}[:, i]\|_2 > t`. In a mixture of experts the output is
:math:`\sum_{e} p_e \sum_i a_{e,i} W_{down,e}[:, i]` over the token's experts, so that
:math:`p_e a_{e,i}` stands for :math:`a_i`; neurons of experts that the router did not choose are
no neurons of the token and count nowhere. (The source treats dense networks only.)

Source: Luo et al. 2024, "Sparsing Law: towards large language models with greater activation
sparsity", https://arxiv.org/abs/2411.02335 (CETT and PPL-p % sparsity; the threshold on a neuron's
output is after Zhang et al. 2024, https://arxiv.org/abs/2402.03804).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from polyvision.analysis.health.ffn_neurons import Neurons, Part, watch_neurons
from polyvision.analysis.layers import inference

__all__ = ["cett", "ppl_sparsity", "silence", "threshold_for"]

# Tokens that thresholds are found on; the matrix work of the search is proportional to them.
_TOKENS = 256


def cett(neurons: Neurons, threshold: float) -> float:
    r"""Return the cumulative error of tail truncation, CETT, at a threshold t.

    The error is what all inactive neurons add, relative to the output, mean over tokens:

    .. math:: \mathrm{CETT}(t) = \mathrm{mean}\;
        \Big\|\sum_{i\ \mathrm{inactive}} a_i W_{down}[:, i]\Big\|_2 \,/\, \|\mathrm{FFN}(x)\|_2

    A token whose output is 0 counts as 0.

    Args:
        neurons: what they put out on a batch.
        threshold: t.
    """
    return _error(neurons, neurons.sizes(), threshold)


def _error(neurons: Neurons, sizes: Tensor, threshold: float) -> float:
    whole = neurons.output(neurons.values)
    if neurons.bias is not None:
        whole = whole + neurons.bias
    size = whole.norm(dim=-1)
    share = neurons.output(neurons.values * (sizes <= threshold)).norm(dim=-1) / size
    return float(torch.where(size > 0, share, torch.zeros_like(share)).mean())


def threshold_for(neurons: Neurons, target: float) -> float:
    """Return the largest threshold whose CETT is at most ``target``, by bisection.

    The search goes over the sorted neuron outputs, so it ends at the exact value if CETT grows with
    the threshold (the sum of inactive outputs can shrink, though rarely by much).

    Args:
        neurons: what they put out on a batch.
        target: the CETT wanted, 0 or more; at 0 only neurons that add nothing are inactive.
    """
    sizes = neurons.sizes()
    candidates = sizes.flatten().sort().values
    low, high = -1, len(candidates) - 1  # low fits (-1: no neuron), what is above high does not
    while low < high:
        middle = (low + high + 1) // 2
        if _error(neurons, sizes, float(candidates[middle])) <= target:
            low = middle
        else:
            high = middle - 1
    return float(candidates[low]) if low >= 0 else -1.0


@contextmanager
def silence(
    parts: Mapping[str, Part], thresholds: Mapping[str, float]
) -> Iterator[dict[str, list[float]]]:
    """Set inactive neurons to 0 inside the block; yield the inactive share of each pass by name."""
    shares: dict[str, list[float]] = {name: [] for name in parts}

    def see(name: str, neurons: Neurons) -> Tensor:
        active: Tensor = neurons.sizes() > thresholds[name]
        shares[name].append(1 - float(active.float().mean()))
        return active

    with watch_neurons(parts, see):
        yield shares


def ppl_sparsity(
    model: nn.Module,
    parts: Mapping[str, Part],
    evaluate: Callable[[], float],
    percent: float = 1.0,
    rounds: int = 8,
) -> dict[str, Any] | None:
    """Return the PPL-p % sparsity: how many neurons can be silenced for p % more perplexity.

    Every layer gets the threshold that reaches one common CETT. Bisection over that CETT, between 0
    and 1, finds the largest with exp(loss_sparse - loss_dense) <= 1 + p/100; thresholds are found
    on up to 256 tokens, spread over the batch.

    Args:
        model: the network; it runs in eval mode.
        parts: its feed-forward networks and mixtures by name.
        evaluate: runs the model on a fixed batch and returns the mean cross-entropy in nats.
        percent: p.
        rounds: bisections; the CETT is exact to 2^-rounds.

    Returns:
        ``sparsity`` (mean over layers), ``cett``, ``loss_dense``, ``loss_sparse``, and
        ``layers``, the sparsity of each. None if the loss is not finite.
    """
    seen: dict[str, Neurons] = {}

    def see(name: str, neurons: Neurons) -> None:
        seen[name] = neurons.few(_TOKENS)

    with inference(model):
        with watch_neurons(parts, see):
            dense = evaluate()
        if not math.isfinite(dense):
            return None
        low, high = 0.0, 1.0
        best = _sparse_loss(parts, seen, low, evaluate)
        for _ in range(rounds):
            middle = (low + high) / 2
            tried = _sparse_loss(parts, seen, middle, evaluate)
            if math.exp(min(tried["loss_sparse"] - dense, 700.0)) <= 1 + percent / 100:
                low, best = middle, tried
            else:
                high = middle
    return {"percent": percent, "cett": low, "loss_dense": dense, **best}


def _sparse_loss(
    parts: Mapping[str, Part],
    seen: Mapping[str, Neurons],
    target: float,
    evaluate: Callable[[], float],
) -> dict[str, Any]:
    thresholds = {name: threshold_for(seen[name], target) for name in parts}
    with silence(parts, thresholds) as shares:
        value = evaluate()
    by_layer = {name: share[-1] for name, share in shares.items()}
    return {
        "loss_sparse": value,
        "sparsity": sum(by_layer.values()) / len(by_layer),
        "layers": by_layer,
    }
