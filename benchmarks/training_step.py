"""Speed of whole training steps: what the fused kernels give to a real network.

    python -m benchmarks.training_step [--task vision|language] [--rounds 7] [--output FOLDER]

A step is forward, loss, backward, clipping and AdamW on fixed data of the right shape, in fp32 on a
CPU and in bf16 autocast on a GPU. ResNet50 sees --images pictures of --size pixels; the language
model is ``lm_tiny`` with a vocabulary of 1,024. Every round times each contender once, in turn;
the table holds medians. Contenders: ReLU; PolyNorm fused; PolyNorm through the reference backend
(``POLYVISION_BACKEND=reference``); the formula under ``torch.compile``; the algorithm of the paper,
plain and checkpointed. All have the same initial weights.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from polyvision.kernels import use_backend
from torch import Tensor, nn

from benchmarks.activations import Formula, Paper
from polyvision import kernels
from polyvision.activations import PolyNorm
from polyvision.models.language.transformer import Transformer, TransformerShape
from polyvision.models.vision.create import create_vision_model

Step = Callable[[], None]


def resnet50(activation: str, size: int) -> nn.Module:
    """Return ResNet50 for ten classes."""
    torch.manual_seed(0)
    return create_vision_model("resnet50", activation, num_classes=10, image_size=size).model


def lm_tiny(activation: str, vocabulary: int) -> nn.Module:
    """Return the small language model of ``configs/model/lm_tiny.yaml``."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"context": 256, "width": 128, "layers": 4, "heads": 4}
    return Transformer(TransformerShape(vocabulary, ffn_hidden=528, activation=activation, **sizes))


def replaced(model: nn.Module, make: Callable[[int], nn.Module]) -> nn.Module:
    """Put ``make(dim)`` in the place of every PolyNorm of ``model``."""
    places = {n: m.dim for n, m in model.named_modules() if isinstance(m, PolyNorm)}
    for name, dim in places.items():
        model.set_submodule(name, make(dim))
    return model


def contenders(build: Callable[[str], nn.Module]) -> dict[str, tuple[nn.Module, str | None]]:
    """Return each network with the backend that it is forced to use."""
    compiled = replaced(build("polynorm"), lambda dim: torch.compile(Formula(PolyNorm, dim)))
    return {
        "relu": (build("relu"), None),
        "polynorm, fused": (build("polynorm"), None),
        "polynorm, reference backend": (build("polynorm"), "reference"),
        "polynorm, torch.compile": (compiled, None),
        "polynorm, paper": (replaced(build("polynorm"), lambda dim: Paper(dim, False)), None),
        "polynorm, paper + checkpoint": (
            replaced(build("polynorm"), lambda dim: Paper(dim, True)),
            None,
        ),
    }


def step_of(model: nn.Module, backend: str | None, inputs: Tensor, targets: Tensor) -> Step:
    """Return a function that does one training step."""
    model.to(inputs.device)
    fused = inputs.is_cuda
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)

    def step() -> None:
        precision = torch.autocast("cuda", torch.bfloat16) if fused else nullcontext()
        with use_backend(backend) if backend else nullcontext(), precision:
            loss = F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if fused:
            torch.cuda.synchronize()

    return step


def measure(steps: dict[str, Step], items: int, rounds: int) -> dict[str, float]:
    """Return items per second, from the median time of each step."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 2):  # the first two warm up
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if number >= 2:
                times[name].append(time.perf_counter() - start)
    return {name: items / statistics.median(found) for name, found in times.items()}


def table(title: str, unit: str, rates: dict[str, float]) -> str:
    """Return the rates as text, with their ratio to the first."""
    first = next(iter(rates.values()))
    lines = [f"\n{title}", f"{'':<30}{unit:>12}{'/ relu':>8}"]
    lines += [f"{name:<30}{rate:>12.1f}{rate / first:>8.2f}" for name, rate in rates.items()]
    return "\n".join(lines)


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", choices=("vision", "language"), help="only this one")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--images", type=int, default=32, help="images per batch")
    parser.add_argument("--size", type=int, default=64, help="height and width of the images")
    parser.add_argument("--sequences", type=int, default=4, help="sequences of 256 per batch")
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmarks"))
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(kernels.describe())
    results: dict[str, Any] = {"kernels": kernels.describe().splitlines(), "options": str(options)}
    if options.task != "language":
        images = torch.randn(options.images, 3, options.size, options.size, device=device)
        images = images.to(memory_format=torch.channels_last)
        labels = torch.randint(0, 10, (options.images,), device=device)
        models = contenders(lambda activation: resnet50(activation, options.size))
        steps = {name: step_of(*made, images, labels) for name, made in models.items()}
        rates = measure(steps, options.images, options.rounds)
        title = f"ResNet50, {options.images} images of {options.size}x{options.size}, {device}"
        print(table(title, "images/s", rates), flush=True)
        results["vision"] = {"title": title, "images_per_s": rates}
    if options.task != "vision":
        tokens = torch.randint(0, 1024, (options.sequences, 257), device=device)
        models = contenders(lambda activation: lm_tiny(activation, 1024))
        pair = tokens[:, :-1], tokens[:, 1:]
        steps = {name: step_of(*made, *pair) for name, made in models.items()}
        rates = measure(steps, pair[0].numel(), options.rounds)
        title = f"lm_tiny, {options.sequences} sequences of 256 tokens, {device}"
        print(table(title, "tokens/s", rates), flush=True)
        results["language"] = {"title": title, "tokens_per_s": rates}
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "training_step.json"
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(f"\n{path}")


if __name__ == "__main__":
    main()
