"""One run from a typed configuration to its summary; everything that both tasks share."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn

from polyvision.errors import PolyvisionError
from polyvision.training.analyses import Analyses, probe
from polyvision.training.board import Board, run_card
from polyvision.training.callbacks import Console, Throughput
from polyvision.training.checkpoint import AtomicCheckpointIO
from polyvision.training.checkpoints import Checkpoints
from polyvision.training.cost import Cost, estimate_cost
from polyvision.training.hardware import Hardware, resolve_hardware
from polyvision.training.loader import Collate, MapDataset, TrainLoader, val_loader
from polyvision.training.loggers import JsonLinesLogger, truncate_metrics
from polyvision.training.module import TaskModule
from polyvision.training.monitor import ActivationMonitor
from polyvision.training.optimization import build_optimizer
from polyvision.training.report import count, format_summary, format_table, size
from polyvision.training.run import Run, hold_run, plan_run, write_json
from polyvision.training.schema import Config
from polyvision.training.state import track
from polyvision.training.storage import write_whole

__all__ = ["Task", "run_task"]


@dataclasses.dataclass(frozen=True)
class Task:
    """What a domain contributes to a run.

    Attributes:
        model: the network.
        module: builds the Lightning module from (model, recipe, seed=, total_steps=, epoch_steps=).
        train: training samples.
        val: validation samples.
        plan: labelled lines about model, activation and data.
        monitor: the validation metric that decides which weights are best.
        mode: ``max`` or ``min``.
        shown: the validation metrics printed, in order.
        make_input: makes the model's input for a number of samples.
        collate: joins samples to a batch; None for torch's default.
        tokens_per_sample: tokens of a sample; None for images.
        callbacks: further callbacks.
        files: text files for the run folder, by name.
        unreadable: names the training files skipped so far.
    """

    model: nn.Module
    module: Callable[..., TaskModule]
    train: MapDataset
    val: MapDataset
    plan: list[tuple[str, str]]
    monitor: str
    mode: str
    shown: list[str]
    make_input: Callable[[int], Tensor]
    collate: Collate | None = None
    tokens_per_sample: int | None = None
    callbacks: list[Callback] = dataclasses.field(default_factory=list)
    files: dict[str, str] = dataclasses.field(default_factory=dict)
    unreadable: Callable[[], list[Path]] = list


@dataclasses.dataclass(frozen=True)
class _Steps:
    """How the recipe's batch is split, and how many optimizer steps follow from it."""

    batch_per_device: int
    epoch: int
    total: int


def run_task(config: Config, build: Callable[[Config], Task]) -> dict[str, Any] | None:
    """Show the plan, train, and return the summary; with ``dry_run`` only show the plan.

    Raises:
        ValueError: anything in the configuration, the data or the machine that does not fit.
    """
    hardware = resolve_hardware(config)
    plan = plan_run(config)
    finished = plan.summary()
    if config.resume is not None and finished is not None:
        print(f"{plan.folder} has finished already; nothing to resume")
        print(format_summary(plan, finished), flush=True)
        return finished
    first_step = _first_step(plan)
    _quiet()
    seed_everything(config.seed, verbose=False)
    task = build(config)
    loader = _train_loader(config, hardware, task)
    steps = _steps(config, hardware, loader)
    build_optimizer(task.model, config.recipe, loss_scaling=False)  # refuse bad options early
    batch = steps.batch_per_device
    cost = estimate_cost(task.model, lambda: task.make_input(batch), hardware.compute_dtype)
    rows = _plan_rows(config, hardware, task, steps, cost, plan)
    if "LOCAL_RANK" not in os.environ:
        print(format_table("Plan", rows), flush=True)
    if config.dry_run:
        return None
    with hold_run(config, plan) as run:
        return _fit(config, hardware, task, loader, steps, cost, run, first_step, rows)


def _train_loader(config: Config, hardware: Hardware, task: Task) -> TrainLoader:
    recipe = config.recipe
    share = hardware.devices * recipe.accumulate
    if recipe.batch_size % share:
        raise PolyvisionError(
            f"recipe.batch_size={recipe.batch_size} is the batch of one optimizer step; it must be "
            f"divisible by devices x recipe.accumulate = {hardware.devices} x {recipe.accumulate}"
        )
    return TrainLoader(
        task.train,
        recipe.batch_size // share,
        seed=config.seed,
        workers=config.data.workers,
        collate=task.collate,
        world_size=hardware.devices,
    )


def _steps(config: Config, hardware: Hardware, loader: TrainLoader) -> _Steps:
    epoch = math.ceil(len(loader) / config.recipe.accumulate)
    total = epoch * config.trainer.max_epochs
    if config.trainer.max_steps is not None:
        total = min(total, config.trainer.max_steps)
    return _Steps(loader.batch_size, epoch, total)


def _plan_rows(
    config: Config, hardware: Hardware, task: Task, steps: _Steps, cost: Cost, run: Run
) -> list[tuple[str, str]]:
    recipe = config.recipe
    batch = steps.batch_per_device
    weights = sum(p.numel() * p.element_size() for p in task.model.parameters())
    clip = "none" if recipe.clip_grad is None else f"{recipe.clip_grad:g}"
    last = (
        f"{steps.total:,} optimizer steps of {recipe.batch_size} samples, {steps.epoch:,} an epoch"
    )
    return [
        *task.plan,
        (
            "recipe",
            f"{recipe.name}: {recipe.optimizer}, lr {recipe.lr:g} ({recipe.schedule}), "
            f"weight decay {recipe.weight_decay:g}, clip {clip}",
        ),
        ("steps", last),
        ("device", hardware.device_text),
        ("precision", hardware.precision_text),
        (
            "cost",
            f"{count(3 * cost.flops / batch)}FLOP a sample forward and backward; memory about "
            f"{size(weights)} weights, {size(cost.saved_bytes)} activations a batch of {batch}",
        ),
        ("seed", str(config.seed)),
        (
            "run folder",
            f"{run.folder}" + (f" (goes on from {run.checkpoint})" if run.checkpoint else ""),
        ),
    ]


def _fit(
    config: Config,
    hardware: Hardware,
    task: Task,
    loader: TrainLoader,
    steps: _Steps,
    cost: Cost,
    run: Run,
    first_step: int,
    rows: list[tuple[str, str]],
) -> dict[str, Any]:
    _prepare_folder(run, task, first_step)
    module = task.module(
        task.model,
        config.recipe,
        seed=config.seed,
        total_steps=steps.total,
        epoch_steps=steps.epoch,
    )
    if config.trainer.compile:
        task.model.compile()
    board = Board(run.folder, purge_step=first_step + 1 if first_step else None)
    throughput = Throughput(
        steps.batch_per_device * hardware.devices,
        task.tokens_per_sample,
        3 * cost.flops / steps.batch_per_device,
        hardware.compute_dtype,
        config.trainer.log_every_n_steps,
    )
    checkpoints = Checkpoints(run, task.monitor, task.mode, config.trainer.checkpoint_every_n_steps)
    trainer = _trainer(
        config,
        hardware,
        [board, JsonLinesLogger(run.folder / "metrics.jsonl")],
        [
            throughput,
            ActivationMonitor(config.trainer.histograms, steps.total, task.shown),
            *task.callbacks,
            *_analyses(config, task, run),
            Console(steps.total, ["train/loss", *task.shown], sys.stderr.isatty()),
            checkpoints,
        ],
    )
    settings = _settings(config, task)
    facts = {
        "settings": settings,
        "monitor": task.monitor,
        "mode": task.mode,
        "total_steps": steps.total,
        "activation_bytes": cost.saved_bytes,
    }
    started = time.monotonic()
    try:
        with _recorded(run, board, trainer, task, facts, rows, first_step):
            val = _val_loader(config, task, steps, trainer)
            trainer.fit(module, loader, val, ckpt_path=run.checkpoint)
            if task.monitor not in trainer.callback_metrics:  # stopped after the last step
                trainer.validate(module, val, verbose=False)
    except SystemExit as stop:  # so does Lightning end after Ctrl-C and SIGTERM
        code = 143 if isinstance(stop, SIGTERMException) else 130
        where = f"go on with resume={run.folder}" if run.last.exists() else "no checkpoint yet"
        print(f"interrupted at step {trainer.global_step}: {where}", file=sys.stderr)
        raise SystemExit(code) from None
    summary = _summary(settings, task, trainer, checkpoints, throughput)
    summary["seconds"] = round(time.monotonic() - started, 1)
    if trainer.is_global_zero:
        write_json(run.folder / "summary.json", summary)
        print(format_summary(run, summary), flush=True)
    return summary


def _analyses(config: Config, task: Task, run: Run) -> list[Callback]:
    wanted = config.analysis
    if not wanted.every_n_steps or not wanted.kinds:
        return []
    batch = probe(task.val, wanted.samples, task.collate)
    return [Analyses(run.folder, batch, wanted.kinds, wanted.every_n_steps)]


@contextmanager
def _recorded(
    run: Run,
    board: Board,
    trainer: Trainer,
    task: Task,
    facts: dict[str, Any],
    rows: list[tuple[str, str]],
    first_step: int,
) -> Iterator[None]:
    """Describe the run in its folder and in TensorBoard, and record how the block ends."""
    if not trainer.is_global_zero:
        yield
        return
    environment = json.loads((run.folder / "environment.json").read_text())
    # The tab shows the first one unasked.
    metrics = dict.fromkeys([task.monitor, *task.shown, "train/loss", "perf/samples_per_s"])
    board.describe(facts["settings"], metrics, run_card(environment, rows), first_step)
    try:
        with track(run.folder, facts, first_step, lambda: trainer.global_step):
            yield
    except BaseException:
        with suppress(OSError):  # a full disk must not hide what came first
            board.end(success=False)
        raise
    board.end(success=True)


def _first_step(plan: Run) -> int:
    """Return the step that a run goes on from; refuse its checkpoint before anything is written."""
    if plan.checkpoint is None:
        return 0
    state = AtomicCheckpointIO().load_checkpoint(plan.checkpoint)
    if not isinstance(state, dict) or "global_step" not in state:
        raise PolyvisionError(f"{plan.checkpoint} is not the checkpoint of a run")
    if not state.get("optimizer_states"):
        raise PolyvisionError(
            f"{plan.checkpoint} holds weights only and cannot be resumed from: use {plan.last}"
        )
    return int(state["global_step"])


def _prepare_folder(run: Run, task: Task, first_step: int) -> None:
    """Write the task's files; drop what a resumed run will write again."""
    for name, text in task.files.items():
        write_whole(run.folder / name, text)
    metrics = run.folder / "metrics.jsonl"
    if run.checkpoint is not None:
        truncate_metrics(metrics, first_step)
        return
    metrics.unlink(missing_ok=True)
    for events in run.folder.glob("events.out.tfevents*"):
        events.unlink()


def _trainer(
    config: Config, hardware: Hardware, loggers: list[Any], callbacks: list[Callback]
) -> Trainer:
    trainer, recipe = config.trainer, config.recipe
    arguments = hardware.trainer_arguments()
    arguments["plugins"] = [*arguments.get("plugins", []), AtomicCheckpointIO()]
    by_steps = trainer.val_every_n_steps
    return Trainer(
        **arguments,
        max_epochs=trainer.max_epochs,
        max_steps=-1 if trainer.max_steps is None else trainer.max_steps,
        logger=loggers,
        callbacks=callbacks,
        val_check_interval=by_steps * recipe.accumulate if by_steps else None,
        check_val_every_n_epoch=None if by_steps else 1,
        log_every_n_steps=trainer.log_every_n_steps,
        accumulate_grad_batches=recipe.accumulate,
        deterministic=trainer.deterministic,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )


def _val_loader(config: Config, task: Task, steps: _Steps, trainer: Trainer) -> Any:
    return val_loader(
        task.val,
        steps.batch_per_device,
        workers=config.data.workers,
        collate=task.collate,
        rank=trainer.global_rank,
        world_size=trainer.world_size,
    )


def _settings(config: Config, task: Task) -> dict[str, Any]:
    """Return what tells runs apart, for the hparams tab and for people."""
    return {
        "task": config.task,
        "model": config.model.name,
        "act": config.act.label,
        "data": config.data.name,
        "recipe": config.recipe.name,
        "seed": config.seed,
        "precision": config.precision,
        "parameters": sum(p.numel() for p in task.model.parameters()),
    }


def _summary(
    settings: dict[str, Any],
    task: Task,
    trainer: Trainer,
    checkpoints: Checkpoints,
    throughput: Throughput,
) -> dict[str, Any]:
    rates = sorted(throughput.rates)
    last = {k: float(v) for k, v in trainer.callback_metrics.items() if k != "step"}
    return {
        "settings": settings,
        "monitor": task.monitor,
        "best": checkpoints.best,
        "last": last,
        "shown": {name: last[name] for name in task.shown if name in last},
        "steps": trainer.global_step,
        "samples_per_s": round(rates[len(rates) // 2], 2) if rates else None,
        "torch_threads": torch.get_num_threads(),
        "unreadable": [str(path) for path in task.unreadable()],
    }


def _quiet() -> None:
    """Silence Lightning's hints that do not concern a user of this project."""
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*LeafSpec.*is deprecated.*")
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)
