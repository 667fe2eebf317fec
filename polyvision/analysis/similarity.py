"""Layer-wise cosine similarity of hidden states (Figure 7 of the PolyCom paper).

Source: Zhuo et al. 2024, https://arxiv.org/abs/2411.03884 (section 4.4).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

from polyvision.analysis.layers import (
    feature_dims,
    forward,
    inference,
    layers,
    rows_of,
    watch_outputs,
)
from polyvision.analysis.result import Result
from polyvision.errors import PolyvisionError

__all__ = ["analyse_similarity", "cosine_matrix", "cosine_sums", "hidden_states"]

# Elements in float64 at a time: 64 MiB.
_ELEMENTS = 1 << 23


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
    tokens = torch.tensor([float(len(state)) for state in states], dtype=torch.float64)
    return cosine_sums(states) / tokens


def cosine_sums(states: Sequence[Tensor]) -> Tensor:
    """Return the cosines of ``cosine_matrix`` summed over the tokens, not averaged.

    A few tokens of all layers are in float64 at a time.
    """
    sums = torch.full((len(states), len(states)), math.nan, dtype=torch.float64)
    shapes = [state.shape for state in states]
    for shape in set(shapes):
        places = [i for i, other in enumerate(shapes) if other == shape]
        found = torch.zeros(len(places), len(places), dtype=torch.float64)
        rows = max(1, _ELEMENTS // (len(places) * shape[1]))
        for start in range(0, shape[0], rows):
            parts = torch.stack([states[i][start : start + rows].double() for i in places])
            flat = F.normalize(parts, dim=-1, eps=1e-300).flatten(1)  # (layers, rows x width)
            found += (flat @ flat.T).cpu()
        sums[torch.tensor(places)[:, None], torch.tensor(places)] = found
    return sums


def hidden_states(model: nn.Module, inputs: Tensor) -> dict[str, Tensor]:
    """Run ``model`` and return the state after each layer as (tokens, width), by layer name.

    A language model is run with its loss, which never holds all logits. Tokens of an image are the
    places of the map: (B, C, H, W) gives B x H x W rows. Whether a map is NCHW or channel-last is
    found as for activations, by running a twin of the network on fake images of two sizes; a map
    that does not tell counts as NCHW.

    Raises:
        PolyvisionError: the network has no repeated layers.
    """
    states = _states(model, _stack(model), inputs)
    dims = feature_dims(model, inputs, list(states))
    return {name: rows_of(state, dims.get(name)) for name, state in states.items()}


def _stack(model: nn.Module) -> dict[str, nn.Module]:
    stack = layers(model)
    if not stack:
        raise PolyvisionError(
            f"{type(model).__name__} has no repeated layers (children of one class in a ModuleList "
            "or Sequential) whose hidden states could be compared"
        )
    return stack


def _states(model: nn.Module, stack: dict[str, nn.Module], inputs: Tensor) -> dict[str, Tensor]:
    states: dict[str, Tensor] = {}

    def see(name: str, _: tuple[Any, ...], output: Any) -> None:
        state = output[0] if isinstance(output, tuple) else output
        states[name] = state.detach()

    with inference(model), watch_outputs(stack, see):
        forward(model, inputs)
    return states


def analyse_similarity(model: nn.Module, inputs: Tensor) -> Result:
    """Measure how alike the hidden states after every two layers are.

    Scalars: ``mean``, over all pairs of different layers that can be compared, and ``neighbours``,
    over successive ones; 1 means that layers change no direction. Where no two layers have the same
    shape, as in a network with one block a stage, or the states are not finite, there is neither.

    Args:
        model: the network; it runs in eval mode, on one sample at a time: the states after all
            layers of a whole batch would outweigh the network.
        inputs: one batch.
    """
    stack = _stack(model)
    dims: dict[str, int] | None = None
    sums: list[Tensor] = []
    tokens: Counter[str] = Counter()
    broken: set[str] = set()
    for sample in torch.split(inputs, 1):
        states = _states(model, stack, sample)
        if dims is None:
            dims = feature_dims(model, inputs, list(states))
        rows = {name: rows_of(state, dims.get(name)) for name, state in states.items()}
        broken |= {name for name, state in rows.items() if not state.isfinite().all()}
        tokens.update({name: len(state) for name, state in rows.items()})
        sums.append(cosine_sums(list(rows.values())))
    names = list(rows)
    counts = torch.tensor([float(tokens[name]) for name in names], dtype=torch.float64)
    cosines = torch.stack(sums).sum(0) / counts
    below = cosines[torch.ones_like(cosines, dtype=torch.bool).tril(-1)]
    scalars = {
        "mean": float(below.nanmean()),
        "neighbours": float(cosines.diagonal(1).nanmean()),
    }
    widths = [state.shape[-1] for state in rows.values()]
    scalars = {name: value for name, value in scalars.items() if not math.isnan(value)}
    shown = ", ".join(f"{name} {value:.4f}" for name, value in scalars.items())
    first = next((name for name in names if name in broken), None)
    why = f"the state after {first} is not finite" if first else "no two have the same shape"
    text = (
        f"cosine of hidden states after {len(names)} layers of width "
        f"{', '.join(map(str, dict.fromkeys(widths)))} ({max(tokens.values())} tokens): "
        f"{shown or why}"
    )
    data = {"layers": names, "tokens": dict(tokens), "cosine": cosines.tolist()}
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
