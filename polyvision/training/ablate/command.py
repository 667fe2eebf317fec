"""``polyvision ablate``: train the runs of one of the paper's ablations, and compare them."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from polyvision.errors import PolyvisionError, unknown
from polyvision.output import lasting_output
from polyvision.training.ablate.plan import Planned, plan_study
from polyvision.training.ablate.report import report
from polyvision.training.ablate.studies import STUDIES, Study
from polyvision.training.config.compose import SCRIPTS, Task
from polyvision.training.config.overrides import parse
from polyvision.training.logging.summary import format_table
from polyvision.training.signals import Child, describe_code, run_children

__all__ = ["add_arguments", "job_slots", "run"]

# What the study itself sets, and the option to use instead.
_TAKEN = {
    "act": "the study chooses the activations",
    "seed": "use --seeds",
    "run_root": "use --output",
    "resume": "runs always go on where they stopped",
    "dry_run": "use --dry-run",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    studies = (
        f"  {name}: {study.title} ({study.source})\n      {study.question}"
        for name, study in STUDIES.items()
    )
    parser.epilog = "\n".join(["studies:", *studies])
    parser.add_argument("study", help="which ablation: see below")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="further overrides, such as recipe.lr=1e-3, before or after the options",
    )
    parser.add_argument("--task", choices=sorted(SCRIPTS), default="language")
    parser.add_argument("--model", help="model configuration, such as lm_tiny (default: train's)")
    parser.add_argument("--data", help="data configuration, such as book (default: train's)")
    parser.add_argument(
        "--seeds", type=int, default=3, help="seeds of each activation (default: %(default)s)"
    )
    parser.add_argument(
        "--steps", type=int, help="optimizer steps of each run (default: the recipe's epochs)"
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        help="runs at a time; they share the threads, and each takes one of the GPUs "
        "(default: %(default)s, which uses the whole machine)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("runs/ablate"),
        help="folder of the runs, which all studies in it share, and of a report for each "
        "(default: %(default)s)",
    )
    parser.add_argument("--dry-run", action="store_true", help="list the runs and stop")


def run(arguments: argparse.Namespace) -> str:
    """Train what is not yet trained, write the report, and return it.

    Raises:
        PolyvisionError: a mistake in the arguments; nothing has been started then.
        SystemExit: 1 if a run failed, 128 + signal if one stopped the study.
    """
    lasting_output()  # runs go on, whoever reads
    if arguments.study not in STUDIES:
        raise unknown("study", arguments.study, STUDIES)
    study = STUDIES[arguments.study]
    for name in ("seeds", "steps", "jobs"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise PolyvisionError(f"--{name} must be at least 1, got {value}")
    task: Task = arguments.task
    chosen = [f"{k}={v}" for k in ("model", "data") if (v := getattr(arguments, k)) is not None]
    if arguments.steps is not None:
        # An epoch has one step or more, so that the steps are what ends the run.
        chosen += [f"trainer.max_epochs={arguments.steps}", f"trainer.max_steps={arguments.steps}"]
    for override in parse(arguments.overrides):
        if (advice := _TAKEN.get(override.key_or_group.partition(".")[0])) is not None:
            raise PolyvisionError(f"{override.input_line}: leave it out, {advice}")
    output: Path = arguments.output
    planned = plan_study(
        study, task, [*chosen, *arguments.overrides], seeds=arguments.seeds, output=output
    )
    folder = output / arguments.study
    print(_overview(study, planned), flush=True)
    if arguments.dry_run:
        return f"report: {folder / 'report.html'}"
    failed = _train(task, planned, arguments.jobs, folder / "logs")
    text = report(study, planned, failed, folder, jobs=arguments.jobs)
    if failed:
        print(text)
        for line in failed:
            print(f"polyvision: {line}", file=sys.stderr)
        raise SystemExit(1)
    return text


def _overview(study: Study, planned: Sequence[Planned]) -> str:
    rows = []
    for each in planned:
        if each.run.summary() is not None:
            state = "finished, kept"
        elif each.run.checkpoint is not None:
            state = "goes on from its checkpoint"
        else:
            state = "to be trained"
        rows.append((each.name, f"{each.run.folder}: {state}"))
    return format_table(f"{study.title} ({study.source}): {len(planned)} runs", rows)


def job_slots(jobs: int, threads: int, gpus: Sequence[str]) -> list[dict[str, str]]:
    """Return the environment variables of each run that goes on at the same time.

    Args:
        jobs: runs at a time; one alone has the whole machine.
        threads: CPU threads that they share, at least one each.
        gpus: names of the GPUs; each run takes one, in turn.
    """
    if jobs == 1:
        return [{}]
    share = {"OMP_NUM_THREADS": str(max(1, threads // jobs))}
    return [
        share | ({"CUDA_VISIBLE_DEVICES": gpus[i % len(gpus)]} if gpus else {}) for i in range(jobs)
    ]


def _gpus() -> list[str]:
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]


def _train(task: Task, planned: Sequence[Planned], jobs: int, logs: Path) -> list[str]:
    """Run what is not finished; return a sentence for each run that failed.

    Raises:
        PolyvisionError: the folder of the logs cannot be written.
        SystemExit: a signal came; every run was told to stop.
    """
    todo = [each for each in planned if each.run.summary() is None]
    try:
        logs.mkdir(parents=True, exist_ok=True)
        for each in todo:
            (logs / each.log_name).unlink(missing_ok=True)
    except OSError as error:
        raise PolyvisionError(f"--output: cannot write {logs}: {error.strerror}") from error
    program = [sys.executable, "-m", f"polyvision.training.{SCRIPTS[task]}"]
    failed: list[str] = []

    def started(number: int) -> None:
        print(f"[{number + 1}/{len(todo)}] {todo[number].name}: started", flush=True)

    def ended(number: int, code: int) -> None:
        each, log = todo[number], logs / todo[number].log_name
        print(f"[{number + 1}/{len(todo)}] {each.name}: {_outcome(each, code, log)}", flush=True)
        if code:
            failed.append(f"{each.name}: {_outcome(each, code, log)}")

    children = [Child([*program, *each.overrides], logs / each.log_name) for each in todo]
    slots = job_slots(jobs, torch.get_num_threads(), _gpus())
    codes, stopped_by = run_children(children, slots, started, ended)
    if stopped_by is not None:
        done = codes.count(0) + len(planned) - len(todo)
        print(
            f"interrupted: {done} of {len(planned)} runs are finished; the same command goes on",
            file=sys.stderr,
        )
        raise SystemExit(128 + stopped_by)
    return failed


def _outcome(each: Planned, code: int, log: Path) -> str:
    summary = each.run.summary() if code == 0 else None
    if summary is not None:
        tag = summary["monitor"]
        last = summary["last"].get(tag, math.nan)
        return f"{tag} {last:.4f} in {summary['seconds']:g} s"
    lines = [
        line
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines()
        if line.strip()
    ]
    errors = [line for line in lines if line.startswith("error: ")] or lines[-1:]
    reason = errors[0].removeprefix("error: ") if errors else "it printed nothing"
    how = "stopped by" if code > 128 else "failed with"
    return f"{how} {describe_code(code)}: {reason} ({log})"
