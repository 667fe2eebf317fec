"""The training contrast: which runs are made, in which settings, on which data.

Every comparison is paired: the same network, recipe, weights of the same seed and order of the
data; only the activation differs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np
import torch

from polyvision.analysis.stability.training import PRECISIONS, Batches, Recipe, Run, train
from polyvision.data.images.augment import Augment
from polyvision.data.images.registry import collate, load_image_data
from polyvision.data.text.file import TokenWindows, load_book

__all__ = [
    "ACTIVATIONS",
    "GRIDS",
    "SETTINGS",
    "Grid",
    "Setting",
    "book",
    "digits",
    "run_grids",
    "run_pairs",
    "run_precisions",
]

ACTIVATIONS = ("polynorm", "polyrelu", "relu")

Progress = Callable[[str], None]
_CONTEXT = 32


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
    data: str = dataclasses.field(default="digits", init=False)

    @property
    def title(self) -> str:
        """Name for progress."""
        return f"grid {self.network}"

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

_Subject = TypeVar("_Subject", Setting, Grid)
# What distinguishes one point of a setting or grid, in words; the seed; the recipe.
_Point = tuple[str, int, Recipe]


def run_pairs(
    seeds: Iterable[int],
    device: str = "cpu",
    progress: Progress = lambda text: None,
    settings: Iterable[Setting] = SETTINGS,
) -> list[tuple[Setting, list[Run]]]:
    """Train each activation in each setting, with each seed."""
    seeds = list(seeds)
    return _run(settings, lambda s: [(f"seed {n}", n, s.recipe) for n in seeds], device, progress)


def run_grids(
    device: str = "cpu",
    progress: Progress = lambda text: None,
    grids: Iterable[Grid] = GRIDS,
) -> list[tuple[Grid, list[Run]]]:
    """Train each activation at each point of the grids, with seed 0."""

    def points(grid: Grid) -> list[_Point]:
        return [
            (f"{grid.axis} {value:g}, lr {lr:g}", 0, grid.recipe(lr, value))
            for value in grid.values
            for lr in grid.rates
        ]

    return _run(grids, points, device, progress)


def run_precisions(
    device: str = "cpu",
    progress: Progress = lambda text: None,
    settings: Iterable[Setting] = SETTINGS,
) -> list[tuple[Setting, list[Run]]]:
    """Train the settings without convolutions in every precision, with seed 0."""

    def points(setting: Setting) -> list[_Point]:
        recipe = setting.recipe
        return [(name, 0, dataclasses.replace(recipe, precision=name)) for name in PRECISIONS]

    return _run([s for s in settings if s.data == "digits"], points, device, progress)


def _run(
    subjects: Iterable[_Subject],
    points: Callable[[_Subject], Iterable[_Point]],
    device: str,
    progress: Progress,
) -> list[tuple[_Subject, list[Run]]]:
    """Train each activation at each point of each subject."""
    results = []
    for subject in subjects:
        data, runs = _load(subject.data, device), []
        for words, seed, recipe in points(subject):
            row = [train(subject.network, name, seed, recipe, data) for name in ACTIVATIONS]
            outcomes = ", ".join(f"{run.activation} {run.outcome}" for run in row)
            progress(f"{subject.title}, {words}: {outcomes}")
            runs += row
        results.append((subject, runs))
    return results


@functools.cache
def _load(name: str, device: str) -> Batches:
    if name == "book":
        return book(device)
    return digits(device, image_size=16 if name == "digits16" else 8)


def digits(device: str, *, image_size: int = 8) -> Batches:
    """Return the 1,437 training digits as (N, 1, size, size), normalised to mean 0 and variance 1.

    Args:
        device: where they are put.
        image_size: height and width; the originals have 8.
    """
    data = load_image_data(
        "digits",
        image_size=image_size,
        augment=Augment(crop_scale=(1.0, 1.0), hflip=0.0, crop_pct=1.0),
        mean=(0.0,) * 3,
        std=(1.0,) * 3,
    )
    size = len(data.train)  # type: ignore[arg-type]
    images, labels = collate([data.train[i] for i in range(size)])
    gray = images[:, :1].double()  # the sums are then the same with any number of threads
    gray = ((gray - gray.mean()) / gray.std()).float()
    return Batches(gray.to(device), labels.to(device), len(data.classes))


def book(device: str, *, windows: int = 4096) -> Batches:
    """Return the first bytes of the built-in book as windows of 32, a vocabulary of 256.

    Args:
        device: where they are put.
        windows: how many.
    """
    text = load_book().encode()[: windows * _CONTEXT + 1]
    data = TokenWindows(np.frombuffer(text, np.uint8), _CONTEXT)
    inputs, targets = zip(*(data[i] for i in range(len(data))), strict=True)
    return Batches(torch.stack(inputs).to(device), torch.stack(targets).to(device), 256)
