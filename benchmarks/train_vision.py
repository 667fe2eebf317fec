"""Speed of the vision trainer: against timm's training loop and a bare one, and PolyNorm to ReLU.

    python -m benchmarks.train_vision loops [--model resnet50] [--size 64] [--workers 1]
    python -m benchmarks.train_vision loops --timm-script pytorch-image-models/train.py
    python -m benchmarks.train_vision activations [--size 64]

``loops``: images per second of ``train_vision.py`` (logging, monitors and all), of a loop like that
of timm's train.py, made of timm's public parts (the script is not in the wheel; with
--timm-script it runs too, as it is), and of a bare PyTorch loop. All read the same JPEG files with
the same crops, model, activation, batch, workers, optimizer and precision. Each round trains every
contender from the start, in turn; a rate is that of all steps after the first ones, logging
included, and a ratio is the median of the rounds' ratios.

``activations``: ``benchmarks.training_step`` on ResNet50, for PolyNorm fused, through the reference
backend and under torch.compile, against ReLU.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import itertools
import json
import logging
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader

from polyvision import kernels
from polyvision.data.images.augment import Augment, train_transform
from polyvision.models.vision.create import create_vision_model
from polyvision.training.config.compose import compose
from polyvision.training.session import run_task
from polyvision.training.tasks import vision

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CLASSES = 4
Batches = Iterable[tuple[Tensor, Tensor]]


def write_images(root: Path, images: int, side: int) -> None:
    """Write JPEG files of noise on a coarse pattern, ``root/{train,val}/<class>/<number>.jpg``."""
    generator = np.random.default_rng(0)
    for part, count in (("train", images), ("val", CLASSES)):
        for number in range(count):
            folder = root / part / f"class{number % CLASSES}"
            folder.mkdir(parents=True, exist_ok=True)
            coarse = generator.integers(0, 192, (8, 8, 3), dtype=np.uint8)
            smooth = np.asarray(Image.fromarray(coarse).resize((side, side)))
            noise = generator.integers(0, 32, (side, side, 3), dtype=np.uint8)
            Image.fromarray(smooth + noise).save(folder / f"{number}.jpg", quality=90)


class Clock(Callback):
    """Notes when each step of our trainer is done."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        """Note the time."""
        self.times.append(time.perf_counter())


def ours(options: argparse.Namespace, root: Path) -> list[float]:
    """Train with ``train_vision.py``'s own code; return when each step was done."""
    clock = Clock()

    def build(config: Any) -> Any:
        task = vision.build_task(config)
        task.callbacks.append(clock)
        return task

    with tempfile.TemporaryDirectory() as folder:
        (config,) = compose(
            "vision",
            [
                "model=timm",
                f"model.name={options.model}",
                f"act={options.act}",
                "data=folder",
                f"data.root={root}",
                f"data.image_size={options.size}",
                f"data.workers={options.workers}",
                "recipe=timm_default",
                f"recipe.batch_size={options.batch}",
                "recipe.warmup_epochs=0",
                "recipe.lr=0.01",
                "recipe.label_smoothing=0",
                "recipe.augment.color_jitter=0",
                f"trainer.max_steps={options.steps}",
                f"precision={'bf16' if options.bf16 else 32}",
                f"run_root={folder}",
            ],
        )
        with contextlib.redirect_stdout(io.StringIO()):
            run_task(config, build)
    return clock.times


def network(options: argparse.Namespace, device: torch.device) -> nn.Module:
    """Return the network that all contenders train, in channels_last."""
    built = create_vision_model(
        options.model, options.act, num_classes=CLASSES, image_size=options.size
    )
    return built.model.train().to(device)


def autocast(options: argparse.Namespace, device: torch.device) -> Callable[[], Any]:
    """Return the context of a forward pass."""
    return lambda: torch.autocast(device.type, torch.bfloat16, enabled=options.bf16)


def timm_loop(options: argparse.Namespace, root: Path) -> list[float]:
    """Train as timm's train.py does: its data set, loader, optimizer, schedule and meters.

    Source of the order of things: train_one_epoch in
    https://github.com/huggingface/pytorch-image-models/blob/main/train.py (Wightman 2019).
    """
    from timm.data import create_dataset, create_loader
    from timm.optim import create_optimizer_v2
    from timm.scheduler import create_scheduler_v2
    from timm.utils import AverageMeter

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = network(options, device)
    loader = create_loader(
        create_dataset("", root=str(root), split="train", is_training=True),
        input_size=(3, options.size, options.size),
        batch_size=options.batch,
        is_training=True,
        use_prefetcher=device.type == "cuda",
        scale=(0.08, 1.0),
        hflip=0.5,
        color_jitter=None,
        interpolation="bicubic",
        mean=MEAN,
        std=STD,
        num_workers=options.workers,
        device=device,
    )
    optimizer = create_optimizer_v2(model, "sgd", lr=0.01, weight_decay=2e-5, momentum=0.9)
    scheduler, _ = create_scheduler_v2(
        optimizer, sched="cosine", num_epochs=300, updates_per_epoch=len(loader)
    )
    losses, seconds = AverageMeter(), AverageMeter()
    forward = autocast(options, device)
    times: list[float] = []
    optimizer.zero_grad()
    for number, (images, labels) in enumerate(itertools.islice(loader, options.steps)):
        images, labels = images.to(device), labels.to(device)
        images = images.contiguous(memory_format=torch.channels_last)
        with forward():
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.update(loss.item(), images.shape[0])
        optimizer.zero_grad()
        times.append(time.perf_counter())
        seconds.update(times[-1] - times[max(number - 1, 0)])
        scheduler.step_update(num_updates=number + 1, metric=losses.avg)
    return times


def bare_loop(options: argparse.Namespace, root: Path) -> list[float]:
    """Train with torch and torchvision alone, but for the crops."""
    from torchvision.datasets import ImageFolder

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = network(options, device)
    crops = train_transform(Augment(), options.size, MEAN, STD)
    loader: Batches = DataLoader(
        ImageFolder(str(root / "train"), crops),
        options.batch,
        shuffle=True,
        drop_last=True,
        num_workers=options.workers,
        pin_memory=device.type == "cuda",
    )
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.01, momentum=0.9, nesterov=True, weight_decay=2e-5
    )
    forward = autocast(options, device)
    times: list[float] = []
    for images, labels in itertools.islice(loader, options.steps):
        images = images.to(device, memory_format=torch.channels_last, non_blocking=True)
        with forward():
            loss = F.cross_entropy(model(images), labels.to(device, non_blocking=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter())
    return times


def timm_script(options: argparse.Namespace, root: Path) -> list[float]:
    """Run timm's train.py for an epoch, and read the time of each step from its log."""
    if options.act != "relu":
        raise SystemExit("--timm-script trains timm's own network: use --act relu")
    settings = {
        "data-dir": root,
        "model": options.model,
        "num-classes": CLASSES,
        "img-size": options.size,
        "batch-size": options.batch,
        "workers": options.workers,
        "epochs": 1,
        "opt": "sgd",
        "lr": 0.01,
        "weight-decay": 2e-5,
        "smoothing": 0,
        "color-jitter": 0,
        "interpolation": "bicubic",
        "train-interpolation": "bicubic",
        "log-interval": 1,
        "device": "cuda" if torch.cuda.is_available() else "cpu",
    }
    command = [sys.executable, str(options.timm_script), "--channels-last"]
    command += [] if torch.cuda.is_available() else ["--no-prefetcher"]
    command += ["--amp", "--amp-dtype", "bfloat16"] if options.bf16 else []
    with tempfile.TemporaryDirectory() as folder:
        settings["output"] = folder
        for key, value in settings.items():
            command += [f"--{key}", str(value)]
        done = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
    seconds = re.findall(r"Train: .* Time: ([\d.]+)s,", done.stdout + done.stderr)
    if done.returncode or len(seconds) < options.steps:
        raise SystemExit(f"{options.timm_script} failed:\n{done.stderr[-2000:]}")
    return list(itertools.accumulate(map(float, seconds[: options.steps])))


def compare_loops(options: argparse.Namespace) -> dict[str, Any]:
    """Run every contender in every round; return rates and the ratios of ours to the others."""
    contenders: dict[str, Callable[[argparse.Namespace, Path], list[float]]] = {
        "ours": ours,
        "timm's parts": timm_loop,
        "bare loop": bare_loop,
    }
    if options.timm_script is not None:
        contenders["timm's train.py"] = timm_script
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    with tempfile.TemporaryDirectory() as folder:
        write_images(Path(folder), options.steps * options.batch, options.source)
        for number in range(options.rounds):
            order = list(contenders)[number % len(contenders) :]
            for name in [*order, *(n for n in contenders if n not in order)]:
                torch.manual_seed(0)
                times = contenders[name](options, Path(folder))
                seconds = (times[-1] - times[options.warmup]) / (len(times) - 1 - options.warmup)
                rates[name].append(options.batch / seconds)
                print(f"round {number + 1}, {name}: {rates[name][-1]:.1f} images/s", flush=True)
    ratios = {
        name: statistics.median(a / b for a, b in zip(rates["ours"], rates[name], strict=True))
        for name in rates
    }
    title = (
        f"{options.model}, {options.act}, batches of {options.batch} at {options.size} px, "
        f"{options.workers} workers, {'bf16' if options.bf16 else 'fp32'}, "
        f"{torch.get_num_threads()} threads"
    )
    lines = [title, f"{'':<18}{'images/s':>10}{'ours / it':>11}   rounds"]
    for name, found in rates.items():
        rounds = " ".join(f"{rate:.1f}" for rate in found)
        lines.append(f"{name:<18}{statistics.median(found):>10.1f}{ratios[name]:>11.3f}   {rounds}")
    print("\n".join(lines), flush=True)
    return {"title": title, "images_per_s": rates, "ratios": ratios}


def compare_activations(options: argparse.Namespace) -> dict[str, Any]:
    """Time whole steps on fixed images, ReLU and three forms of PolyNorm in turn."""
    steps = importlib.import_module("benchmarks.training_step")
    images = torch.randn(options.batch, 3, options.size, options.size)
    images = images.to(memory_format=torch.channels_last)
    labels = torch.randint(0, 10, (options.batch,))
    models = steps.contenders(lambda activation: steps.resnet50(activation, options.size))
    models = {name: made for name, made in models.items() if "paper" not in name}
    timed = {name: steps.step_of(*made, images, labels) for name, made in models.items()}
    rates = steps.measure(timed, options.batch, options.rounds)
    title = f"ResNet50, {options.batch} images of {options.size}x{options.size}, cpu"
    print(steps.table(title, "images/s", rates), flush=True)
    return {"title": title, "images_per_s": rates}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Leave the log of our trainer and of timm out."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("loops", "activations"))
    parser.add_argument("--model", default="resnet50", help="of loops: a timm model")
    parser.add_argument("--act", default="relu", help="of loops: its activation")
    parser.add_argument("--size", type=int, default=64, help="height and width in the network")
    parser.add_argument("--source", type=int, default=256, help="height and width of the files")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=20, help="of loops, in each round")
    parser.add_argument("--warmup", type=int, default=4, help="steps that do not count")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--timm-script", type=Path, help="timm's train.py, to be run as well")
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmarks"))
    options = parser.parse_args()
    if options.steps < options.warmup + 2:
        parser.error("--steps must be at least --warmup + 2")
    print(kernels.describe())
    with quiet():
        compare = compare_loops if options.part == "loops" else compare_activations
        results = compare(options) | {"options": {k: str(v) for k, v in vars(options).items()}}
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / f"train_vision_{options.part}_{options.size}.json"
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(f"\n{path}")


if __name__ == "__main__":
    main()
