"""Speed and memory of the language model's training step: against a textbook loop and litgpt.

    python -m benchmarks.train_lm [--model lm_mini] [--vocabulary 4096] [--sequences 4]
        [--rounds 9] [--output FOLDER]

A step is forward, loss, backward, clipping and fused AdamW on fixed random tokens, in fp32 on a CPU
and in bf16 autocast on a GPU. All contenders have the preset's sizes; gated ones have a hidden size
of 2/3, for equal parameters. Each round times every contender once, in turn; a ratio is the median
of the rounds' ratios. Contenders:

- ours with SwiGLU, PolyNorm, PolyReLU and GELU;
- a textbook Llama block (Touvron et al. 2023, https://arxiv.org/abs/2302.13971) of plain modules,
  with SwiGLU and with PolyNorm written as in the PolyCom paper's Algorithm 2;
- litgpt's Llama (https://github.com/Lightning-AI/litgpt), where it is installed.

Memory is the largest amount in use while a contender makes three steps, alone in a process of its
own, weights and optimizer included: of tensors on a GPU, else of the process, less what it had
before the model was built. The bytes that one feed-forward network keeps for its backward pass are
counted, without the parameters.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyvision import kernels
from polyvision.analysis.result import text_table
from polyvision.models.ffn import FeedForward, gated_hidden
from polyvision.models.transformer import Transformer, TransformerShape
from polyvision.training.compose import compose
from polyvision.training.language import transformer_shape

Loss = Callable[[Tensor, Tensor], Tensor]
OURS = ("swiglu", "polynorm", "polyrelu", "gelu")


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps), times a weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


class SwiGLU(nn.Module):
    """silu(x) times y."""

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        """Multiply."""
        return F.silu(gate) * up


class PaperPolyNorm(nn.Module):
    """PolyNorm in torch operations, as in Algorithm 2 of https://arxiv.org/abs/2411.03884."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3) / 3)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """Sum the three normalised powers."""
        powers = (x, x**2, x**3)
        terms = (p * torch.rsqrt(p.pow(2).mean(-1, keepdim=True) + 1e-6) for p in powers)
        return sum((w * t for w, t in zip(self.weight, terms, strict=True)), self.bias)


class TextbookFFN(nn.Module):
    """Two matrices, or three with a gate."""

    def __init__(self, width: int, hidden: int, gated: bool) -> None:
        super().__init__()
        inner = gated_hidden(hidden) if gated else hidden
        self.gate = nn.Linear(width, inner, bias=False) if gated else None
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)
        self.act: nn.Module = SwiGLU() if gated else PaperPolyNorm()

    def forward(self, x: Tensor) -> Tensor:
        """Apply the network to the last dimension."""
        h = self.act(self.up(x)) if self.gate is None else self.act(self.gate(x), self.up(x))
        return self.down(h)


class TextbookBlock(nn.Module):
    """Attention and feed-forward network, each after a norm, with residuals."""

    def __init__(self, shape: TransformerShape, gated: bool) -> None:
        super().__init__()
        self.heads, self.dim = shape.heads, shape.head_dim
        self.norm1, self.norm2 = RMSNorm(shape.width), RMSNorm(shape.width)
        self.q, self.k, self.v, self.out = (
            nn.Linear(shape.width, shape.width, bias=False) for _ in range(4)
        )
        self.ffn = TextbookFFN(shape.width, shape.ffn_hidden, gated)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Apply the block to (B, T, width)."""
        h = self.norm1(x)
        q, k, v = (
            part(h).view(*h.shape[:2], self.heads, self.dim).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )  # (B, H, T, head_dim)
        q, k = (t * cos + _half_turned(t) * sin for t in (q, k))
        y = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.ffn(self.norm2(x))


def _half_turned(x: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


class TextbookLlama(nn.Module):
    """The whole model; the angles are computed once."""

    def __init__(self, shape: TransformerShape, gated: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab_size, shape.width)
        self.blocks = nn.ModuleList(TextbookBlock(shape, gated) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocab_size, bias=False)
        exponent = torch.arange(0, shape.head_dim, 2) / shape.head_dim
        angles = torch.arange(shape.context)[:, None] * shape.rope_theta**-exponent
        angles = torch.cat((angles, angles), dim=-1)  # (T, head_dim)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]])
        return self.head(self.norm(x))


def _cross_entropy(model: nn.Module) -> Loss:
    return lambda tokens, targets: F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def litgpt_llama(shape: TransformerShape) -> nn.Module:
    """Build litgpt's model of the same sizes, with SwiGLU."""
    from litgpt import GPT, Config

    return GPT(
        Config(
            block_size=shape.context,
            vocab_size=shape.vocab_size,
            padded_vocab_size=shape.vocab_size,
            n_layer=shape.layers,
            n_head=shape.heads,
            n_embd=shape.width,
            intermediate_size=gated_hidden(shape.ffn_hidden),
            mlp_class_name="LLaMAMLP",
            norm_class_name="RMSNorm",
            norm_eps=shape.norm_eps,
            rotary_percentage=1.0,
            parallel_residual=False,
            bias=False,
        )
    )


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


def measure_times(
    names: list[str], shape: TransformerShape, sequences: int, rounds: int
) -> dict[str, list[float]]:
    """Return the seconds of each round's step."""
    tokens = random_tokens(shape, sequences)
    made = {name: training_step(name, shape, tokens) for name in names}
    for name, (_, parameters) in made.items():
        print(f"{name:<22}{parameters:>14,} parameters", flush=True)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 2):  # the first two warm up
        for name, (step, _) in made.items():
            start = time.perf_counter()
            step()
            if number >= 2:
                times[name].append(time.perf_counter() - start)
    return times


def _resident(*, largest: bool) -> int:
    """Return the bytes of this process in memory, now or at most so far."""
    if largest:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def memory_of(name: str, shape: TransformerShape, sequences: int, threads: int) -> int:
    """Return the largest number of bytes during three steps, in a process of its own."""
    torch.set_num_threads(threads)
    tokens = random_tokens(shape, sequences)
    before = _resident(largest=False)
    step, _ = training_step(name, shape, tokens)
    for _ in range(3):
        step()
    if tokens.is_cuda:
        return torch.cuda.max_memory_allocated()
    return _resident(largest=True) - before


def measure_memory(
    names: list[str], shape: TransformerShape, sequences: int
) -> dict[str, int | None]:
    """Return the peak of each contender; None where the system does not tell."""
    if not sys.platform.startswith("linux"):
        return dict.fromkeys(names)
    context = multiprocessing.get_context("spawn")
    found: dict[str, int | None] = {}
    for name in names:
        with context.Pool(1) as pool:
            arguments = (name, shape, sequences, torch.get_num_threads())
            found[name] = pool.apply(memory_of, arguments)
    return found


def ffn_bytes(shape: TransformerShape) -> dict[str, float]:
    """Return the bytes a token that one feed-forward network keeps, its input included."""
    x = torch.randn(64, shape.width, requires_grad=True)
    networks: dict[str, nn.Module] = {
        f"ours, {act}": FeedForward(shape.width, shape.ffn_hidden, act) for act in OURS
    }
    for act in ("swiglu", "polynorm"):
        networks[f"textbook, {act}"] = TextbookFFN(shape.width, shape.ffn_hidden, act == "swiglu")
    return {name: kept_bytes(network, x) / len(x) for name, network in networks.items()}


def kept_bytes(network: nn.Module, x: Tensor) -> int:
    """Return the bytes that autograd keeps of a pass, parameters left out."""
    own = {p.untyped_storage().data_ptr() for p in network.parameters()}
    kept: dict[int, Tensor] = {}  # alive, so that no address is used twice

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        network(x)
    return sum(t.untyped_storage().nbytes() for address, t in kept.items() if address not in own)


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
    times = measure_times(names, shape, options.sequences, options.rounds)
    peaks = measure_memory(names, shape, options.sequences)
    kept = ffn_bytes(shape)
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
        "ratios": targets,
    }
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "train_lm.json"
    path.write_text(json.dumps(results, indent=1) + "\n")
    print(f"\n{path}")


if __name__ == "__main__":
    main()
