"""Time and saved memory of the activations beside their peers, in one process.

    python -m benchmarks.activations [--sites TEXT] [--repeats 30] [--threads N] [--output FOLDER]

Every round times each contender once, in turn, so that a disturbance of the machine meets them all
alike; the table holds medians over the rounds. Two tables per site, forward and forward + backward,
with the time, its ratio to ``torch.relu`` and the bytes kept for the backward pass. FOLDER receives
``activations.json`` and ``activations.png``.

Contenders: relu, GELU and SiLU of PyTorch; ours; the formula in fp32 under ``torch.compile``; the
algorithm of the paper (2411.03884, Algorithm 2) in the dtype of x, plain and under the activation
checkpoint its authors use by default; Liger-Kernel on a GPU where it is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from polyvision.kernels import reference
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from polyvision import kernels
from polyvision.activations import PolyNorm, PolyReLU

EPS = 1e-6
Contender = Callable[[Tensor], Tensor]


class Site(NamedTuple):
    """One input: its shape, memory format and dtype."""

    shape: tuple[int, ...]
    layout: str
    dtype: torch.dtype

    @property
    def dim(self) -> int:
        """The feature dimension."""
        return -1 if self.layout == "rows" else 1

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{'x'.join(map(str, self.shape))} {self.layout} {dtype}"

    def tensor(self, device: str) -> Tensor:
        """Return random values in this shape, memory format and dtype."""
        x = torch.randn(self.shape, device=device).to(self.dtype)
        return x.to(memory_format=torch.channels_last) if self.layout == "channels_last" else x


def sites(images: int) -> list[Site]:
    """Return feed-forward networks of language models, and the sites of ResNet50."""
    rows = [(2048, 3072), (8192, 256), (4096, 8256)]
    maps = [(64, 112), (64, 56), (256, 56), (512, 28), (1024, 14), (2048, 7)]
    dtypes = (torch.float32, torch.bfloat16)
    found = [Site(shape, "rows", dtype) for shape in rows for dtype in dtypes]
    for channels, side in maps:
        shape = (images, channels, side, side)
        found += [Site(shape, "channels_last", dtype) for dtype in dtypes]
    return found + [Site((images, 256, 56, 56), "NCHW", dtype) for dtype in dtypes]


class Paper(nn.Module):
    """Algorithm 2 of the paper, in the dtype of x."""

    def __init__(self, dim: int, recompute: bool) -> None:
        super().__init__()
        self.dim, self.recompute = dim, recompute
        self.weight = nn.Parameter(torch.ones(3) / 3)
        self.bias = nn.Parameter(torch.zeros(1))

    def _norm(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(self.dim, keepdim=True) + EPS)

    def _polynomial(self, x: Tensor) -> Tensor:
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        return sum((weight[i] * self._norm(x ** (i + 1)) for i in range(3)), start=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the activation to ``x``."""
        if not self.recompute:
            return self._polynomial(x)
        y: Tensor = checkpoint(self._polynomial, x, use_reentrant=False)
        return y


class Formula(nn.Module):
    """Our formula composed from torch operations with fp32 inside, to be compiled."""

    def __init__(self, kind: type[nn.Module], dim: int) -> None:
        super().__init__()
        self.norm, self.dim = kind is PolyNorm, dim
        self.weight = nn.Parameter(torch.ones(3) / 3)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the activation to ``x``."""
        if not self.norm:
            return reference.poly_relu(x, self.weight, self.bias)
        v = x.float()
        y: Tensor = self.bias
        for i in range(1, 4):
            power = v**i
            scale = torch.rsqrt(power.square().mean(self.dim, keepdim=True) + EPS)
            y = y + self.weight[i - 1] * power * scale
        return y.to(x.dtype)


def contenders(site: Site, device: str) -> dict[str, Contender]:
    """Return what is compared at this site, by name."""
    torch._dynamo.reset()
    modules: dict[str, Any] = {
        "torch.relu": torch.relu,
        "GELU": F.gelu,
        "SiLU": F.silu,
        "PolyNorm": PolyNorm(dim=site.dim),
        "PolyReLU": PolyReLU(),
        "PolyNorm, torch.compile": torch.compile(Formula(PolyNorm, site.dim)),
        "PolyReLU, torch.compile": torch.compile(Formula(PolyReLU, site.dim)),
        "PolyNorm, paper": Paper(site.dim, recompute=False),
        "PolyNorm, paper + checkpoint": Paper(site.dim, recompute=True),
    }
    if device == "cuda" and site.dim == -1 and importlib.util.find_spec("liger_kernel"):
        from liger_kernel.transformers import LigerPolyNorm

        modules["PolyNorm, Liger"] = LigerPolyNorm(in_place=False)
    for module in modules.values():
        if isinstance(module, nn.Module):
            module.to(device)
    return modules


def saved_bytes(function: Contender, x: Tensor) -> int:
    """Return the bytes that autograd keeps for the backward pass, each memory once."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        function(x)
    return sum(kept.values())


def measure(site: Site, device: str, repeats: int) -> list[dict[str, Any]]:
    """Return one record for each contender: medians in ms, and the bytes saved."""
    x, grad = site.tensor(device).requires_grad_(), site.tensor(device)
    functions = contenders(site, device)

    def forward(function: Contender) -> None:
        with torch.no_grad():
            function(x)

    def step(function: Contender) -> None:
        x.grad = None
        function(x).backward(grad)

    def timed(run: Callable[[Contender], None], function: Contender) -> float:
        start = time.perf_counter()
        run(function)
        if device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e3

    times: dict[tuple[str, str], list[float]] = {}
    for mode, run in (("forward", forward), ("step", step)):
        for function in functions.values():
            timed(run, function)  # compiles, fills the caches
            timed(run, function)
        for _ in range(repeats):
            for name, function in functions.items():
                times.setdefault((name, mode), []).append(timed(run, function))
    return [
        {
            "site": str(site),
            "name": name,
            "forward_ms": statistics.median(times[name, "forward"]),
            "step_ms": statistics.median(times[name, "step"]),
            "saved_bytes": saved_bytes(function, x),
            "saved_of_x": saved_bytes(function, x) / (x.numel() * x.element_size()),
        }
        for name, function in functions.items()
    ]


def table(records: list[dict[str, Any]]) -> str:
    """Return the records of one site as text."""
    relu = next(r for r in records if r["name"] == "torch.relu")
    lines = [
        f"\n{records[0]['site']}",
        f"{'':<30}{'forward':>10}{'/ relu':>8}{'fwd+bwd':>11}{'/ relu':>8}{'saved':>10}{'/ x':>7}",
    ]
    for r in records:
        lines.append(
            f"{r['name']:<30}{r['forward_ms']:>7.2f} ms{r['forward_ms'] / relu['forward_ms']:>8.2f}"
            f"{r['step_ms']:>8.2f} ms{r['step_ms'] / relu['step_ms']:>8.2f}"
            f"{r['saved_bytes'] / 2**20:>7.1f} MB{r['saved_of_x']:>7.2f}"
        )
    return "\n".join(lines)


def plot(records: list[dict[str, Any]], path: Path) -> None:
    """Draw the time of a step relative to relu, one group of bars for each site."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    places = list(dict.fromkeys(r["site"] for r in records))
    names = [n for n in dict.fromkeys(r["name"] for r in records) if n != "torch.relu"]
    step = {(r["site"], r["name"]): r["step_ms"] for r in records}
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.9 * len(places)))
    height = 0.8 / len(names)
    for i, name in enumerate(names):
        ratios = [step.get((p, name), 0.0) / step[p, "torch.relu"] for p in places]
        positions = [row + (i + 0.5) * height - 0.4 for row in range(len(places))]
        axes.barh(positions, ratios, height, label=name)
    axes.set_xscale("log")
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(places)), places)
    axes.invert_yaxis()
    axes.set_xlabel("time of forward + backward, torch.relu = 1")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def cpu_name() -> str:
    """Return the model of the CPU, as far as the system tells."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def main() -> None:
    """Measure, print and write the results."""
    cuda = torch.cuda.is_available()
    device = "cuda" if cuda else "cpu"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sites", default="", help="only sites whose name contains this text")
    parser.add_argument("--repeats", type=int, default=30, help="rounds")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--images", type=int, default=256 if cuda else 8, help="images per batch")
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmarks"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    chosen = [site for site in sites(options.images) if options.sites in str(site)]
    if not chosen:
        parser.error(f"no site contains {options.sites!r}: {', '.join(map(str, sites(8)))}")
    environment = {
        "python": platform.python_version(),
        "cpu": cpu_name(),
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "kernels": kernels.describe().splitlines(),
        "repeats": options.repeats,
    }
    print(kernels.describe())
    records: list[dict[str, Any]] = []
    for site in chosen:
        found = measure(site, device, options.repeats)
        records += found
        print(table(found), flush=True)
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "activations.json"
    path.write_text(
        json.dumps({"environment": environment, "records": records}, indent=1) + "\n",
        encoding="utf-8",
    )
    plot(records, path.with_suffix(".png"))
    print(f"\n{path} and {path.with_suffix('.png')}")


if __name__ == "__main__":
    main()
