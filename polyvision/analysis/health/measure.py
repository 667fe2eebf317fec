"""Sparsity and health of a network: what its activations, states, weights and gradients look like.

Source: massive activations, Sun et al. 2024, https://arxiv.org/abs/2402.17762.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from polyvision.activations import activation_modules
from polyvision.analysis.health.dead_neurons import neuron_deaths
from polyvision.analysis.health.ffn_neurons import neuron_parts
from polyvision.analysis.health.sparsity import ppl_sparsity
from polyvision.analysis.layers import (
    feature_dims,
    forward,
    inference,
    layers,
    watch_outputs,
    weight_matrices,
)

__all__ = [
    "Health",
    "excess_kurtosis",
    "gradient_norms",
    "mean",
    "measure_health",
    "state_extremes",
    "total",
    "zero_share",
]

# What Sun et al. call massive: larger than 100, and 1,000 times the median of the same state.
_MASSIVE, _OVER_MEDIAN = 100.0, 1000.0
# Sums in float64 go over blocks of elements, 32 MiB each: a whole copy would weigh twice as much.
_ELEMENTS = 1 << 22


def total(x: Tensor, of: Callable[[Tensor], Tensor] = lambda block: block) -> Tensor:
    """Return the sum of ``of(x)``, a function of each element, as a float64 scalar.

    Example:
        >>> total(torch.tensor([1.0, 2.0, 3.0]), torch.square).item()
        14.0
    """
    result = torch.zeros((), dtype=torch.float64, device=x.device)
    for block in torch.split(x.detach().flatten(), _ELEMENTS):
        result += of(block.double()).sum()
    return result


def mean(x: Tensor, of: Callable[[Tensor], Tensor] = lambda block: block) -> Tensor:
    """Return the mean of ``of(x)`` as a float64 scalar; nan of no element."""
    return total(x, of) / x.numel()


def zero_share(x: Tensor) -> float:
    """Return the share of elements that are exactly 0.

    Example:
        >>> zero_share(torch.tensor([0.0, -0.0, 1e-30, 2.0]))
        0.5
    """
    return int((x == 0).sum()) / x.numel()


def excess_kurtosis(x: Tensor) -> float:
    """Return E[(x - mean)^4] / var^2 - 3 over all elements: 0 for a normal distribution.

    nan where all elements are equal.

    Example:
        >>> excess_kurtosis(torch.tensor([-1.0, 1.0, -1.0, 1.0]))
        -2.0
    """
    centre = mean(x)
    fourth = mean(x, lambda block: (block - centre).square().square())
    return float(fourth / mean(x, lambda block: (block - centre).square()).square() - 3)


def state_extremes(state: Tensor) -> dict[str, float]:
    """Return the largest |h|, the median |h|, and the number of massive activations.

    Massive are elements with |h| > 100 and |h| >= 1,000 times the median |h| of the same state.
    """
    size = state.abs().flatten().float()
    median = size.median()
    massive = (size > _MASSIVE) & (size >= _OVER_MEDIAN * median)
    return {
        "largest": float(size.max()),
        "median": float(median),
        "massive": float(massive.sum()),
    }


def gradient_norms(model: nn.Module) -> dict[str, float]:
    """Return the L2 norm of the gradient of each layer, and of each other child of the model.

    Parameters without a gradient count as 0.
    """
    stack = layers(model)
    squares: dict[str, float] = {}
    for name, parameter in model.named_parameters():
        owner = next((n for n in stack if name.startswith(f"{n}.")), name.split(".")[0])
        gradient = parameter.grad
        square = 0.0 if gradient is None else float(total(gradient, torch.square))
        squares[owner] = squares.get(owner, 0.0) + square
    return {name: square**0.5 for name, square in squares.items()}


@dataclasses.dataclass(frozen=True)
class Health:
    """What ``measure_health`` finds, by name.

    Attributes:
        sites: per activation: ``zero_share``, ``dead_units``, ``dynamic_dead``, ``kurtosis`` of its
            output.
        layers: per layer: ``largest``, ``median``, ``massive``, ``kurtosis`` of the state after it.
        weights: per matrix: ``mean`` and ``negative_share``. For a feed-forward network the matrix
            that reads the activation, W_down; else all. The mean over training is the weight drift.
        gradients: L2 norm of the gradient per layer.
        sparsity: the PPL-p % sparsity; None in a network without feed-forward networks
            or experts, or if the loss is not finite.
    """

    sites: dict[str, dict[str, float]]
    layers: dict[str, dict[str, float]]
    weights: dict[str, dict[str, float]]
    gradients: dict[str, float]
    sparsity: dict[str, Any] | None

    @property
    def first_massive(self) -> str | None:
        """The first layer after which the state holds a massive activation."""
        return next((name for name, seen in self.layers.items() if seen["massive"]), None)


def measure_health(
    model: nn.Module,
    inputs: Tensor,
    evaluate: Callable[[], float],
    gradients: Mapping[str, float] | None = None,
    percent: float = 1.0,
) -> Health:
    """Run ``model`` in eval mode on one batch and measure.

    An activation or layer that a pass calls several times is seen at its last call.

    Args:
        model: the network.
        inputs: one batch.
        evaluate: runs the model on that batch and returns the mean cross-entropy in nats.
        gradients: what ``gradient_norms`` returned after a backward pass.
        percent: p of the PPL-p % sparsity.
    """
    sites, stack = activation_modules(model), layers(model)
    dims = feature_dims(model, inputs, list(sites))
    at_sites: dict[str, dict[str, float]] = {}
    at_layers: dict[str, dict[str, float]] = {}

    def see_site(name: str, _: tuple[Any, ...], output: Tensor) -> None:
        deaths = neuron_deaths(output, dims.get(name))
        at_sites[name] = {
            "zero_share": zero_share(output),
            "dead_units": deaths.static,
            "dynamic_dead": deaths.dynamic,
            "kurtosis": excess_kurtosis(output),
        }

    def see_layer(name: str, _: tuple[Any, ...], output: Any) -> None:
        state = output[0] if isinstance(output, tuple) else output
        at_layers[name] = {**state_extremes(state), "kurtosis": excess_kurtosis(state)}

    with inference(model), watch_outputs(sites, see_site), watch_outputs(stack, see_layer):
        forward(model, inputs)
    parts = neuron_parts(model)
    return Health(
        {name: at_sites[name] for name in sites if name in at_sites},
        {name: at_layers[name] for name in stack if name in at_layers},
        _weights(model),
        dict(gradients or {}),
        ppl_sparsity(model, parts, evaluate, percent) if parts else None,
    )


def _weights(model: nn.Module) -> dict[str, dict[str, float]]:
    found = {}
    for name, matrices in weight_matrices(model).items():
        for role, weight in matrices.items():
            if role in ("down", "weight"):
                found[f"{name}.{role}" if role == "down" else name] = {
                    "mean": float(mean(weight)),
                    "negative_share": int((weight < 0).sum()) / weight.numel(),
                }
    return found
