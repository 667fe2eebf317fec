"""One run from a typed configuration to its summary; everything that both tasks share."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything

from polyvision.analysis.cost.estimate import Cost, estimate_cost
from polyvision.analysis.metrics import higher_is_better
from polyvision.errors import PolyvisionError
from polyvision.files import write_whole
from polyvision.output import say_error
from polyvision.training.config.schema import AnyConfig, Config
from polyvision.training.loading.loader import TrainLoader, ValLoader, shared_batches, val_loader
from polyvision.training.loading.workers import worker_count
from polyvision.training.logging.activation_monitor import ActivationMonitor
from polyvision.training.logging.analysis_callback import Analyses, probe
from polyvision.training.logging.console import Console
from polyvision.training.logging.loggers import JsonLinesLogger, truncate_metrics
from polyvision.training.logging.quiet import quiet
from polyvision.training.logging.summary import format_summary, format_table
from polyvision.training.logging.tensorboard import Board, run_card
from polyvision.training.loop.devices import Hardware, resolve_hardware
from polyvision.training.loop.optimization import build_optimizer, build_schedule
from polyvision.training.loop.saving import Checkpoints
from polyvision.training.loop.stopping import Stopped, Stopping
from polyvision.training.loop.throughput import Throughput
from polyvision.training.plan import Steps, count_steps, plan_rows, target_text, train_batches
from polyvision.training.run.checkpoint import AtomicCheckpointIO
from polyvision.training.run.folder import Run, hold_run, locate_run, write_json
from polyvision.training.run.ranks import RankError, Watch, leave_group, watched
from polyvision.training.run.resume import Place, check_files, compare_data, find_checkpoint
from polyvision.training.run.state import track
from polyvision.training.tasks.task import Task, follow_average

__all__ = ["run_task"]


def run_task(
    config: AnyConfig, build: Callable[[AnyConfig], Task], overrides: Sequence[str] = ()
) -> dict[str, Any] | None:
    """Show the plan, train, and return the summary; with ``dry_run`` only show the plan.

    Args:
        config: what to do.
        build: makes the network and the data of it.
        overrides: those that ``config`` was composed from, for the command that the summary shows.

    Raises:
        ValueError: anything in the configuration, the data or the machine that does not fit.
    """
    hardware = resolve_hardware(config)
    plan = locate_run(config)
    finished = plan.summary()
    if config.resume is not None and finished is not None:
        _check_finished(config, hardware, build, plan)
        print(f"{plan.folder} has finished already; nothing to resume")
        print(format_summary(plan, finished, overrides), flush=True)
        return finished
    plan, place = find_checkpoint(plan, config.recipe.accumulate)
    quiet()
    seed_everything(config.seed, verbose=False)
    # A checkpoint to go on from has the weights, wherever they came from at first.
    built = build(dataclasses.replace(config, finetune=None) if plan.checkpoint else config)
    task = follow_average(built, config.recipe)
    loader = train_batches(config, hardware, task)
    steps = count_steps(config, loader, task)
    _refuse_bad_options(task, config, steps)
    batch = steps.batch_per_device
    cost = estimate_cost(task.model, lambda: task.make_input(batch), hardware.compute_dtype)
    rows = plan_rows(config, hardware, task, steps, cost, plan)
    if "LOCAL_RANK" not in os.environ:
        print(format_table("Plan", rows), flush=True)
        task.check()
    if config.dry_run:
        return None
    check_files(plan, task.files)
    with hold_run(config, plan) as run:
        return _fit(config, hardware, task, loader, steps, cost, run, place, rows, overrides)


def _check_finished(
    config: AnyConfig, hardware: Hardware, build: Callable[[AnyConfig], Task], plan: Run
) -> None:
    """Refuse to take a finished run for one on data that was changed since.

    Data that is gone cannot be compared; the run has its results all the same.

    Raises:
        PolyvisionError: the data is not what the run was trained on.
    """
    if plan.checkpoint is None or "LOCAL_RANK" in os.environ:
        return
    try:  # as for a dry run: no weights are made
        task = build(dataclasses.replace(config, finetune=None, dry_run=True))
    except (PolyvisionError, OSError) as error:
        print(f"note: the data of {plan.folder} was not compared: {error}", file=sys.stderr)
        return
    check_files(plan, task.files)
    compare_data(plan.checkpoint, train_batches(config, hardware, task))


def _fit(
    config: Config,
    hardware: Hardware,
    task: Task,
    loader: TrainLoader,
    steps: Steps,
    cost: Cost,
    run: Run,
    place: Place,
    rows: list[tuple[str, str]],
    overrides: Sequence[str],
) -> dict[str, Any]:
    first_step = place.step
    _prepare_folder(run, task, place)
    if task.skipped is not None:
        task.skipped.keep_in(run.folder / "unreadable.jsonl")
        if "LOCAL_RANK" not in os.environ:  # the first rank, before it starts the others
            task.skipped.forget_repaired()
    module = task.module(
        task.model,
        config.recipe,
        seed=config.seed,
        total_steps=steps.total,
        epoch_steps=steps.epoch,
        warmup_steps=steps.warmup,
        schedule_steps=steps.schedule,
        named_val=tuple(task.named_val),
    )
    if config.trainer.compile:
        task.model.compile()
    board = Board(run.folder, purge_step=first_step + 1 if first_step else None)
    throughput = Throughput(
        steps.batch_per_device * hardware.devices,
        task.tokens_per_sample,
        3 * cost.flops / steps.batch_per_device,
        hardware.compute_dtype,
        steps.total,
        lambda: loader.waited,
    )
    stopping = Stopping()
    sets = (task.val, *task.named_val.values())
    checkpoints = Checkpoints(
        run,
        task.monitor,
        config.trainer.checkpoint_every_n_steps,
        stopping,
        [shared_batches(each, steps.batch_per_device, hardware.devices) for each in sets],
    )
    trainer = _trainer(
        config,
        run,
        hardware,
        steps,
        [board, JsonLinesLogger(run.metrics)],
        [
            throughput,
            ActivationMonitor(config.trainer.histograms, steps.total, task.shown),
            *task.callbacks,
            *_analyses(config, task, run),
            checkpoints,
            Console(throughput, ["train/loss", *task.shown], sys.stderr.isatty()),  # saved first
        ],
    )
    loader.between = lambda: checkpoints.between_steps(trainer)
    settings = _settings(config, task)
    facts = {
        "settings": settings,
        "monitor": task.monitor,
        "mode": "max" if higher_is_better(task.monitor) else "min",
        "total_steps": steps.total,
        "activation_bytes": cost.saved_bytes,
    }
    val = _val_loaders(config, task, steps, trainer)
    started = time.monotonic()
    try:
        with ExitStack() as stack:
            stack.enter_context(closing(loader))
            for each in val:
                stack.enter_context(closing(each))
            stack.enter_context(stopping.listening(trainer))
            failed = stack.enter_context(
                _recorded(run, board, trainer, task, facts, rows, first_step)
            )
            watch = Watch(run.folder, _ending(failed, trainer), lambda: stopping.holding)
            stack.enter_context(watched(trainer, watch))
            trainer.fit(module, loader, val, ckpt_path=run.checkpoint)
            if task.monitor not in trainer.callback_metrics:  # stopped after the last step
                trainer.validate(module, val, verbose=False)
        leave_group()
    except SystemExit as stop:
        if not trainer.is_global_zero:  # a code would make the first rank's launcher kill it
            raise SystemExit(0) from None
        _say_stopped(run, trainer, checkpoints)
        code = stop.code if isinstance(stop, Stopped) else 130  # Lightning ends so after Ctrl-C
        raise SystemExit(code) from None
    summary = _summary(settings, task, trainer, checkpoints, throughput)
    summary["seconds"] = round(time.monotonic() - started, 1)
    summary["target"] = target_text(config, task)
    if trainer.is_global_zero:
        write_json(run.folder / "summary.json", summary)
        print(format_summary(run, summary, overrides), flush=True)
    return summary


def _refuse_bad_options(task: Task, config: Config, steps: Steps) -> None:
    """Build what Lightning would build only when the run has begun."""
    optimizer = build_optimizer(task.model, config.recipe, loss_scaling=False)
    build_schedule(
        optimizer,
        config.recipe,
        total_steps=steps.schedule,
        epoch_steps=steps.epoch,
        warmup_steps=steps.warmup,
    )


def _ending(
    failed: Callable[[BaseException], None], trainer: Trainer
) -> Callable[[RankError], None]:
    """Return what ends this process although its main thread waits for a rank that is gone."""

    def end(error: RankError) -> None:
        failed(error)
        launcher: Any = trainer.strategy.launcher
        launcher.kill(signal.SIGTERM if sys.platform == "win32" else signal.SIGKILL)
        say_error(error)
        sys.stderr.flush()
        os._exit(error.code)

    return end


def _say_stopped(run: Run, trainer: Trainer, checkpoints: Checkpoints) -> None:
    step, saved = trainer.global_step, checkpoints.saved_step
    place = "" if saved in (step, -1) else f", which goes on from step {saved}"
    where = f"go on with resume={run.folder}{place}" if run.last.exists() else "no checkpoint yet"
    with suppress(OSError):  # the terminal may be gone
        print(f"interrupted at step {step}: {where}", file=sys.stderr)


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
) -> Iterator[Callable[[BaseException], None]]:
    """Describe the run in its folder and in TensorBoard, and record how the block ends."""
    if not trainer.is_global_zero:
        yield lambda error: None
        return
    environment = json.loads((run.folder / "environment.json").read_text(encoding="utf-8"))
    # The tab shows the first one unasked.
    metrics = dict.fromkeys([task.monitor, *task.shown, "train/loss", "perf/samples_per_s"])
    board.describe(facts["settings"], metrics, run_card(environment, rows), first_step)
    try:
        with track(run.folder, facts, first_step, lambda: trainer.global_step) as failed:
            yield failed
    except BaseException:
        with suppress(OSError):  # a full disk must not hide what came first
            board.end(success=False)
        raise
    board.end(success=True)


def _prepare_folder(run: Run, task: Task, place: Place) -> None:
    """Write the task's files; drop what a resumed run will write again.

    The first rank does so, before it starts the others.
    """
    if "LOCAL_RANK" in os.environ:
        return
    for name, text in task.files.items():
        write_whole(run.folder / name, text)
    if run.checkpoint is not None:
        truncate_metrics(run.metrics, place.step, place.logged)
        return
    run.metrics.unlink(missing_ok=True)
    for events in run.folder.glob("events.out.tfevents*"):
        events.unlink()


def _trainer(
    config: Config,
    run: Run,
    hardware: Hardware,
    steps: Steps,
    loggers: list[Any],
    callbacks: list[Callback],
) -> Trainer:
    trainer, recipe = config.trainer, config.recipe
    arguments = hardware.trainer_arguments()
    arguments["plugins"] = [*arguments.get("plugins", []), AtomicCheckpointIO()]
    by_steps = trainer.val_every_n_steps
    return Trainer(
        **arguments,
        default_root_dir=run.folder,  # where Lightning would look for checkpoints of its own
        max_epochs=steps.epochs,
        max_steps=steps.total,
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


def _val_loaders(config: Config, task: Task, steps: Steps, trainer: Trainer) -> list[ValLoader]:
    return [
        val_loader(
            samples,
            steps.batch_per_device,
            workers=worker_count(config.data.workers, trainer.world_size),
            collate=task.collate,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
        )
        for samples in (task.val, *task.named_val.values())
    ]


def _settings(config: Config, task: Task) -> dict[str, Any]:
    """Return what tells runs apart, for the hparams tab and for people."""
    return {
        "task": config.task,
        "model": config.model.name,
        "act": config.act.label,
        "data": config.data.name,
        "recipe": config.recipe.name,
        "experiment": config.experiment.name if config.experiment else "none",
        "seed": config.seed,
        "finetune": config.finetune or "no",
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
    speed = {k.removeprefix("perf/"): round(v, 4) for k, v in throughput.medians().items()}
    last = {k: float(v) for k, v in trainer.callback_metrics.items() if k != "step"}
    return {
        "settings": settings,
        "monitor": task.monitor,
        "best": checkpoints.best,
        "last": last,
        "shown": {name: last[name] for name in task.shown if name in last},
        "steps": trainer.global_step,
        "samples_per_s": round(speed["samples_per_s"], 2) if speed else None,
        "speed": speed,
        "torch_threads": torch.get_num_threads(),
        "unreadable": task.skipped.names() if task.skipped else [],
    }
