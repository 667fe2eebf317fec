"""The command line of the two trainers: check everything, then train."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from polyvision.errors import PolyvisionError
from polyvision.output import lasting_output, say_error
from polyvision.training.config.compose import (
    CONFIG_MODULE,
    SCRIPTS,
    Task,
    check_keys,
    compose,
    for_hydra,
    help_text,
    register_groups,
    typed_config,
)
from polyvision.training.config.overrides import check_validation, combinations, given_keys, parse
from polyvision.training.config.paths import from_folder
from polyvision.training.config.schema import Config
from polyvision.training.signals import (
    SWEEP_VARIABLE,
    Child,
    command_of_this_program,
    describe_code,
    is_further_rank,
    run_children,
)

__all__ = ["main"]

# Hydra's options that take a value of their own.
_WITH_VALUE = {"--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd"}
_WITH_VALUE |= {"--package", "-p", "--cfg", "-c", "--info", "-i", "--experimental-rerun"}
_HELP = {"--help", "-h"}
_ONLY_SHOW = {*_HELP, "--hydra-help", "--version", "--cfg", "-c", "--info", "-i"}
_SWEEP = {"--multirun", "-m"}


def main(task: Task) -> None:
    """Run ``train_vision.py`` or ``train_lm.py``; exits with 2 on a user's mistake."""
    lasting_output()
    try:
        _main(task)
    except KeyboardInterrupt:  # before training; during it the run says how to go on
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None


def _main(task: Task) -> None:
    options, overrides = _split(sys.argv[1:])
    debug = "--debug" in options
    if debug:
        options.remove("--debug")
        os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        if _ONLY_SHOW & set(options):
            if overrides:
                check_keys(task, overrides)
            if _HELP & set(options):
                print(help_text(task, overrides))
                return
            _hydra_main(task, options, overrides, debug)
            return
        configs = _checked(task, options, overrides)
        of_hydra = any(key.startswith("hydra") for key in given_keys(overrides))
        if _SWEEP & set(options):
            os.environ[SWEEP_VARIABLE] = "1"
            if not of_hydra:
                options = [option for option in options if option not in _SWEEP]
                raise SystemExit(_sweep(options, overrides))
        if options or of_hydra:
            _hydra_main(task, options, overrides, debug)
        else:
            _run(task, configs[0], overrides)
    except PolyvisionError as error:
        _fail(error, debug)


def _fail(error: PolyvisionError, debug: bool) -> None:
    """End with one line and a code, or with a traceback where that is asked for."""
    if is_further_rank():
        _ranks().leave_error(error)
        raise SystemExit(2) from None
    if debug:
        raise error
    say_error(error)
    raise SystemExit(getattr(error, "code", 2)) from None  # of another rank: its own


def _hydra_main(task: Task, options: list[str], overrides: list[str], debug: bool) -> None:
    """Let Hydra do what only it knows: its options, folders, sweepers and launchers."""
    register_groups()
    opened = [for_hydra(override, str(override.input_line)) for override in parse(overrides)]
    sys.argv[1:] = [*options, *opened]  # Hydra refuses an option between overrides

    def job(node: DictConfig) -> Any:
        own = [text.removeprefix("++") for text in HydraConfig.get().overrides.task]
        try:
            config = from_folder(typed_config(node), Path(HydraConfig.get().runtime.cwd))
            return _run(task, config, own)
        except PolyvisionError as error:  # Hydra would print a traceback
            _fail(error, debug)

    hydra.main(version_base="1.3", config_path=f"pkg://{CONFIG_MODULE}", config_name=SCRIPTS[task])(
        job
    )()


def _run(task: Task, config: Config, overrides: list[str]) -> Any:
    """Do what the configuration asks for; return the best value of a run."""
    # Imported here: a mistake on the command line is answered before the heavy imports.
    domain = importlib.import_module(f"polyvision.training.tasks.{task}")
    if config.validate is not None:
        validate = importlib.import_module("polyvision.training.validate").validate
        validate(config, domain.build_task, given_keys(overrides))
        return None
    if is_further_rank():
        _ranks().end_with_the_first()
    run_task = importlib.import_module("polyvision.training.session").run_task
    try:
        summary = run_task(config, domain.build_task, overrides)
    except PolyvisionError:
        raise
    except Exception as error:
        if not is_further_rank():
            raise
        _ranks().leave_error(error)
        raise SystemExit(1) from None
    return summary["best"] if summary else None


def _ranks() -> Any:
    return importlib.import_module("polyvision.training.run.ranks")


def _sweep(options: list[str], overrides: list[str]) -> int:
    """Run each combination in a process of its own, which several devices need; return a code.

    In one process a distributed run would hand its ranks on to the next run.
    """
    runs = combinations(overrides)
    program = command_of_this_program()

    def announce(number: int) -> None:
        print(f"Run {number + 1} of {len(runs)}: {' '.join(runs[number])}", flush=True)

    codes, stopped_by = run_children(
        [Child([*program, *options, *run]) for run in runs], started=announce
    )
    failed = [(code, run) for code, run in zip(codes, runs, strict=True) if code]
    for code, run in failed:
        if stopped_by is not None and code == 128 + stopped_by:
            continue  # it has said so itself
        print(f"error: failed with {describe_code(code)}: {' '.join(run)}", file=sys.stderr)
    if stopped_by is not None:
        left = codes.count(None)
        print(
            f"interrupted: {left} of {len(runs)} runs were not started; the same command with "
            f"resume=auto goes on",
            file=sys.stderr,
        )
        return 128 + stopped_by
    return failed[0][0] if failed else 0


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Separate options, with their values, from overrides."""
    options: list[str] = []
    overrides: list[str] = []
    for argument in arguments:
        value = bool(options) and options[-1] in _WITH_VALUE
        (options if value or argument.startswith("-") else overrides).append(argument)
    return options, overrides


def _checked(task: Task, options: list[str], overrides: list[str]) -> list[Config]:
    """Compose every run that the command line asks for, so that no mistake waits behind a run."""
    configs: list[Config] = [*compose(task, overrides)]
    if any(config.validate is not None for config in configs):
        check_validation(overrides)
    if len(configs) > 1 and not _SWEEP & set(options):
        raise PolyvisionError(f"{len(configs)} runs are asked for: add -m to run them one by one")
    return configs
