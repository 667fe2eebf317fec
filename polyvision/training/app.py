"""The command line of the two trainers: check everything, then train."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf

from polyvision.errors import PolyvisionError
from polyvision.training.compose import CONFIG_MODULE, SCRIPTS, Task, compose, typed_config

__all__ = ["main"]

# Hydra's options that take a value of their own.
_WITH_VALUE = {"--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd"}
_WITH_VALUE |= {"--package", "-p", "--cfg", "-c", "--info", "-i", "--experimental-rerun"}
_ONLY_SHOW = {"--help", "-h", "--hydra-help", "--version", "--cfg", "-c", "--info", "-i"}
_SWEEP = {"--multirun", "-m"}


def main(task: Task) -> None:
    """Run ``train_vision.py`` or ``train_lm.py``; exits with 2 on a user's mistake."""
    debug = "--debug" in sys.argv
    sys.argv = [a for a in sys.argv if a != "--debug"]
    if debug:
        os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        _check(task, sys.argv[1:])
    except PolyvisionError as error:
        _fail(error, debug)

    def job(node: DictConfig) -> Any:
        # Imported here: a mistake on the command line is answered before the heavy imports.
        domain = importlib.import_module(f"polyvision.training.{task}")
        run_task = importlib.import_module("polyvision.training.session").run_task
        try:
            config = typed_config(OmegaConf.to_container(node, resolve=True))
            summary = run_task(config, domain.build_task)
        except PolyvisionError as error:
            _fail(error, debug)
        return summary["best"] if summary else None

    hydra.main(version_base="1.3", config_path=f"pkg://{CONFIG_MODULE}", config_name=SCRIPTS[task])(
        job
    )()


def _check(task: Task, arguments: list[str]) -> None:
    """Compose every run that the command line asks for, so that no mistake waits behind a run."""
    overrides, skip = [], False
    for argument in arguments:
        if skip:
            skip = False
        elif argument in _WITH_VALUE:
            skip = True
        elif not argument.startswith("-"):
            overrides.append(argument)
    if _ONLY_SHOW & set(arguments):
        compose(task, [])
        return
    configs = compose(task, overrides)
    if len(configs) > 1 and not _SWEEP & set(arguments):
        raise PolyvisionError(f"{len(configs)} runs are asked for: add -m to run them one by one")


def _fail(error: PolyvisionError, debug: bool) -> None:
    if debug:
        raise error
    lines = str(error).splitlines()
    print("\n".join(f"error: {line}" for line in lines), file=sys.stderr)
    raise SystemExit(2) from None
