"""Sparsity of feed-forward networks: how many neurons a token needs.

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

from polyvision.analysis.layers import FeedForwardPart, inference, matrix

__all__ = ["cett", "neuron_outputs", "ppl_sparsity", "silence", "threshold_for"]

# Tokens that thresholds are found on; the matrix work of the search is proportional to them.
_TOKENS = 256


def neuron_outputs(hidden: Tensor, down: Tensor) -> Tensor:
    """Return the size of what each neuron adds to the output: |a_i| ||W_down[:, i]||_2.

    Args:
        hidden: (tokens, neurons), the input a of W_down.
        down: (width, neurons).
    """
    sizes: Tensor = hidden.abs() * torch.linalg.vector_norm(down, dim=0)
    return sizes


def cett(hidden: Tensor, down: Tensor, threshold: float, bias: Tensor | None = None) -> float:
    r"""Return the cumulative error of tail truncation, CETT, at a threshold t.

    Neuron i is active on a token if :math:`|a_i|\,\|W_{down}[:, i]\|_2 > t`. The error is what all
    inactive neurons add, relative to the output, mean over tokens:

    .. math:: \mathrm{CETT}(t) = \mathrm{mean}\;
        \Big\|\sum_{i\ \mathrm{inactive}} a_i W_{down}[:, i]\Big\|_2 \,/\, \|\mathrm{FFN}(x)\|_2

    A token whose output is 0 counts as 0.

    Args:
        hidden: (tokens, neurons).
        down: (width, neurons).
        threshold: t.
        bias: that of the down projection, (width,).
    """
    inactive = hidden * (neuron_outputs(hidden, down) <= threshold)
    with torch.autocast(hidden.device.type, enabled=False):
        whole = nn.functional.linear(hidden, down, bias).norm(dim=-1)
        lost = (inactive @ down.T).norm(dim=-1)
    share = lost / whole
    return float(torch.where(whole > 0, share, torch.zeros_like(share)).mean())


def threshold_for(hidden: Tensor, down: Tensor, target: float, bias: Tensor | None = None) -> float:
    """Return the largest threshold whose CETT is at most ``target``, by bisection.

    The search goes over the sorted neuron outputs, so it ends at the exact value if CETT grows with
    the threshold (the sum of inactive outputs can shrink, though rarely by much).

    Args:
        hidden: (tokens, neurons).
        down: (width, neurons).
        target: the CETT wanted, 0 or more; at 0 only neurons that add nothing are inactive.
        bias: that of the down projection.
    """
    candidates = neuron_outputs(hidden, down).flatten().sort().values
    low, high = -1, len(candidates) - 1  # low fits (-1: no neuron), what is above high does not
    while low < high:
        middle = (low + high + 1) // 2
        if cett(hidden, down, float(candidates[middle]), bias) <= target:
            low = middle
        else:
            high = middle - 1
    return float(candidates[low]) if low >= 0 else -1.0


@contextmanager
def silence(
    parts: Mapping[str, FeedForwardPart], thresholds: Mapping[str, float]
) -> Iterator[dict[str, list[float]]]:
    """Set inactive neurons to 0 inside the block; yield the inactive share of each pass by name."""
    shares: dict[str, list[float]] = {name: [] for name in parts}

    def hook(name: str) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Tensor]]:
        def before(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Tensor]:
            rows = _rows(module, inputs[0])
            active = neuron_outputs(rows, matrix(module).to(rows.dtype)) > thresholds[name]
            shares[name].append(1 - float(active.float().mean()))
            return (inputs[0] * _like_input(module, active, inputs[0]),)

        return before

    handles = [part.down.register_forward_pre_hook(hook(n)) for n, part in parts.items()]
    try:
        yield shares
    finally:
        for handle in handles:
            handle.remove()


def _rows(down: nn.Module, hidden: Tensor) -> Tensor:
    """Return the hidden layer as (tokens, neurons)."""
    if not isinstance(down, nn.Linear):
        hidden = hidden.movedim(1, -1)
    return hidden.flatten(0, -2)


def _like_input(down: nn.Module, rows: Tensor, hidden: Tensor) -> Tensor:
    if isinstance(down, nn.Linear):
        return rows.view(hidden.shape)
    return rows.view(hidden.movedim(1, -1).shape).movedim(-1, 1)


def ppl_sparsity(
    model: nn.Module,
    parts: Mapping[str, FeedForwardPart],
    evaluate: Callable[[], float],
    percent: float = 1.0,
    rounds: int = 8,
) -> dict[str, Any]:
    """Return the PPL-p % sparsity: how many neurons can be silenced for p % more perplexity.

    Every layer gets the threshold that reaches one common CETT. Bisection over that CETT, between 0
    and 1, finds the largest with exp(loss_sparse - loss_dense) <= 1 + p/100; thresholds are found
    on up to 256 tokens, spread over the batch.

    Args:
        model: the network; it runs in eval mode.
        parts: its feed-forward networks by name.
        evaluate: runs the model on a fixed batch and returns the mean cross-entropy in nats.
        percent: p.
        rounds: bisections; the CETT is exact to 2^-rounds.

    Returns:
        ``sparsity`` (mean over layers), ``cett``, ``loss_dense``, ``loss_sparse``, and
        ``layers``, the sparsity of each.
    """
    hidden: dict[str, Tensor] = {}

    def hook(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def before(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            rows = _rows(module, inputs[0].detach())
            hidden[name] = rows[:: math.ceil(len(rows) / _TOKENS)].float()

        return before

    handles = [part.down.register_forward_pre_hook(hook(name)) for name, part in parts.items()]
    with inference(model):
        try:
            dense = evaluate()
        finally:
            for handle in handles:
                handle.remove()
        low, high = 0.0, 1.0
        best = _sparse_loss(parts, hidden, low, evaluate)
        for _ in range(rounds):
            middle = (low + high) / 2
            tried = _sparse_loss(parts, hidden, middle, evaluate)
            if math.exp(min(tried["loss_sparse"] - dense, 700.0)) <= 1 + percent / 100:
                low, best = middle, tried
            else:
                high = middle
    return {"percent": percent, "cett": low, "loss_dense": dense, **best}


def _sparse_loss(
    parts: Mapping[str, FeedForwardPart],
    hidden: Mapping[str, Tensor],
    target: float,
    evaluate: Callable[[], float],
) -> dict[str, Any]:
    thresholds = {}
    for name, part in parts.items():
        weight, bias = matrix(part.down).float(), getattr(part.down, "bias", None)
        thresholds[name] = threshold_for(hidden[name], weight, target, bias)
    with silence(parts, thresholds) as shares:
        value = evaluate()
    by_layer = {name: seen[-1] for name, seen in shares.items()}
    return {
        "loss_sparse": value,
        "sparsity": sum(by_layer.values()) / len(by_layer),
        "layers": by_layer,
    }
