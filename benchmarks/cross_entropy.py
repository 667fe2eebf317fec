"""Time and memory of the cross-entropy of a large vocabulary, against torch.

    python -m benchmarks.cross_entropy [--words 50304] [--width 768] [--tokens 4096] [--rounds 3]

Loss and gradients of hidden states and output matrix, fp32, summed over tokens. Contenders: ours
(``models/language/loss.py``), ``F.cross_entropy(F.linear(x, weight), targets)``, and torch's own
chunks (``F.linear_cross_entropy`` with its default options), where it has them. Times are medians
of rounds in turn; memory is the most that forward and backward pass add to the operands, gradients
included, alone in a process of its own.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.memory import added_peak, in_own_process
from polyvision.analysis.result import text_table
from polyvision.models.language.loss import linear_cross_entropy

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def _ours(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return linear_cross_entropy(x, weight, targets)[0]


def _logits(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight), targets, reduction="sum")


def _torch_chunks(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    options = torch.nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(x, weight, targets, reduction="sum", options=options)


CONTENDERS: dict[str, Loss] = {"ours": _ours, "torch, logits": _logits}
if hasattr(torch.nn, "LinearCrossEntropyOptions"):
    CONTENDERS["torch, chunks"] = _torch_chunks


def operands(words: int, width: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states, output matrix and targets, on a GPU where there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    x = torch.randn(tokens, width, device=device, requires_grad=True)
    weight = torch.randn(words, width, device=device).div_(width**0.5).requires_grad_()
    return x, weight, torch.randint(words, (tokens,), device=device)


def step(name: str, x: Tensor, weight: Tensor, targets: Tensor) -> float:
    """Compute loss and gradients."""
    x.grad = weight.grad = None
    loss = CONTENDERS[name](x, weight, targets)
    loss.backward()
    return loss.item()  # waits for the device


def memory_of(name: str, words: int, width: int, tokens: int) -> int | None:
    """Return the bytes that a step adds to the operands."""
    small = operands(64, width, 16)
    step(name, *small)  # loads libraries
    made = operands(words, width, tokens)
    return added_peak(lambda: step(name, *made), made[0].device.type)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--words", type=int, default=50304)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    sizes = options.words, options.width, options.tokens
    peaks = {name: in_own_process(memory_of, name, *sizes) for name in CONTENDERS}
    made = operands(*sizes)
    times: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    losses: dict[str, float] = {}
    for _ in range(options.rounds):
        for name, seconds in times.items():
            start = time.perf_counter()
            losses[name] = step(name, *made)
            seconds.append(time.perf_counter() - start)
    rows: list[list[object]] = [
        [
            name,
            f"{losses[name] / options.tokens:.5f}",
            f"{statistics.median(times[name]):.2f}",
            "-" if (peak := peaks[name]) is None else f"{peak / 2**20:,.0f}",
        ]
        for name in CONTENDERS
    ]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    print(
        f"{options.words:,} words of width {options.width}, {options.tokens:,} tokens, fp32, "
        f"{device}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    print(text_table(["cross-entropy", "loss", "seconds", "MiB above the operands"], rows))


if __name__ == "__main__":
    main()
