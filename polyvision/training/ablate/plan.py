"""From a study to its runs: configurations, folders, and the models of a scaling study."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from polyvision.errors import PolyvisionError, looked_for
from polyvision.training.ablate.studies import Size, Study
from polyvision.training.config.compose import Task, compose
from polyvision.training.config.overrides import quoted
from polyvision.training.config.schema import (
    Config,
    DataConfig,
    ImageDataConfig,
    LanguageModelConfig,
)
from polyvision.training.run.folder import Run, locate_run

__all__ = ["Planned", "plan_study", "sized"]


@dataclasses.dataclass(frozen=True)
class Planned:
    """A run of a study: the overrides that make it, and its folder."""

    overrides: list[str]
    config: Config
    run: Run

    @property
    def name(self) -> str:
        """Model, activation and seed."""
        return f"{self.config.model.name} {self.config.act.label} seed {self.config.seed}"

    @property
    def log_name(self) -> str:
        """Name of the file that what the run prints goes to."""
        return f"{self.name.replace(' ', '-').replace('/', '_')}.log"


def plan_study(
    study: Study, task: Task, overrides: Sequence[str], *, seeds: int, output: Path
) -> list[Planned]:
    """Compose and check every run of a study: seed by seed, so that early runs pair.

    Args:
        study: the study.
        task: ``vision`` or ``language``.
        overrides: what the runs have in common.
        seeds: how many, from 0.
        output: folder of the runs.

    Raises:
        PolyvisionError: overrides that do not fit, or runs in ``output`` that were made with other
            settings.
    """
    common = [*overrides, f"run_root={quoted(str(output))}", "resume=auto"]
    (base,) = _composed(task, common)
    models: list[list[str]] = [[]]
    if study.sizes:
        if not isinstance(base.model, LanguageModelConfig):
            raise PolyvisionError(f"the study {study.title!r} scales language models only")
        models = sized(study, base.model)
    planned = []
    problems = []
    variants = [[*model, *act] for model in models for act in study.acts]
    configs = [_composed(task, [*common, *variant])[0] for variant in variants]
    _check_place(base.data)
    for seed in range(seeds):
        for variant, config in zip(variants, configs, strict=True):
            seeded = dataclasses.replace(config, seed=seed)
            own = [*common, *variant, f"seed={seed}"]
            try:
                planned.append(Planned(own, seeded, locate_run(seeded)))
            except PolyvisionError as error:
                problems.append(str(error))
    if problems:
        problems.append("Give the same settings as then, or another --output")
        raise PolyvisionError("\n".join(problems))
    return planned


def _check_place(data: DataConfig) -> None:
    """Refuse data that are not there, which every run would find for itself."""
    key, place = data.location
    download = isinstance(data, ImageDataConfig) and data.options.get("download")
    if place is not None and not download and not Path(place).expanduser().exists():
        raise PolyvisionError(f"{key}={place!r} does not exist{looked_for(place)}")


def _composed(task: Task, overrides: list[str]) -> list[Config]:
    configs: list[Config] = [*compose(task, overrides)]
    if len(configs) > 1:
        raise PolyvisionError("an override of a study has one value, not several: run it for each")
    return configs


def sized(study: Study, model: LanguageModelConfig) -> list[list[str]]:
    """Return for each size of a scaling study the overrides that make it of the largest model.

    Heads stay as many, as in Table 10; the width is rounded to a multiple of twice their number,
    the hidden size to a multiple of 3, so that a gated network has 2/3 of it exactly.

    Raises:
        PolyvisionError: the model is so small that two sizes would be the same.
    """
    unit = 2 * model.heads
    made: list[list[str]] = []
    shapes = []
    for size in study.sizes:
        width = unit * max(1, round(model.width * size.width / unit))
        layers = max(1, round(model.layers * size.layers))
        shapes.append((width, layers))
        if size == Size(1, 1):
            made.append([])
            continue
        hidden = 3 * max(1, round(model.ffn_hidden * width / model.width / 3))
        made.append(
            [
                f"model.name={model.name}-w{width}l{layers}",
                f"model.width={width}",
                f"model.layers={layers}",
                f"model.ffn_hidden={hidden}",
            ]
        )
    if len(set(shapes)) < len(shapes):
        text = ", ".join(f"{width} x {layers}" for width, layers in shapes)
        raise PolyvisionError(
            f"model={model.name} is too small for {len(shapes)} sizes: width x layers would be "
            f"{text}. Take a larger model.width or fewer model.heads"
        )
    return made
