"""``polyvision evaluate``: perplexity on any text, and benchmark tasks, of a trained model."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from polyvision.analysis.language.corpora import Tokens, open_tokens
from polyvision.analysis.language.harness import (
    PRESETS,
    evaluate_tasks,
    find_tasks,
    require_harness,
)
from polyvision.analysis.language.perplexity import score_tokens
from polyvision.analysis.language.requests import Answerer, CutContexts
from polyvision.analysis.language.trained import (
    TrainedModel,
    add_model_arguments,
    open_language_model,
)
from polyvision.analysis.result import text_table
from polyvision.errors import PolyvisionError

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    add_model_arguments(parser)
    parser.add_argument(
        "--data",
        nargs="+",
        default=[],
        metavar="DATA",
        help="text, JSON lines or parquet, also compressed, a folder of them, or a folder that "
        "prepare-text wrote (its validation split); each is a set of its own",
    )
    parser.add_argument(
        "--context", type=int, help="tokens that the model sees (default: the model's context)"
    )
    parser.add_argument(
        "--stride",
        type=int,
        help="how far the window moves: each token but the first ones has at least context - "
        "stride tokens before it (default: the context, the fewest passes)",
    )
    parser.add_argument(
        "--text-key",
        default="text",
        help="key or column of the text in JSON lines and parquet (default: %(default)s)",
    )
    parser.add_argument(
        "--tasks",
        nargs="+",
        default=[],
        metavar="TASK",
        help=f"tasks of the LM Evaluation Harness (extra eval), or {', '.join(PRESETS)}: the "
        "PolyCom paper's",
    )
    parser.add_argument("--task-folder", type=Path, help="task files (YAML) of your own")
    parser.add_argument("--few-shot", type=int, help="examples (default: what the task says)")
    parser.add_argument("--limit", type=int, help="documents of each task (default: all)")
    parser.add_argument(
        "--batch-size", type=int, default=8, help="windows or texts at a time (default: 8)"
    )
    parser.add_argument(
        "--output", type=Path, help="JSON file (default: evaluation.json beside the weights)"
    )


def run(arguments: argparse.Namespace) -> str:
    """Evaluate, write the JSON file, and return the tables.

    Raises:
        PolyvisionError: a mistake in the arguments, data that cannot be read, or no such model.
    """
    _check(arguments)
    trained = open_language_model(arguments)
    longest = trained.model.shape.context
    context = arguments.context or longest
    stride = arguments.stride or context
    if context > longest:
        raise PolyvisionError(f"--context {context} is more than the model's context of {longest}")
    if stride > context:
        raise PolyvisionError(f"--stride {stride} is more than the context of {context} tokens")
    opened = [
        open_tokens(place, trained.tokenizer, text_key=arguments.text_key)
        for place in arguments.data
    ]
    manager = find_tasks(arguments.tasks, arguments.task_folder) if arguments.tasks else None
    sets = [_score(trained, tokens, context, stride, arguments.batch_size) for tokens in opened]
    tasks, cut = ({}, None) if manager is None else _tasks(trained, arguments, manager)
    record = {
        "weights": str(trained.source),
        "step": trained.step,
        "precision": arguments.precision,
        "context": context,
        "stride": stride,
        "data": sets,
        "tasks": tasks,
        "cut_contexts": cut and dataclasses.asdict(cut),
        "few_shot": arguments.few_shot,
        "limit": arguments.limit,
    }
    path: Path = arguments.output or trained.folder / "evaluation.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise PolyvisionError(f"cannot write {path}: {error.strerror}; see --output") from None
    title = (
        f"{trained.source}, step {trained.step:,}, windows of {context} tokens, stride {stride}, "
        f"precision {arguments.precision}"
    )
    warning = cut and cut.warning(longest)
    warnings = [f"warning: {warning}"] if warning else []
    return "\n\n".join([title, *_tables(sets, tasks), *warnings, f"written: {path}"])


def _score(
    trained: TrainedModel, tokens: Tokens, context: int, stride: int, batch_size: int
) -> dict[str, Any]:
    started = time.perf_counter()
    with tqdm(
        total=tokens.count - 1, unit="tok", unit_scale=True, disable=not sys.stderr.isatty()
    ) as bar:
        score = score_tokens(
            trained,
            tokens.read,
            tokens.count,
            context=context,
            stride=stride,
            batch_size=batch_size,
            progress=lambda done: bar.update(done) and None,
        )
    return {
        "data": tokens.title,
        "tokens": score.tokens,
        "bytes": score.text_bytes,
        "loss": score.loss,
        "perplexity": score.perplexity,
        "bits_per_byte": score.bits_per_byte,
        "tokens_per_s": round(score.tokens / (time.perf_counter() - started), 1),
    }


def _tasks(
    trained: TrainedModel, arguments: argparse.Namespace, manager: Any
) -> tuple[dict[str, dict[str, float]], CutContexts]:
    with tqdm(unit="pass", disable=not sys.stderr.isatty()) as bar:
        answerer = Answerer(
            trained,
            batch_size=arguments.batch_size,
            progress=lambda done: bar.update(done) and None,
        )
        found = evaluate_tasks(
            answerer,
            arguments.tasks,
            manager,
            few_shot=arguments.few_shot,
            limit=arguments.limit,
        )
    return found, answerer.cut_contexts


def _tables(sets: list[dict[str, Any]], tasks: Mapping[str, Mapping[str, float]]) -> list[str]:
    tables = []
    if sets:
        header = ["data", "tokens", "bytes", "loss", "perplexity", "bits/byte", "tokens/s"]
        rows = [
            [
                each["data"],
                f"{each['tokens']:,}",
                f"{each['bytes']:,}",
                f"{each['loss']:.4f}",
                f"{each['perplexity']:.4f}",
                f"{each['bits_per_byte']:.4f}",
                f"{each['tokens_per_s']:,.0f}",
            ]
            for each in sets
        ]
        tables.append(text_table(header, rows))
    if tasks:
        rows = [
            [task, name, f"{value:.4f}", _error(metrics, name)]
            for task, metrics in tasks.items()
            for name, value in metrics.items()
            if not name.partition(",")[0].endswith("_stderr")
        ]
        tables.append(text_table(["task", "metric", "value", "std. error"], rows))
    return tables


def _error(metrics: Mapping[str, float], name: str) -> str:
    metric, comma, filtered = name.partition(",")
    value = metrics.get(f"{metric}_stderr{comma}{filtered}")
    return "-" if value is None else f"{value:.4f}"


def _check(arguments: argparse.Namespace) -> None:
    if not arguments.data and not arguments.tasks:
        raise PolyvisionError(
            "say on what: --data <text or prepared folder> ..., --tasks <task> ..., or both"
        )
    for name in ("context", "stride", "batch_size", "limit"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise PolyvisionError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if arguments.few_shot is not None and arguments.few_shot < 0:
        raise PolyvisionError(f"--few-shot must be 0 or more, got {arguments.few_shot}")
    folder: Path | None = arguments.task_folder
    if folder is not None and not folder.is_dir():
        raise PolyvisionError(f"--task-folder {folder} is not a folder")
    if arguments.tasks:
        require_harness()
