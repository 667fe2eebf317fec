"""What logging costs: training runs with and without it, in turn.

    python -m benchmarks.logging_cost
    python -m benchmarks.logging_cost --task language model.layers=2

Without: no scalars during training, no histograms, no figures; validation, checkpoints and the few
values that it leaves stay. The difference of two whole runs is noisy, so the time inside the
logging calls of the run with logging is measured as well. CPU time is that of all threads of the
process, TensorBoard's writer included; it hardly depends on what else the machine does.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib
import io
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

from polyvision.training.config.compose import compose
from polyvision.training.logging.activation_monitor import ActivationMonitor
from polyvision.training.logging.loggers import JsonLinesLogger
from polyvision.training.logging.tensorboard import Board
from polyvision.training.session import run_task

SMALL = {
    "vision": ["model=timm", "model.name=resnet10t", "trainer.max_epochs=2"],
    "language": ["trainer.max_steps=60", "trainer.val_every_n_steps=30"],
}
WITHOUT = ["trainer.log_every_n_steps=1000000000", "trainer.histograms=false"]
CALLS: list[tuple[type[Any], str]] = [
    (Board, "log_metrics"),
    (Board, "describe"),
    (JsonLinesLogger, "log_metrics"),
    (ActivationMonitor, "setup"),
    (ActivationMonitor, "on_train_start"),
    (ActivationMonitor, "on_validation_batch_start"),
    (ActivationMonitor, "on_validation_batch_end"),
    (ActivationMonitor, "on_validation_end"),
]


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of one run: wall clock, CPU, and those inside the logging calls."""

    wall: float
    cpu: float
    inside: float


class Stopwatch:
    """Adds up the time in calls; a call inside another counts once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function`` with its time counted."""

        @functools.wraps(function)
        def call(*arguments: Any, **keywords: Any) -> Any:
            self._depth += 1
            start = time.perf_counter()
            try:
                return function(*arguments, **keywords)
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self.seconds += time.perf_counter() - start

        return call


@contextlib.contextmanager
def watched() -> Iterator[Stopwatch]:
    """Time every logging call while the block runs."""
    watch = Stopwatch()
    with contextlib.ExitStack() as stack:
        for owner, name in CALLS:
            stack.enter_context(patch.object(owner, name, watch.timed(getattr(owner, name))))
        yield watch


def measure(task: Any, overrides: list[str]) -> Timing:
    """Train once, in a folder that is thrown away."""
    domain = importlib.import_module(f"polyvision.training.tasks.{task}")
    with tempfile.TemporaryDirectory() as folder, watched() as watch:
        (config,) = compose(task, [*overrides, f"run_root={folder}"])
        cpu = time.process_time()
        with contextlib.redirect_stdout(io.StringIO()):
            summary = run_task(config, domain.build_task)
        assert summary is not None
        return Timing(summary["seconds"], time.process_time() - cpu, watch.seconds)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--task", choices=sorted(SMALL), default="vision")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("overrides", nargs="*", help="further overrides, such as act=relu")
    arguments = parser.parse_intermixed_args()
    overrides = [*SMALL[arguments.task], *arguments.overrides]
    measure(arguments.task, [*overrides, "trainer.max_steps=2"])  # imports, builds, caches
    runs: dict[str, list[Timing]] = {"with": [], "without": []}
    for number in range(arguments.rounds):
        # The order changes, so that a machine that grows slower favours neither.
        for kind in sorted(runs, reverse=bool(number % 2)):
            more = WITHOUT if kind == "without" else []
            runs[kind].append(measure(arguments.task, [*overrides, *more]))
    print(f"{arguments.task}, {' '.join(overrides)}: {arguments.rounds} rounds")
    for kind, timings in runs.items():
        print(
            f"  {kind:<8} wall {_list(t.wall for t in timings)} s, "
            f"CPU {_list(t.cpu for t in timings)} s"
        )
    pairs = list(zip(runs["with"], runs["without"], strict=True))
    shares = [100 * timing.inside / timing.wall for timing in runs["with"]]
    print(f"  difference, wall   {_list(100 * (a.wall / b.wall - 1) for a, b in pairs)} %")
    print(f"  difference, CPU    {_list(100 * (a.cpu / b.cpu - 1) for a, b in pairs)} %")
    print(f"  inside the calls   {_list(shares)} %, median {statistics.median(shares):.2f} %")


def _list(values: Iterator[float] | list[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values)


if __name__ == "__main__":
    main()
