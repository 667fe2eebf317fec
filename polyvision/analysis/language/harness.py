"""Benchmark tasks of the LM Evaluation Harness, the package ``lm-eval`` (extra ``eval``).

Source: Gao et al. 2024, https://doi.org/10.5281/zenodo.12608602.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polyvision.analysis.language.requests import Answerer
from polyvision.errors import PolyvisionError, did_you_mean

__all__ = [
    "PRESETS",
    "evaluate_tasks",
    "find_tasks",
    "harness_model",
    "require_harness",
    "task_names",
]

# Zhuo et al. 2024, https://arxiv.org/abs/2411.03884: all of section 4; Table 1; Table 3, whose
# "MMLU Var", with varied numbers of examples, the harness does not have: its plain MMLU instead.
_DENSE = ("arc_easy", "arc_challenge", "hellaswag", "piqa", "sciq", "winogrande")
_MORE = ("coqa", "mmlu", "boolq", "copa", "commonsense_qa", "openbookqa", "social_iqa")
PRESETS: dict[str, tuple[str, ...]] = {
    "paper": (*_DENSE, *_MORE),
    "paper_dense": _DENSE,
    "paper_moe": (*_DENSE, "mmlu", "openbookqa", "copa"),
}


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if error.name and not error.name.startswith("lm_eval"):
            raise  # broken inside, which its own message explains
        raise PolyvisionError(
            "--tasks needs the package lm-eval: pip install 'polyvision[eval]'"
        ) from None


def require_harness() -> None:
    """Check that the package is there, before anything else takes time.

    Raises:
        PolyvisionError: it is not installed.
    """
    _package("lm_eval.api.model")


def task_names(asked: Sequence[str]) -> list[str]:
    """Put the tasks of ``PRESETS`` in the place of their names; no task twice."""
    return list(dict.fromkeys(task for name in asked for task in PRESETS.get(name, (name,))))


def harness_model(answerer: Answerer) -> Any:
    """Return ``answerer`` as an ``lm_eval.api.model.LM``, for ``lm_eval.simple_evaluate``.

    Raises:
        PolyvisionError: the package is not installed.
    """
    base: Any = _package("lm_eval.api.model").LM

    class HarnessModel(base):  # type: ignore[misc]
        """Hands the strings of each request to the answerer."""

        def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
            return answerer.loglikelihood([request.args for request in requests])

        def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
            return answerer.loglikelihood_rolling([request.args[0] for request in requests])

        def generate_until(self, requests: Sequence[Any]) -> list[str]:
            return answerer.generate_until([request.args for request in requests])

    return HarnessModel()


def find_tasks(tasks: Sequence[str], folder: Path | None = None) -> Any:
    """Look tasks up, before anything else takes time.

    Args:
        tasks: names of the harness, of tasks in ``folder``, or of ``PRESETS``.
        folder: task files (YAML) of your own.

    Returns:
        The harness's ``TaskManager``, for ``evaluate_tasks``.

    Raises:
        PolyvisionError: the package is not installed, or a task does not exist.
    """
    manager = _package("lm_eval.tasks").TaskManager(include_path=folder and str(folder))
    for name in task_names(tasks):
        if name not in manager.all_tasks:
            hint = did_you_mean(name, [*manager.all_tasks, *PRESETS])
            where = "" if folder is None else f", those in {folder}"
            raise PolyvisionError(
                f"unknown task {name!r}.{hint} Valid: {', '.join(PRESETS)}{where}, and the "
                f"harness's {len(manager.all_tasks):,} (lm-eval ls tasks)"
            )
    return manager


def evaluate_tasks(
    answerer: Answerer,
    tasks: Sequence[str],
    manager: Any,
    *,
    few_shot: int | None = None,
    limit: int | None = None,
) -> dict[str, dict[str, float]]:
    """Run tasks and return their metrics.

    Args:
        answerer: the language model.
        tasks: the names that ``find_tasks`` found.
        manager: what it returned.
        few_shot: examples before each question; None for what the task says.
        limit: documents of each task; None for all.

    Returns:
        For each task and group its metrics, such as ``acc``, and ``acc_stderr`` where one is known.

    Raises:
        PolyvisionError: the data of a task cannot be loaded.
    """
    model = harness_model(answerer)
    try:
        found: Mapping[str, Any] = _package("lm_eval").simple_evaluate(
            model=model,
            tasks=task_names(tasks),
            num_fewshot=few_shot,
            limit=limit,
            task_manager=manager,
            log_samples=False,
            bootstrap_iters=1000,
        )
    except (OSError, ValueError, RuntimeError) as error:
        if isinstance(error, PolyvisionError):
            raise
        reason = " ".join(str(error).split())
        raise PolyvisionError(
            f"--tasks {' '.join(tasks)}: {type(error).__name__}: {reason}. The harness loads the "
            f"data of its own tasks from the network; --task-folder takes tasks with local files"
        ) from error
    return {task: _metrics(values) for task, values in found["results"].items()}


def _metrics(values: Mapping[str, Any]) -> dict[str, float]:
    """Keep the numbers; ``acc,none`` is accuracy with the filter ``none``."""
    return {
        key.removesuffix(",none"): float(value)
        for key, value in values.items()
        if "," in key and isinstance(value, int | float)
    }
