"""``polyvision analyse``: effective rank, layer similarity, cost and health of a trained model."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from polyvision.analysis.cost.report import cost_tables
from polyvision.analysis.device import add_device_argument, pick_device
from polyvision.analysis.health.measure import gradient_norms
from polyvision.analysis.result import Result
from polyvision.errors import PolyvisionError, unknown
from polyvision.training.logging.analysis_callback import KINDS, Probe, analyse, probe, rank_history
from polyvision.training.logging.tensorboard import TagWriter
from polyvision.training.loop.module import TaskModule
from polyvision.training.restore import load_model

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument(
        "kind",
        help="rank: effective rank of the weights; similarity: cosine of hidden states between "
        "layers; cost: FLOPs, saved bytes and time of the activations; health: sparsity, dead "
        "neurons, massive activations, kurtosis, weights, gradients",
    )
    parser.add_argument(
        "run_or_checkpoint",
        nargs="?",
        type=Path,
        metavar="RUN_OR_CHECKPOINT",
        help="a run folder (its last checkpoint is taken) or a checkpoint in one; without it, cost "
        "computes the paper's Tables 8 and 9",
    )
    parser.add_argument(
        "--output", type=Path, help="folder of PNG, JSON and events (default: analysis/ in the run)"
    )
    parser.add_argument(
        "--samples",
        type=int,
        default=16,
        help="validation samples, evenly spread (default: %(default)s)",
    )
    add_device_argument(parser)


def run(arguments: argparse.Namespace) -> str:
    """Run one analysis, write its files, and return its table and where they lie.

    Raises:
        PolyvisionError: no such analysis, run or device, or the folder cannot be written.
    """
    kind: str = arguments.kind
    if kind not in KINDS:
        raise unknown("analysis", kind, KINDS)
    if arguments.samples < 1:
        raise PolyvisionError(f"--samples must be at least 1, got {arguments.samples}")
    device = str(pick_device(arguments.device))
    if arguments.run_or_checkpoint is None:
        if kind != "cost":
            raise PolyvisionError(
                f"polyvision analyse {kind} needs a run folder or a checkpoint, for example "
                f"runs/language/book/lm_tiny/polynorm/seed0"
            )
        return _write(cost_tables(device=device), arguments.output or Path("runs/analysis"), 0)
    restored = load_model(arguments.run_or_checkpoint)
    module = restored.module.to(device)
    inputs, targets = probe(restored.task.val, arguments.samples, restored.task.collate)
    batch = inputs.to(device), targets.to(device)
    result = analyse(
        kind,
        module,
        batch,
        step=restored.step,
        history=rank_history(restored.run.folder / "metrics.jsonl"),
        gradients=_gradients(module, batch) if kind == "health" else None,
        timed=True,
    )
    return _write(result, arguments.output or restored.run.folder / "analysis", restored.step)


def _gradients(module: TaskModule, batch: Probe) -> dict[str, float]:
    """Return the gradient norms of the training loss on the batch, in eval mode."""
    torch.autograd.backward(module.loss(batch))
    norms = gradient_norms(module.model)
    module.zero_grad()
    return norms


def _write(result: Result, folder: Path, step: int) -> str:
    paths = result.save(folder)
    with TagWriter(str(folder)) as writer:
        result.log(writer, step)
    return f"{result.text}\n\nwritten: {', '.join(map(str, paths))} and TensorBoard events"
