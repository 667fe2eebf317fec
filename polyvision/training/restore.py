"""A trained model from its run folder or one of its checkpoints."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import yaml

from polyvision.errors import PolyvisionError, looked_for
from polyvision.models.trained.saved import check_registered, load_strictly
from polyvision.models.weights.files import read_checkpoint
from polyvision.training.config.compose import config_from_plain
from polyvision.training.config.schema import Config, VisionModelConfig
from polyvision.training.loop.module import TaskModule
from polyvision.training.run.folder import Run
from polyvision.training.tasks.task import Task

__all__ = ["Restored", "load_model", "read_config"]


@dataclasses.dataclass(frozen=True)
class Restored:
    """A trained model and what belongs to it.

    Attributes:
        module: the Lightning module, in eval mode; the network itself is ``module.model``.
        task: data, and how batches are made.
        config: the run's configuration.
        run: the run folder.
        checkpoint: where the weights come from.
        step: optimizer steps they were trained for.
    """

    module: TaskModule
    task: Task
    config: Config
    run: Run
    checkpoint: Path
    step: int


def load_model(path: str | Path) -> Restored:
    """Build the model of a run and load its weights.

    Args:
        path: a run folder, of which the last checkpoint is taken (the best one if there is no
            last), or a checkpoint inside one.

    Raises:
        PolyvisionError: there is no run or checkpoint, a file is damaged, the data is gone, or the
            weights do not fit the model.
    """
    checkpoint, state = read_checkpoint(_checkpoint(Path(path).expanduser()), what="a checkpoint")
    run = Run(checkpoint.absolute().parent.parent)
    config = dataclasses.replace(read_config(run.folder / "config.yaml"), finetune=None)
    if isinstance(config.model, VisionModelConfig):  # the checkpoint holds the weights
        model = dataclasses.replace(config.model, pretrained=False)
        config = dataclasses.replace(config, model=model)
    domain = importlib.import_module(f"polyvision.training.tasks.{config.task}")
    task: Task = domain.build_task(config)
    module = task.module(task.model, config.recipe, seed=config.seed, total_steps=1, epoch_steps=1)
    load_strictly(module, state["state_dict"], str(checkpoint))
    return Restored(module.eval(), task, config, run, checkpoint, int(state["global_step"]))


def _checkpoint(path: Path) -> Path:
    if path.is_file():
        if not (path.absolute().parent.parent / "config.yaml").is_file():
            raise PolyvisionError(
                f"{path} does not lie in the checkpoints/ of a run folder, so nothing says which "
                f"model it belongs to"
            )
        return path
    if not (path / "config.yaml").is_file():
        raise PolyvisionError(
            f"{path} is neither a checkpoint (.ckpt) nor a run folder{looked_for(path)}: a run "
            f"folder holds config.yaml, for example runs/language/book/lm_tiny/polynorm/seed0"
        )
    run = Run(path)
    found = next((c for c in (run.last, run.previous, run.best) if c.is_file()), None)
    if found is None:
        raise PolyvisionError(f"{path} has no checkpoint yet: it would be {run.last}")
    return found


def read_config(path: Path) -> Config:
    """Read the config.yaml of a run.

    Raises:
        PolyvisionError: it is damaged, does not fit this version, or names an activation that is
            not registered.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        check_registered(str(values["act"]["name"]), path.parent)
        return _fitting(values, path)
    except (yaml.YAMLError, UnicodeDecodeError, AttributeError, TypeError, KeyError) as error:
        raise PolyvisionError(f"{path} is damaged: {' '.join(str(error).split())}") from error


def _fitting(values: dict[str, Any], path: Path) -> Config:
    try:
        return config_from_plain(values)
    except PolyvisionError as error:
        raise PolyvisionError(f"{path} does not fit this version: {error}") from error
