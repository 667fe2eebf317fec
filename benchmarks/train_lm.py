"""Speed and memory of the language model's training step: against a textbook loop and litgpt.

    python -m benchmarks.train_lm [--model lm_mini] [--vocabulary 4096] [--sequences 4]
        [--rounds 9] [--output FOLDER]

A step is forward, loss, backward, clipping and fused AdamW on fixed random tokens, in fp32 on a CPU
and in bf16 autocast on a GPU. All contenders have the preset's sizes; gated ones have a hidden size
of 2/3, for equal parameters. Every contender lives in a process of its own; each round times a step
of each, in turn; a ratio is the median of the rounds' ratios. Contenders:

- ours with SwiGLU, PolyNorm, PolyReLU and GELU;
- a textbook Llama block (Touvron et al. 2023, https://arxiv.org/abs/2302.13971) of plain modules,
  with SwiGLU and with PolyNorm written as in the PolyCom paper's Algorithm 2;
- litgpt's Llama (https://github.com/Lightning-AI/litgpt), where it is installed.

Memory is the largest amount in use while a contender makes three steps, weights and optimizer
included: of tensors on a GPU, else of its process, less what it had before the model was built. The
bytes that one feed-forward network keeps for its backward pass are counted, without the parameters.
A second table shows the time a token for batches of several sizes.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.llama import TextbookFFN, TextbookLlama, litgpt_llama
from benchmarks.memory import added_peak, in_own_process
from polyvision import kernels
from polyvision.analysis.cost.saved_bytes import SavedTensors
from polyvision.analysis.result import text_table
from polyvision.models.language.ffn import FeedForward
from polyvision.models.language.transformer import Transformer, TransformerShape
from polyvision.training.config.compose import compose
from polyvision.training.tasks.language import transformer_shape

Loss = Callable[[Tensor, Tensor], Tensor]
OURS = ("swiglu", "polynorm", "polyrelu", "gelu")
BATCHES = (1, 2, 4, 8, 16)


def _cross_entropy(model: nn.Module) -> Loss:
    return lambda tokens, targets: F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def contender(name: str, shape: TransformerShape) -> tuple[nn.Module, Loss]:
    """Build a model, and how its loss is computed."""
    torch.manual_seed(0)
    kind, _, act = name.partition(", ")
    if kind == "ours":
        model = Transformer(dataclasses.replace(shape, activation=act, activation_options={}))
        return model, lambda tokens, targets: model(tokens, targets).total
    if kind == "textbook":
        plain = TextbookLlama(shape, act == "swiglu")
        return plain, _cross_entropy(plain)
    from litgpt.utils import chunked_cross_entropy

    theirs = litgpt_llama(shape)
    # As in litgpt/pretrain.py.
    return theirs, lambda tokens, targets: chunked_cross_entropy(theirs(tokens), targets)


def contenders() -> list[str]:
    """Return the names of those that can run here."""
    names = [f"ours, {act}" for act in OURS] + ["textbook, swiglu", "textbook, polynorm"]
    if importlib.util.find_spec("litgpt") is not None:
        return [*names, "litgpt, swiglu"]
    print("litgpt is not installed: skipped")
    return names


def training_step(
    name: str, shape: TransformerShape, tokens: Tensor
) -> tuple[Callable[[], float], int]:
    """Return a function that makes one step and returns the loss, and the number of parameters."""
    model, loss_of = contender(name, shape)
    model.to(tokens.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def step() -> float:
        with torch.autocast("cuda", torch.bfloat16) if tokens.is_cuda else nullcontext():
            loss = loss_of(inputs, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()  # waits for the device

    return step, sum(p.numel() for p in model.parameters())


def random_tokens(shape: TransformerShape, sequences: int) -> Tensor:
    """Return (sequences, context + 1) tokens on the device of the benchmark."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(1)
    return torch.randint(shape.vocab_size, (sequences, shape.context + 1), device=device)


def serve(
    connection: Connection, name: str, shape: TransformerShape, sequences: int, threads: int
) -> None:
    """Send parameters and peak memory of a contender; then make a step when asked, and time it."""
    torch.set_num_threads(threads)
    tokens = random_tokens(shape, sequences)
    made: list[tuple[Callable[[], float], int]] = []

    def work() -> None:
        made.append(training_step(name, shape, tokens))
        for _ in range(3):
            made[0][0]()

    peak = added_peak(work, tokens.device.type)
    ((step, parameters),) = made
    connection.send((parameters, peak))
    while connection.recv():
        start = time.perf_counter()
        step()
        connection.send(time.perf_counter() - start)


def measure(
    names: list[str], shape: TransformerShape, sequences: int, rounds: int
) -> tuple[dict[str, list[float]], dict[str, int | None]]:
    """Return the seconds of each round's step, and the peak of memory.

    Each contender lives in a process of its own: in a common one it would pay for the memory that
    the one before it gave back to the system.
    """
    context = multiprocessing.get_context("spawn")
    connections: dict[str, Connection] = {}
    peaks: dict[str, int | None] = {}
    for name in names:
        connections[name], theirs = context.Pipe()
        arguments = (theirs, name, shape, sequences, torch.get_num_threads())
        context.Process(target=serve, args=arguments, daemon=True).start()
        theirs.close()  # so that the end of the process is the end of the pipe
        parameters, peaks[name] = connections[name].recv()
        print(f"{name:<22}{parameters:>14,} parameters", flush=True)
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name, connection in connections.items():
            connection.send(True)
            times[name].append(connection.recv())
    for connection in connections.values():
        connection.send(False)
    return times, peaks


def seconds_a_token(name: str, shape: TransformerShape, rounds: int) -> dict[int, float]:
    """Return the median time of a step divided by its tokens, by the number of sequences."""
    steps = {n: training_step(name, shape, random_tokens(shape, n))[0] for n in BATCHES}
    times: dict[int, list[float]] = {n: [] for n in BATCHES}
    for number in range(rounds + 1):  # the first one warms up
        for n, step in steps.items():
            start = time.perf_counter()
            step()
            if number:
                times[n].append((time.perf_counter() - start) / (n * shape.context))
    return {n: statistics.median(values) for n, values in times.items()}


def ffn_bytes(shape: TransformerShape) -> dict[str, float]:
    """Return the bytes a token that one feed-forward network keeps, its input included."""
    x = torch.randn(64, shape.width, requires_grad=True)
    networks: dict[str, nn.Module] = {
        f"ours, {act}": FeedForward(shape.width, shape.ffn_hidden, act) for act in OURS
    }
    for act in ("swiglu", "polynorm"):
        networks[f"textbook, {act}"] = TextbookFFN(shape.width, shape.ffn_hidden, act == "swiglu")
    return {name: _kept(network, x) / len(x) for name, network in networks.items()}


def _kept(network: nn.Module, x: Tensor) -> int:
    with SavedTensors() as saved:
        network(x)
    return saved.bytes_without(network.parameters())


def ratio(times: dict[str, list[float]], slower: str, faster: str) -> float:
    """Return the median over the rounds of one time by the other."""
    pairs = zip(times[slower], times[faster], strict=True)
    return statistics.median(a / b for a, b in pairs)


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="lm_mini", help="a preset of configs/model")
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--context", type=int, help="tokens of a sequence (default: the preset's)")
    parser.add_argument("--sequences", type=int, default=4, help="sequences of a batch")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmarks"))
    options = parser.parse_args()
    (config,) = compose("language", [f"model={options.model}"])
    shape = transformer_shape(config.model, config.act, options.vocabulary)
    if options.context is not None:
        shape = dataclasses.replace(shape, context=options.context)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    print(kernels.describe())
    names = contenders()
    times, peaks = measure(names, shape, options.sequences, options.rounds)
    kept = ffn_bytes(shape)
    linear = in_own_process(seconds_a_token, "ours, polynorm", shape, min(options.rounds, 5))
    tokens = options.sequences * shape.context
    base = "ours, swiglu"
    rows = [
        [
            name,
            f"{tokens / statistics.median(times[name]):,.0f}",
            f"{ratio(times, name, base):.3f}",
            "-" if (peak := peaks[name]) is None else f"{peak / 2**20:,.0f}",
            f"{kept[name]:,.0f}" if name in kept else "-",
        ]
        for name in names
    ]
    header = ["step", "tokens/s", f"time / {base}", "peak MiB", "FFN bytes a token"]
    title = (
        f"{options.model}, vocabulary {options.vocabulary:,}, {options.sequences} sequences of "
        f"{shape.context} tokens, {options.rounds} rounds, {device}, "
        f"{torch.get_num_threads()} threads"
    )
    print(f"\n{title}\n{text_table(header, rows)}\n")
    cells = [f"{1e6 * seconds:.0f}" for seconds in linear.values()]
    print("ours, polynorm: time by the size of the batch")
    print(text_table(["sequences", *map(str, linear)], [["us a token", *cells]]), "\n")
    targets = {
        "ours by textbook, swiglu: speed, at least 1.00": ratio(times, "textbook, swiglu", base),
        "polynorm by swiglu: step time, at most 1.03": ratio(times, "ours, polynorm", base),
        "polynorm by swiglu, both ours: FFN bytes": kept["ours, polynorm"] / kept[base],
        "polynorm by textbook swiglu: FFN bytes, at most 0.55": kept["ours, polynorm"]
        / kept["textbook, swiglu"],
    }
    if "litgpt, swiglu" in names:
        targets["ours by litgpt, swiglu: speed, at least 1.00"] = ratio(
            times, "litgpt, swiglu", base
        )
    for label, value in targets.items():
        print(f"{label:<56}{value:.3f}")
    results: dict[str, Any] = {
        "title": title,
        "torch": torch.__version__,
        "seconds": times,
        "peak_bytes": peaks,
        "ffn_bytes_per_token": kept,
        "seconds_a_token": linear,
        "ratios": targets,
    }
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "train_lm.json"
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(f"\n{path}")


if __name__ == "__main__":
    main()
