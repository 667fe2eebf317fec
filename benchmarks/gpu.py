"""Correctness and speed of the fused kernels on one GPU, in under four minutes.

From a checkout, with torch and triton installed::

    pip install -e . --no-deps --no-build-isolation
    python benchmarks/gpu.py [--json FILE] [--seconds 200]

Speed is given as a share of what ``torch.clone`` moves per second for the same number of bytes: a
forward pass must read x and write y, a backward pass read x and dy and write dx (with the gated
form also the factor and its gradient). Beside it stand ``torch.compile`` of the fp32 formula, the
plain algorithm of the paper in the dtype of x, and Liger-Kernel where it is installed: their time
over ours.
Exit code 1: a result is wrong; 2: there is no GPU.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

try:
    from polyvision.kernels import reference

    from polyvision import kernels
except ModuleNotFoundError as error:
    sys.exit(f"{error}; first: pip install -e . --no-deps --no-build-isolation")

EPS = 1e-6
BF16 = torch.bfloat16
# Relative root mean square error against float64 on the same rounded inputs.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2.3e-4, BF16: 1.8e-3}
MEMORY_FORMATS = {"rows": None, "NCHW": torch.contiguous_format, "NHWC": torch.channels_last}


class Site(NamedTuple):
    """One input: shape, memory format, aims in % of clone (0: none), and the kernel."""

    shape: tuple[int, ...]
    layout: str = "rows"
    forward: int = 95
    backward: int = 88
    kernel: str = "norm"

    @property
    def dim(self) -> int:
        """The feature dimension."""
        return -1 if self.layout == "rows" else 1

    def __str__(self) -> str:
        return f"{self.kernel} {'x'.join(map(str, self.shape))} {self.layout}"


SITES = [
    Site((8192, 2048)),
    Site((8192, 4096)),
    Site((16384, 4096)),
    Site((32768, 2048)),
    Site((8192, 8192)),
    Site((8192, 16384)),
    Site((8192, 13824)),
    Site((4096, 65536), "rows", 85, 0),
    Site((256, 64, 56, 56), "NHWC", 85, 85),
    Site((256, 128, 28, 28), "NHWC", 85, 85),
    Site((256, 512, 14, 14), "NHWC", 85, 85),
    Site((256, 64, 56, 56), "NCHW", 0, 0),
    Site((256, 256, 28, 28), "NCHW", 0, 0),
    Site((256, 2048, 7, 7), "NCHW", 0, 0),
    Site((8192, 8192), kernel="norm mul"),
    Site((8192, 8192), kernel="relu"),
    Site((256, 64, 56, 56), "NHWC", kernel="relu"),
]


def plain(kernel: str, x: Tensor, w: Tensor, b: Tensor, m: Tensor | None, dim: int) -> Tensor:
    """The algorithms of the paper, in the dtype of x."""
    base = x.relu() if kernel == "relu" else x
    y = b.to(x.dtype)
    for i, a in enumerate(w.to(x.dtype), 1):
        power = base**i
        if kernel != "relu":
            power = power * torch.rsqrt(power.square().mean(dim, keepdim=True) + EPS)
        y = y + a * power
    return y if m is None else y * m


def tensors(site: Site, dtype: torch.dtype, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return x and dy."""
    pair = [torch.randn(site.shape, device="cuda").mul_(scale).to(dtype) for _ in range(2)]
    memory_format = MEMORY_FORMATS[site.layout]
    if memory_format is not None:
        pair = [t.to(memory_format=memory_format) for t in pair]
    return pair[0], pair[1]


def coefficients() -> tuple[Tensor, Tensor]:
    """Return distinct weights and a bias."""
    weight = torch.tensor([0.7, -1.3, 0.45], device="cuda", requires_grad=True)
    return weight, torch.tensor([0.3], device="cuda", requires_grad=True)


def wrong(case: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor) -> float:
    """Return the largest error of y and the gradients in units of its tolerance: 1 is right."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    exact = [t.detach().double().requires_grad_() for t in inputs]
    y, want = case(kernels, *leaves), case(reference, *exact)
    got = [y, *torch.autograd.grad(y, leaves, grad)]
    wanted = [want, *torch.autograd.grad(want, exact, grad.double())]
    worst = 0.0
    for value, target in zip((t.detach() for t in got), (t.detach() for t in wanted), strict=True):
        size, limit = target.square().mean().sqrt(), TOLERANCE[value.dtype]
        if value.numel() < 1000:  # sums over all rows cancel: compare with the size of their terms
            size, limit = grad.double().abs().sum() * want.detach().abs().max(), 1e-6
        error = (value.double() - target).square().mean().sqrt() / size / limit
        worst = max(worst, float(error.nan_to_num(torch.inf)))
    return worst


def checks() -> Iterator[tuple[str, float]]:
    """Yield every case and its error, as ``wrong`` measures it."""
    sites = [Site((33, n)) for n in (64, 123, 512, 1000, 4096, 8256, 13824, 65536)]
    sites += [Site((3, c, 9, 7), layout) for layout in ("NCHW", "NHWC") for c in (64, 100, 600)]
    for dtype in TOLERANCE:
        for site in sites:
            (x, grad), dim = tensors(site, dtype, 2.0), site.dim
            mul, (weight, bias) = torch.randn_like(x), coefficients()
            for name, case, inputs in (
                ("norm", lambda f, x, w, b, d=dim: f.poly_norm(x, w, b, EPS, d), []),
                ("norm mul", lambda f, x, w, b, m, d=dim: f.poly_norm(x, w, b, EPS, d, m), [mul]),
                ("relu", lambda f, x, w, b: f.poly_relu(x, w, b), []),
                ("relu mul", lambda f, x, w, b, m: f.poly_relu(x, w, b, None, m), [mul]),
            ):
                error = wrong(case, [x, weight, bias, *inputs], grad)
                yield f"{name} {site.shape} {site.layout} {dtype}", error
    for scale in (1e-30, 1e5, 1e6, 1e30):
        for size in (512, 4096, 65536):
            x, grad = tensors(Site((5, size)), torch.float32, scale)
            inputs = [x, *coefficients()]
            error = wrong(lambda f, x, w, b: f.poly_norm(x, w, b, EPS, -1), inputs, grad)
            yield f"norm 5x{size} at {scale:g}", error
    weight, group = torch.randn(9, 3, device="cuda"), torch.randint(9, (1000,), device="cuda")
    x, grad = tensors(Site((1000, 512)), BF16)
    error = wrong(lambda f, x, w: f.poly_norm(x, w, None, EPS, -1, None, group), [x, weight], grad)
    yield "norm by group", error
    error = wrong(lambda f, x, w: f.poly_relu(x, w, None, None, None, group), [x, weight], grad)
    yield "relu by group", error
    x, grad = tensors(Site((4, 64, 9, 7), "NCHW"), torch.float32)
    inputs = [x, *coefficients(), torch.rand(64, device="cuda")]
    yield "slopes per channel", wrong(lambda f, x, w, b, s: f.poly_relu(x, w, b, s), inputs, grad)


def contenders(site: Site) -> dict[str, Callable[..., Tensor]]:
    """Return the ways to compute the same that are compared."""
    kernel, dim = site.kernel, site.dim

    def ours(x: Tensor, w: Tensor, b: Tensor, m: Tensor | None = None) -> Tensor:
        if kernel == "relu":
            return kernels.poly_relu(x, w, b)
        return kernels.poly_norm(x, w, b, EPS, dim, m)

    def compiled(x: Tensor, w: Tensor, b: Tensor, m: Tensor | None = None) -> Tensor:
        m = None if m is None else m.float()
        return plain(kernel, x.float(), w, b, m, dim).to(x.dtype)

    def paper(x: Tensor, w: Tensor, b: Tensor, m: Tensor | None = None) -> Tensor:
        return plain(kernel, x, w, b, m, dim)

    found: dict[str, Callable[..., Tensor]]
    found = {"ours": ours, "compile": torch.compile(compiled, dynamic=False), "plain": paper}
    if importlib.util.find_spec("liger_kernel") is not None and (kernel, dim) == ("norm", -1):
        from liger_kernel.ops.poly_norm import LigerPolyNormFunction

        def liger(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
            y: Tensor = LigerPolyNormFunction.apply(x, w.flip(0), b, EPS, False)
            return y

        found["liger"] = liger
    return found


def milliseconds(call: Callable[[], Any]) -> float:
    """Return the median time of a call on the GPU, with a cold cache."""
    from triton.testing import do_bench

    return float(do_bench(call, warmup=10, rep=60, return_mode="median"))


def speed(site: Site, deadline: float) -> dict[str, Any]:
    """Time the forward and backward of every contender on one input, in bf16."""
    x, grad = tensors(site, BF16)
    inputs: tuple[Tensor, ...] = (x.requires_grad_(), *coefficients())
    forward_passes, backward_passes = 2, 3  # over memory
    if site.kernel == "norm mul":
        inputs += (torch.randn_like(x).requires_grad_(),)
        forward_passes, backward_passes = 3, 5
    size = x.numel() * x.element_size()
    clone = milliseconds(torch.empty(size, dtype=torch.int8, device="cuda").clone) / 2
    result: dict[str, Any] = {"site": str(site), "clone_TB_s": size / clone / 1e9}
    for name, fn in contenders(site).items():
        if name != "ours" and time.monotonic() > deadline:
            continue
        y = fn(*inputs)
        result[name] = {
            "forward_ms": milliseconds(functools.partial(fn, *inputs)),
            "backward_ms": milliseconds(
                functools.partial(torch.autograd.grad, y, inputs, grad, retain_graph=True)
            ),
        }
    result["forward_share"] = forward_passes * clone / result["ours"]["forward_ms"]
    result["backward_share"] = backward_passes * clone / result["ours"]["backward_ms"]
    return result


def host_time(fn: Callable[[Tensor], Tensor], inputs: tuple[Tensor, ...]) -> float:
    """Return the microseconds that the host needs for a forward and backward pass."""
    grad = torch.ones_like(inputs[0])
    times = []
    for _ in range(7):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(100):
            torch.autograd.grad(fn(inputs[0]), inputs, grad)
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e4


def line(result: dict[str, Any], site: Site) -> str:
    """Return a row of the table."""
    cells = [f"{result['site']:<28}{result['clone_TB_s']:>6.2f}"]
    for way, target in (("forward", site.forward), ("backward", site.backward)):
        share = 100 * result[f"{way}_share"]
        mark = "" if not target else " ok" if share >= target else f" <{target}"
        cells.append(f"{result['ours'][f'{way}_ms'] * 1e3:>9.1f} us {share:>4.0f} %{mark:<4}")
        for other in ("compile", "plain", "liger"):
            times = result.get(other)
            ratio = f"{times[f'{way}_ms'] / result['ours'][f'{way}_ms']:.2f}x" if times else "-"
            cells.append(f"{ratio:>8}")
    return "".join(cells)


def main() -> int:
    """Check, measure, print; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="also write the results to this file")
    parser.add_argument("--seconds", type=float, default=200, help="skip peers after this time")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks/gpu.py measures GPUs, and torch sees none here", file=sys.stderr)
        return 2
    start = time.monotonic()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")

    errors = dict(checks())
    # The tolerance is that of evenly spread roundings; a few large values round less evenly.
    bad = {name: error for name, error in errors.items() if error > 1.25}
    print(f"correctness: {len(errors) - len(bad)} of {len(errors)} cases within tolerance")
    for name, error in bad.items():
        print(f"  WRONG {name}: {error:.3g} times the tolerance")

    peers = "".join(f"{name:>8}" for name in ("compile", "plain", "liger"))
    print(f"\n{'bf16':<28}{'TB/s':>6}{'forward, of clone':>22}{peers}", end="")
    print(f"{'backward, of clone':>22}{peers}")
    results = []
    for site in SITES:
        results.append(speed(site, start + options.seconds))
        print(line(results[-1], site), flush=True)

    x = torch.randn(64, 256, device="cuda", dtype=BF16, requires_grad=True)
    weight, bias = coefficients()
    host = {
        "relu": host_time(torch.relu, (x,)),
        "poly_relu": host_time(lambda x: kernels.poly_relu(x, weight, bias), (x, weight, bias)),
        "poly_norm": host_time(lambda x: kernels.poly_norm(x, weight, bias), (x, weight, bias)),
    }
    times = ", ".join(f"{name} {microseconds:.0f} us" for name, microseconds in host.items())
    print(f"\nhost time of forward + backward of 64x256: {times}")
    print(f"{time.monotonic() - start:.0f} s in all")
    if options.json:
        report = {"errors": errors, "speed": results, "host_us": host}
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=2)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
