"""Effective rank of the weights (Figure 6 of the PolyCom paper).

Source: Zhuo et al. 2024, https://arxiv.org/abs/2411.03884 (appendix E.3, equation 39), after Roy
and Vetterli 2007, "The effective rank: a measure of effective dimensionality".
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor, nn

from polyvision.analysis.layers import weight_matrices
from polyvision.analysis.result import Result, text_table

__all__ = ["analyse_rank", "effective_rank"]


def effective_rank(matrix: Tensor) -> float:
    r"""Return the effective rank of a matrix: the exponential of its spectrum's entropy.

    With singular values s_1 >= ... >= s_n >= 0, n = min(rows, columns):

    .. math:: p_i = s_i / \sum_{j=1}^{n} s_j, \qquad
        \mathrm{Erank}(A) = \exp\Big(-\sum_{i=1}^{n} p_i \ln p_i\Big), \qquad 0 \ln 0 = 0

    The singular values themselves are normalised, not their squares. 1 <= Erank <= rank; n equal
    singular values give n. (The paper's sums start at 0, where there is no singular value.)

    Args:
        matrix: (rows, columns), any float dtype; computed in float64.

    Returns:
        The effective rank; 0 for a matrix of zeros, nan if an element is not finite.

    Example:
        >>> round(effective_rank(torch.eye(5)), 6), round(effective_rank(torch.ones(4, 7)), 6)
        (5.0, 1.0)
    """
    exact = matrix.detach().double()
    if not exact.isfinite().all():
        return float("nan")
    values = torch.linalg.svdvals(exact)
    total = values.sum()
    if total == 0:
        return 0.0
    return float(torch.special.entr(values / total).sum().exp())


def analyse_rank(
    model: nn.Module, history: Mapping[int, Mapping[str, float]] | None = None, step: int = 0
) -> Result:
    """Measure the effective rank of W_up, W_gate and W_down of every layer.

    A network without feed-forward networks gives all its linear layers and convolutions, the latter
    as (out, in x kernel) matrices.

    Args:
        model: the network.
        history: earlier scalars of this analysis by step, drawn as curves over training.
        step: optimizer steps the model was trained for.
    """
    ranks: dict[str, float] = {}
    sizes: dict[str, int] = {}
    rows: list[list[object]] = []
    for layer, matrices in weight_matrices(model).items():
        for role, weight in matrices.items():
            tag = f"{layer}/{role}"
            ranks[tag], sizes[tag] = effective_rank(weight), min(weight.shape)
            shape = " x ".join(map(str, weight.shape))
            rows.append([layer, role, shape, ranks[tag], ranks[tag] / sizes[tag]])
    curves = {**(history or {}), step: ranks}
    means = {f"mean/{role}": sum(values) / len(values) for role, values in _by_role(ranks).items()}
    return Result(
        "rank",
        {**ranks, **means},
        {"step": step, "largest_possible": sizes, "history": {str(s): curves[s] for s in curves}},
        _figure(curves, sizes),
        text_table(["layer", "matrix", "shape", "erank", "of largest possible"], rows),
    )


def _by_role(ranks: Mapping[str, float]) -> dict[str, list[float]]:
    roles: dict[str, list[float]] = {}
    for tag, value in ranks.items():
        roles.setdefault(tag.rsplit("/", 1)[1], []).append(value)
    return roles


def _figure(curves: Mapping[int, Mapping[str, float]], sizes: Mapping[str, int]) -> Figure:
    """Draw a panel per role: over training where there are several steps, else over layers."""
    roles = list(_by_role(sizes))
    steps = sorted(curves)
    figure = Figure(figsize=(4.2 * len(roles), 3.4), layout="constrained")
    panels = figure.subplots(1, len(roles), squeeze=False)[0]
    for axes, role in zip(panels, roles, strict=True):
        tags = [tag for tag in sizes if tag.endswith(f"/{role}")]
        if len(steps) > 1:
            for i, tag in enumerate(tags):
                seen = [s for s in steps if tag in curves[s]]
                colour = colormaps["viridis"](i / max(len(tags) - 1, 1))
                label = tag.rsplit("/", 1)[0] if i in (0, len(tags) - 1) else None
                axes.plot(seen, [curves[s][tag] for s in seen], ".-", color=colour, label=label)
            axes.set_xlabel("step")
            axes.legend(fontsize="small")
        else:
            axes.plot([curves[steps[0]][tag] for tag in tags], "o-", markersize=3)
            axes.set_xlabel("layer")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_title(f"W_{role}" if role != "weight" else "weights", fontsize="medium")
    panels[0].set_ylabel("effective rank")
    return figure
