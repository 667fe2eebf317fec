"""The run folder: its name, what it holds, and how a run goes on in place.

    runs/<task>/<data>/<model>[-<experiment>]/<act>/seed<seed>[-2, -3, ...]
        config.yaml  environment.json  metrics.jsonl  summary.json  events.out.tfevents...
        checkpoints/last.ckpt  checkpoints/previous.ckpt  checkpoints/best.ckpt

No name holds a ``=``: Hydra could not take such a path as an override.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml

import polyvision
from polyvision.activations import activation_origin
from polyvision.errors import PolyvisionError, looked_for
from polyvision.files import only_writer, write_whole
from polyvision.models.trained.saved import check_registered
from polyvision.training.config.compose import completed
from polyvision.training.config.schema import Config
from polyvision.training.run.storage import explained
from polyvision.training.signals import SWEEP_VARIABLE

__all__ = [
    "FOLDER_VARIABLE",
    "Run",
    "config_differences",
    "hold_run",
    "locate_run",
    "open_run",
    "write_json",
]

# Keys that may change when a run goes on: they do not touch what is computed. Devices and passes
# share the same samples of a step in another way: sums are rounded differently, dropout and mixing
# draw other numbers, batch norms see smaller or larger batches.
_FREE_KEYS = frozenset(
    {
        "resume",
        "dry_run",
        "plugins",
        "run_root",
        "data.workers",
        "data.root",
        "data.path",
        "data.options.max_unreadable",
        "experiment.target",  # what others published; its keys, too, change nothing
        "recipe.accumulate",
        "trainer.devices",
        "trainer.log_every_n_steps",
        "trainer.checkpoint_every_n_steps",
        "trainer.histograms",
        "analysis.every_n_steps",
        "analysis.kinds",
        "analysis.samples",
    }
)
# Tell the processes of one distributed run which folder the first of them took, and which
# checkpoint (empty for none).
FOLDER_VARIABLE = "POLYVISION_RUN_FOLDER"
_CHECKPOINT_VARIABLE = "POLYVISION_RUN_CHECKPOINT"


@dataclasses.dataclass(frozen=True)
class Run:
    """A run folder, and the checkpoint to go on from.

    Attributes:
        folder: where everything of the run lies.
        checkpoint: None to start from the beginning.
        new: the folder is still to be made.
    """

    folder: Path
    checkpoint: Path | None = None
    new: bool = False

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.folder / "checkpoints"

    @property
    def last(self) -> Path:
        """The checkpoint that holds everything needed to go on."""
        return self.checkpoints / "last.ckpt"

    @property
    def previous(self) -> Path:
        """The one before ``last``, to go on from if that is damaged."""
        return self.checkpoints / "previous.ckpt"

    @property
    def metrics(self) -> Path:
        """The file of metrics, a line for each time they were logged."""
        return self.folder / "metrics.jsonl"

    @property
    def best(self) -> Path:
        """The weights with the best validation metric."""
        return self.checkpoints / "best.ckpt"

    def begun(self) -> bool:
        """Tell whether there is something to go on from, or was: a checkpoint or a validation."""
        files = (self.last, self.previous, self.best, self.folder / "summary.json")
        if any(path.exists() for path in files):
            return True
        if not self.metrics.exists():
            return False
        # Every validation comes after a checkpoint.
        return '"val/' in self.metrics.read_text(encoding="utf-8", errors="replace")

    def summary(self) -> dict[str, Any] | None:
        """Return the final summary, or None when the run has not finished."""
        path = self.folder / "summary.json"
        if not path.exists():
            return None
        summary = _read(path, json.loads)
        if "settings" not in summary:
            raise PolyvisionError(f"{path} is not the summary of a run: delete it to go on")
        return summary


def locate_run(config: Config) -> Run:
    """Say which folder a run would use, and which checkpoint it would go on from.

    Raises:
        ValueError: ``resume`` names nothing to resume, or a run with another configuration.
    """
    try:
        return _plan(config)
    except OSError as error:
        raise PolyvisionError(f"cannot look at {error.filename}: {error.strerror}") from error


def _plan(config: Config) -> Run:
    if FOLDER_VARIABLE in os.environ and "LOCAL_RANK" in os.environ:
        checkpoint = os.environ.get(_CHECKPOINT_VARIABLE)
        return Run(Path(os.environ[FOLDER_VARIABLE]), Path(checkpoint) if checkpoint else None)
    if "LOCAL_RANK" in os.environ:
        raise PolyvisionError(
            "the environment has LOCAL_RANK, as torchrun sets it: start the script without a "
            "launcher; trainer.devices=<n> makes its own processes"
        )
    if config.resume is None:
        return Run(_unused(_base(config)), new=True)
    if config.resume != "auto":
        return _named(Path(config.resume), config)
    return _latest(config)


def _latest(config: Config) -> Run:
    """Return the latest run with this configuration, or a new one where none can be meant.

    Raises:
        PolyvisionError: there are runs, all with another configuration.
    """
    other: PolyvisionError | None = None
    for folder in filter(Path.is_dir, reversed(_siblings(_base(config)))):
        recorded = Run(folder)
        try:
            differences = _differences(recorded, config)
        except PolyvisionError as error:
            other = other or error
            continue
        if not differences:
            return _existing(folder, config)
        if recorded.begun():
            other = other or _refusal(folder, differences)
    if other is not None and SWEEP_VARIABLE not in os.environ:
        raise other
    return Run(_unused(_base(config)), new=True)


@contextmanager
def hold_run(config: Config, plan: Run) -> Iterator[Run]:
    """Open the planned run for as long as the block runs; no other process writes to it meanwhile.

    Raises:
        ValueError: another process holds the run, or its folder cannot be written.
    """
    with ExitStack() as stack:
        first = "LOCAL_RANK" not in os.environ
        if first and not plan.new:
            _lock(stack, plan)
            if plan.summary() is not None:
                raise PolyvisionError(f"{plan.folder}: another process has just finished this run")
        run = open_run(config, plan)
        if first and plan.new:
            _lock(stack, run)
        stack.enter_context(explained(run.folder, run.last))
        yield run


def _lock(stack: ExitStack, run: Run) -> None:
    try:
        stack.enter_context(only_writer(run.folder, "leave resume= out to start a run beside it"))
    except OSError as error:
        raise PolyvisionError(f"cannot write {run.folder}: {error.strerror}") from error


def open_run(config: Config, plan: Run) -> Run:
    """Create the planned folder and describe the run in it; give way if another process took it."""
    try:
        return _open(config, plan)
    except (OSError, ValueError) as error:
        if isinstance(error, PolyvisionError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise PolyvisionError(f"run_root: cannot write {plan.folder}: {reason}") from error


def _open(config: Config, plan: Run) -> Run:
    run = Run(_claim(plan.folder, config)) if plan.new else plan
    os.environ[FOLDER_VARIABLE] = str(run.folder.absolute())
    os.environ[_CHECKPOINT_VARIABLE] = str(run.checkpoint.absolute()) if run.checkpoint else ""
    if "LOCAL_RANK" not in os.environ:
        run.checkpoints.mkdir(exist_ok=True)
        write_whole(run.folder / "config.yaml", yaml.safe_dump(config.plain(), sort_keys=False))
        write_json(run.folder / "environment.json", _environment(config.act.name))
        (run.folder / "summary.json").unlink(missing_ok=True)
    return run


def _base(config: Config) -> Path:
    try:
        config.run_root.encode()
    except UnicodeEncodeError as error:  # TensorBoard could not write there
        raise PolyvisionError(
            f"run_root={config.run_root!a} is not in the encoding of this locale: set "
            f"PYTHONUTF8=1, or take a name of plain letters"
        ) from error
    model = config.model.name
    if config.experiment is not None:  # recipes of the same network must not meet in one folder
        model = f"{model}-{config.experiment.name}"
    parts = (config.task, config.data.name, model, config.act.label)
    safe = (re.sub(r"[^\w.+-]", "_", part) for part in parts)
    return Path(config.run_root, *safe, f"seed{config.seed}")


def _siblings(base: Path) -> list[Path]:
    """Return those of ``base``, ``base-2``, ``base-3`` ... that exist, the oldest first."""
    numbers = {
        int(found[1])
        for path in base.parent.glob(f"{base.name}-*")
        if (found := re.fullmatch(r"-([2-9]|[1-9]\d+)", path.name.removeprefix(base.name)))
    }
    further = [base.with_name(f"{base.name}-{number}") for number in sorted(numbers)]
    return [path for path in (base, *further) if path.exists()]


def _unused(base: Path) -> Path:
    """Return the first name after all that are taken, so that a later run has a later one."""
    taken = _siblings(base)
    if not taken:
        return base
    last = taken[-1].name.removeprefix(base.name)
    return base.with_name(f"{base.name}-{int(last[1:] or 1) + 1}")


def _claim(folder: Path, config: Config) -> Path:
    base = folder.with_name(re.sub(r"-\d+$", "", folder.name))
    while True:
        try:
            folder.mkdir(parents=True)
        except FileExistsError as error:
            if not folder.exists():  # a link that leads nowhere, here or further up
                raise PolyvisionError(
                    f"run_root: cannot create {folder}: {error.filename} is in the way"
                ) from error
            folder = _unused(base)
            if config.resume is not None and not (plan := _latest(config)).new:
                raise PolyvisionError(
                    f"{plan.folder}: another process has just started this run: wait until it "
                    f"ends, or leave resume= out to start a run beside it"
                ) from error
        except OSError as error:
            raise PolyvisionError(f"run_root: cannot create {folder}: {error.strerror}") from error
        else:
            return folder


def _named(path: Path, config: Config) -> Run:
    path = path.expanduser()
    if path.is_file() and path.suffix == ".ckpt":
        folder = path.absolute().parent.parent
        if not (folder / "config.yaml").is_file():
            raise PolyvisionError(
                f"resume={path} does not lie in the checkpoints/ of a run folder: {folder} has no "
                f"config.yaml, so nothing says which run it belongs to"
            )
        return dataclasses.replace(_existing(folder, config), checkpoint=path)
    if (path / "config.yaml").is_file():
        run = _existing(path, config)
        if run.checkpoint is None and run.summary() is None:
            raise PolyvisionError(f"resume={path}: the run has no checkpoint yet ({run.last})")
        return run
    raise PolyvisionError(
        f"resume={path} is neither a checkpoint (.ckpt) nor a run folder{looked_for(path)}: give "
        "one, or resume=auto"
    )


def _existing(folder: Path, config: Config) -> Run:
    run = Run(folder)
    found = next((path for path in (run.last, run.previous) if path.exists()), None)
    if run.begun() and (differences := _differences(run, config)):
        raise _refusal(folder, differences)
    if found is None and run.begun() and run.summary() is None:
        best = f", from its best weights with finetune={run.best}" if run.best.exists() else ""
        raise PolyvisionError(
            f"cannot resume {folder}: it has been validated, but {run.last.name} and "
            f"{run.previous.name} are gone from {run.checkpoints}. Put one back, or leave resume= "
            f"out to start a new run{best}"
        )
    return Run(folder, found)


def _differences(run: Run, config: Config) -> list[tuple[str, Any, Any]]:
    """Return what differs; nothing where the run has not recorded its configuration yet."""
    recorded = run.folder / "config.yaml"
    if not recorded.exists():
        return []
    return config_differences(_settings(recorded), config.plain())


def _refusal(folder: Path, differences: list[tuple[str, Any, Any]]) -> PolyvisionError:
    lines = "; ".join(f"{k}: {old!r} then, {new!r} now" for k, old, new in differences[:8])
    lines += f"; and {len(differences) - 8} more" if len(differences) > 8 else ""
    return PolyvisionError(
        f"cannot resume {folder}: the configuration differs ({lines}). "
        f"Use the same values, or leave resume= out to start a new run"
    )


def _settings(recorded: Path) -> dict[str, Any]:
    content = _read(recorded, yaml.safe_load)
    try:
        check_registered(str(content["act"]["name"]), recorded.parent)
        return completed(content)
    except PolyvisionError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise PolyvisionError(
            f"{recorded} is damaged: it does not say which activation the run has"
        ) from error


def _read(path: Path, parse: Callable[[str], Any]) -> dict[str, Any]:
    try:
        content = parse(path.read_text(encoding="utf-8"))
    except (ValueError, yaml.YAMLError) as error:
        text = " ".join(str(error).split())
        raise PolyvisionError(f"{path} is damaged: {text}") from error
    if not isinstance(content, dict):
        raise PolyvisionError(f"{path} is damaged: it holds no keys")
    return content


def config_differences(
    old: Mapping[str, Any], new: Mapping[str, Any]
) -> list[tuple[str, Any, Any]]:
    """List (key, old, new) for each value that differs and matters for the result."""
    a, b = _flatten(old), _flatten(new)
    keys = [k for k in {**a, **b} if k not in _FREE_KEYS and not k.startswith("experiment.target.")]
    return [(k, a.get(k), b.get(k)) for k in keys if a.get(k) != b.get(k)]


def _flatten(node: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in node.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _environment(activation: str) -> dict[str, Any]:
    """Describe command, versions, hardware, source tree, and the user's own activation."""
    origin = activation_origin(activation)
    return {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "polyvision": polyvision.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "git": _git_state(),
        **({} if origin is None else {"activation_registered_by": origin}),
    }


def _git_state() -> dict[str, Any] | None:
    source = Path(polyvision.__file__).resolve().parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(source), *arguments]
        return subprocess.run(
            command, capture_output=True, encoding="utf-8", check=True
        ).stdout.strip()

    try:
        # An installed copy may lie inside somebody else's repository: only ours counts.
        git("ls-files", "--error-unmatch", "__init__.py")
        return {"commit": git("rev-parse", "HEAD"), "changed": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.CalledProcessError):
        return None


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` so that the file is whole or absent, never half."""
    write_whole(path, json.dumps(value, indent=2) + "\n")
