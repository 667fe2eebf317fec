"""The training contrast: which runs are made, and in which settings.

Every comparison is paired: the same network, recipe, weights of the same seed and order of the
data; only the activation differs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from polyvision.analysis.stability.datasets import book, digits
from polyvision.analysis.stability.training import PRECISIONS, Batches, Recipe, Run, train

__all__ = [
    "ACTIVATIONS",
    "GRIDS",
    "SETTINGS",
    "Grid",
    "Setting",
    "run_grids",
    "run_pairs",
    "run_precisions",
]

ACTIVATIONS = ("polynorm", "polyrelu", "relu")

Progress = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Setting:
    """A network, its recipe and its data.

    Attributes:
        network: a key of ``NETWORKS``.
        recipe: the recipe, the same for all activations.
        data: ``digits`` (8x8), ``digits16`` (enlarged to 16x16) or ``book``.
    """

    network: str
    recipe: Recipe
    data: str = "digits"

    @property
    def title(self) -> str:
        """Name for tables and plots."""
        recipe = self.recipe
        clip = "" if recipe.clip is None else f", clip {recipe.clip:g}"
        return f"{self.network}, gain {recipe.gain:g}, lr {recipe.lr:g}{clip}"


# Unscaled initial weights, and for the residual MLP also smaller ones that fp32 can train from.
SETTINGS: tuple[Setting, ...] = (
    Setting("mlp", Recipe(lr=1e-3, steps=60)),
    Setting("residual-mlp", Recipe(lr=1e-3, steps=60)),
    Setting("residual-mlp", Recipe(lr=1e-3, steps=60, gain=0.35)),
    Setting("resnet-no-bn", Recipe(lr=1e-3, steps=80, batch=16), "digits16"),
    Setting("resnet-frozen-bn", Recipe(lr=1e-3, steps=80, batch=16), "digits16"),
    Setting("resnet26-no-bn", Recipe(lr=1e-3, steps=80, batch=16), "digits16"),
    Setting("resnet50-no-bn", Recipe(lr=1e-3, steps=40, batch=16), "digits16"),
    Setting("transformer", Recipe(lr=3e-3, steps=80, batch=16), "book"),
)


@dataclasses.dataclass(frozen=True)
class Grid:
    """Learning rates against one kind of scale.

    Attributes:
        network: a key of ``NETWORKS``.
        axis: the field of the recipe that varies besides ``lr``: ``gain`` or ``input_scale``.
        values: its values.
        base: the recipe of all other fields.
        rates: the learning rates.
    """

    network: str
    axis: str
    values: tuple[float, ...]
    base: Recipe
    rates: tuple[float, ...] = (1e-4, 1e-3, 1e-2)

    def recipe(self, lr: float, value: float) -> Recipe:
        """Return the recipe of one point."""
        changes: dict[str, Any] = {"lr": lr, self.axis: value}
        return dataclasses.replace(self.base, **changes)


_GAINS = (0.125, 0.25, 0.35, 0.5, 0.7, 1.0, 2.0)

GRIDS: tuple[Grid, ...] = (
    Grid("mlp", "gain", _GAINS, Recipe(lr=0.0, steps=60)),
    Grid("residual-mlp", "gain", _GAINS, Recipe(lr=0.0, steps=60)),
    Grid(
        "residual-mlp",
        "input_scale",
        (2.0**-12, 2.0**-6, 2.0**-3, 1.0, 2.0**3, 2.0**6, 2.0**12),
        Recipe(lr=0.0, steps=60, gain=0.35),
    ),
)


def run_pairs(
    seeds: Iterable[int],
    device: str = "cpu",
    progress: Progress = lambda text: None,
    settings: Iterable[Setting] = SETTINGS,
) -> list[tuple[Setting, list[Run]]]:
    """Train each activation in each setting, with each seed."""
    seeds = list(seeds)
    load = _Loader(device)
    results = []
    for setting in settings:
        runs = []
        for seed in seeds:
            data = load(setting.data)
            row = [train(setting.network, n, seed, setting.recipe, data) for n in ACTIVATIONS]
            progress(f"{setting.title}, seed {seed}: {_outcomes(row)}")
            runs += row
        results.append((setting, runs))
    return results


def run_grids(
    device: str = "cpu",
    progress: Progress = lambda text: None,
    grids: Iterable[Grid] = GRIDS,
) -> list[tuple[Grid, list[Run]]]:
    """Train each activation at each point of the grids, with seed 0."""
    data = digits(device)
    results = []
    for grid in grids:
        runs: list[Run] = []
        for value in grid.values:
            recipes = [grid.recipe(lr, value) for lr in grid.rates]
            row = [train(grid.network, name, 0, r, data) for r in recipes for name in ACTIVATIONS]
            trained = sum(run.outcome == "trains" for run in row)
            progress(f"grid {grid.network}, {grid.axis} {value:g}: {trained} of {len(row)} train")
            runs += row
        results.append((grid, runs))
    return results


def run_precisions(
    device: str = "cpu",
    progress: Progress = lambda text: None,
    settings: Iterable[Setting] = SETTINGS,
) -> list[tuple[Setting, list[Run]]]:
    """Train the settings without convolutions in every precision, with seed 0."""
    data = digits(device)
    results = []
    for setting in settings:
        if setting.data != "digits":
            continue
        runs = []
        for precision in PRECISIONS:
            recipe = dataclasses.replace(setting.recipe, precision=precision)
            row = [train(setting.network, name, 0, recipe, data) for name in ACTIVATIONS]
            progress(f"{setting.title} in {precision}: {_outcomes(row)}")
            runs += row
        results.append((setting, runs))
    return results


def _outcomes(runs: Iterable[Run]) -> str:
    return ", ".join(f"{run.activation} {run.outcome}" for run in runs)


class _Loader:
    """Load each data set once."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.loaded: dict[str, Batches] = {}

    def __call__(self, name: str) -> Batches:
        if name not in self.loaded:
            if name == "book":
                self.loaded[name] = book(self.device)
            else:
                size = 16 if name == "digits16" else 8
                self.loaded[name] = digits(self.device, image_size=size)
        return self.loaded[name]
