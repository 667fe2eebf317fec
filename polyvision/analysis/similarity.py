"""Layer-wise cosine similarity of hidden states (Figure 7 of the PolyCom paper).

Source: Zhuo et al. 2024, https://arxiv.org/abs/2411.03884 (section 4.4).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

from polyvision.analysis.layers import feature_dims, inference, layers, rows_of, watch_outputs
from polyvision.analysis.result import Result
from polyvision.errors import PolyvisionError

__all__ = ["analyse_similarity", "cosine_matrix", "hidden_states"]


def cosine_matrix(states: Sequence[Tensor]) -> Tensor:
    r"""Return the mean cosine between the hidden states of every two layers.

    .. math:: C_{ij} = \frac1N \sum_{n=1}^{N}
        \frac{\langle h_i^{(n)}, h_j^{(n)} \rangle}{\|h_i^{(n)}\|\,\|h_j^{(n)}\|}

    Args:
        states: for each layer (N, width): one row per token. Layers of another N or width cannot be
            compared.

    Returns:
        (layers, layers) float64, symmetric; nan where the shapes differ. A row of zeros has no
        direction and counts as cosine 0, also with itself.

    Example:
        >>> cosine_matrix([torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 1.0]])])[0, 1].item()
        0.7071067811865475
    """
    directions = [F.normalize(state.double(), dim=-1, eps=1e-300) for state in states]
    cosines = torch.full((len(states), len(states)), math.nan, dtype=torch.float64)
    for i, a in enumerate(directions):
        for j, b in enumerate(directions[: i + 1]):
            if a.shape == b.shape:
                cosines[i, j] = cosines[j, i] = (a * b).sum(-1).mean()
    return cosines


def hidden_states(model: nn.Module, inputs: Tensor) -> dict[str, Tensor]:
    """Run ``model`` and return the state after each layer as (tokens, width), by layer name.

    Tokens of an image are the places of the map: (B, C, H, W) gives B x H x W rows. Whether a map
    is NCHW or channel-last is found as for activations, by running a twin of the network on fake
    images of two sizes; a map that does not tell counts as NCHW.

    Raises:
        PolyvisionError: the network has no repeated layers.
    """
    stack = layers(model)
    if not stack:
        raise PolyvisionError(
            f"{type(model).__name__} has no repeated layers (children of one class in a ModuleList "
            "or Sequential) whose hidden states could be compared"
        )
    states: dict[str, Tensor] = {}

    def see(name: str, _: tuple[Any, ...], output: Any) -> None:
        state = output[0] if isinstance(output, tuple) else output
        states[name] = state.detach()

    with inference(model), watch_outputs(stack, see):
        model(inputs)
    dims = feature_dims(model, inputs, list(states))
    return {name: rows_of(state, dims.get(name)) for name, state in states.items()}


def analyse_similarity(model: nn.Module, inputs: Tensor) -> Result:
    """Measure how alike the hidden states after every two layers are.

    Scalars: ``mean``, over all pairs of different layers that can be compared, and ``neighbours``,
    over successive ones; 1 means that layers change no direction. Where no two layers have the same
    shape, as in a network with one block a stage, or the states are not finite, there is neither.

    Args:
        model: the network; it runs in eval mode.
        inputs: one batch.
    """
    states = hidden_states(model, inputs)
    broken = [name for name, state in states.items() if not state.isfinite().all()]
    cosines = cosine_matrix(list(states.values()))
    names = list(states)
    below = cosines[torch.ones_like(cosines, dtype=torch.bool).tril(-1)]
    scalars = {
        "mean": float(below.nanmean()),
        "neighbours": float(cosines.diagonal(1).nanmean()),
    }
    tokens = {name: len(state) for name, state in states.items()}
    widths = [state.shape[-1] for state in states.values()]
    scalars = {name: value for name, value in scalars.items() if not math.isnan(value)}
    shown = ", ".join(f"{name} {value:.4f}" for name, value in scalars.items())
    why = f"the state after {broken[0]} is not finite" if broken else "no two have the same shape"
    text = (
        f"cosine of hidden states after {len(names)} layers of width "
        f"{', '.join(map(str, dict.fromkeys(widths)))} ({max(tokens.values())} tokens): "
        f"{shown or why}"
    )
    data = {"layers": names, "tokens": tokens, "cosine": cosines.tolist()}
    return Result("similarity", scalars, data, _figure(names, cosines), text)


def _figure(names: Sequence[str], cosines: Tensor) -> Figure:
    figure = Figure(figsize=(5.4, 4.6), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(
        np.asarray(cosines), cmap="viridis", vmin=min(0.0, _lowest(cosines)), vmax=1
    )
    ticks = list(range(0, len(names), max(1, len(names) // 12)))
    axes.set_xticks(ticks, [str(i + 1) for i in ticks])
    axes.set_yticks(ticks, [str(i + 1) for i in ticks])
    axes.set_xlabel("layer")
    axes.set_ylabel("layer")
    if len(names) <= 8:
        for i in range(len(names)):
            for j in range(len(names)):
                _write(axes, i, j, float(cosines[i, j]))
    figure.colorbar(image, label="mean cosine of hidden states")
    return figure


def _write(axes: Any, i: int, j: int, value: float) -> None:
    if not math.isnan(value):
        colour = "white" if value < 0.6 else "black"
        axes.text(j, i, f"{value:.2f}", ha="center", va="center", color=colour, fontsize="small")


def _lowest(cosines: Tensor) -> float:
    known = cosines[cosines.isfinite()]
    return float(known.min()) if known.numel() else 0.0
