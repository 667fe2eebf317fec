"""Gates on the compiled Triton kernels that need no GPU: spills, fp64, vector loads, signatures.

Kernels are compiled ahead of time for each chip and tile of the table. ``pytest -s`` with
``-m 'slow or not slow'`` prints the whole table of registers; the default run has a part of it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("nothing is compiled in the interpreter", allow_module_level=True)

from polyvision.kernels import triton as kernels  # noqa: E402
from polyvision.kernels.triton import norm, relu, sums  # noqa: E402
from polyvision.kernels.triton.config import Tile, norm_tile, relu_tile  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
PTXAS = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
# Sizes (features, rows abreast): short rows, one row a tile, chunks; the same over channels.
NORM_SIZES = [(64, 1), (512, 1), (4096, 1), (16384, 1), (65536, 1), (64, 3136), (512, 784)]
RELU_SIZES = [(1, 1 << 20), (64, 1), (64, 3136)]


class Case(NamedTuple):
    """One kernel, its tile, its chip and what its optional operands are."""

    kernel: str
    size: int
    inner: int
    dtype: str = "bf16"
    target: str = "sm_90"
    order: int = 3
    mul: bool = False
    group: bool = False
    rectify: bool = False

    def __str__(self) -> str:
        names = (f"{self.size}x{self.inner}", self.dtype, self.target, f"r{self.order}")
        extra = ("mul",) * self.mul + ("group",) * self.group + ("rectify",) * self.rectify
        return "-".join((self.kernel, *names, *extra))

    @property
    def tile(self) -> Tile:
        if self.kernel.startswith("relu"):
            return relu_tile(self.size, self.inner)
        itemsize = 4 if self.dtype == "fp32" else 2
        return norm_tile(self.size, self.inner, itemsize, self.order, self.mul, self.rectify)

    def arguments(self) -> dict[str, Any]:
        """Types of run-time arguments, values of compile-time ones."""
        tensor, tile = f"*{self.dtype}", self.tile
        values: dict[str, Any] = dict.fromkeys(("x", "y", "grad", "dx"), tensor)
        values |= dict.fromkeys(("mul", "dmul"), tensor if self.mul else None)
        values |= dict.fromkeys(("stats", "weight", "bias"), "*fp32")
        values |= dict.fromkeys(("outer", "size", "inner"), "i32")
        for name in ("x", "y", "grad", "dx", "mul", "dmul"):
            values[f"{name}_stride"] = "i32" if self.mul or "mul" not in name else 0
        values |= {
            "group": "*i32" if self.group else None,
            "partials": None if self.group else "*fp32",
            "row_moments": "*fp32" if self.group else None,
            "slope": "*fp32" if self.inner == 3136 else None,
            "slope_step": 1,
            "slope_partials": "*fp32" if self.inner == 3136 else None,
            "eps": "fp32",
            "ORDER": self.order,
            "RECTIFY": self.rectify,
            "STRIDED": self.inner > 1,
            "LOOPED": tile.looped,
            "BLOCK_M": tile.rows,
            "BLOCK_D": tile.features,
        }
        if self.inner == 1:
            values["inner"] = 1
        return values

    def compile(self) -> Any:
        fn = {
            "norm forward": norm.poly_norm_forward,
            "norm backward": norm.poly_norm_backward,
            "relu forward": relu.poly_relu_forward,
            "relu backward": relu.poly_relu_backward,
        }[self.kernel]
        return compile_kernel(fn, self.arguments(), self.target, self.tile.threads)


def compile_kernel(fn: Any, values: dict[str, Any], target: str, threads: int) -> Any:
    """Compile ahead of time: texts are types of run-time arguments, the rest are constants."""
    signature, constants, hints = {}, {}, {}
    for i, name in enumerate(fn.arg_names):
        value = values[name]
        if isinstance(value, str):
            signature[name] = value
            if name not in ("outer", "eps", "rows", "groups"):
                hints[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "constexpr"
            constants[name] = value
    warps = threads // TARGETS[target].warp_size
    source = ASTSource(fn, signature, constants, hints)
    return triton.compile(source, target=TARGETS[target], options={"num_warps": warps})


class Report(NamedTuple):
    """What the assembler says of one kernel."""

    registers: int
    spills: int
    shared: int
    fp64: int
    vectors: int


def report(compiled: Any, tmp_path: Path) -> Report:
    shared = compiled.metadata.shared
    if compiled.metadata.target.backend == "hip":
        text = compiled.asm["amdgcn"]
        registers = int(re.search(r"\.vgpr_count:\s+(\d+)", text)[1])
        spills = int(re.search(r"\.vgpr_spill_count:\s+(\d+)", text)[1])
        vectors = len(re.findall(r"(?:global|buffer)_load_dwordx4", text))
        return Report(registers, spills, shared, text.count("_f64"), vectors)
    text = compiled.asm["ptx"]
    (tmp_path / "kernel.ptx").write_text(text)
    arch = re.search(r"\.target (\w+)", text)[1]
    command = [PTXAS, "-v", f"-arch={arch}", tmp_path / "kernel.ptx", "-o", tmp_path / "cubin"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = int(re.search(r"Used (\d+) registers", said)[1])
    spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill", said))
    vectors = len(re.findall(r"ld\.global\S*\.v4\.b32", text))
    return Report(registers, spills, shared, text.count(".f64"), vectors)


def cases() -> Iterator[Any]:
    """The default run: every kernel and regime in bf16 on sm_90, the largest tiles elsewhere."""
    sizes = {"norm": NORM_SIZES, "relu": RELU_SIZES}
    quick = [
        Case(f"{name} {way}", *size)
        for name in sizes
        for way in ("forward", "backward")
        for size in sizes[name]
    ]
    for target in ("sm_80", "gfx942"):
        quick += [Case("norm backward", *s, target=target) for s in ((16384, 1), (512, 784))]
        quick += [Case("relu backward", *RELU_SIZES[0], target=target)]
    everything = [
        Case(f"{name} {way}", *size, dtype, target)
        for name in sizes
        for dtype in ("bf16", "fp16", "fp32")
        for target in TARGETS
        for way in ("forward", "backward")
        for size in sizes[name]
    ]
    operands = [
        Case(f"{name} {way}", *size, dtype, target, mul=True, group=group)
        for name in sizes
        for way in ("forward", "backward")
        for dtype in ("bf16", "fp32")
        for target in TARGETS
        for group in (False, True)
        for size in sizes[name]
        if not (group and size[0] == 1)  # rows with a group are never taken as one channel
    ]
    rectified = [  # backward only, which holds more
        Case("norm backward", *size, dtype, target, order, mul, rectify=True)
        for dtype in ("bf16", "fp32")
        for target in ("sm_80", "sm_90")
        for order in (3, 8)
        for mul in (False, True)
        for size in (*NORM_SIZES, (8192, 1), (128, 784))
    ]
    orders = [
        Case(f"{name} {way}", *size, dtype, order=order, mul=mul)
        for name in sizes
        for way in ("forward", "backward")
        for dtype in ("bf16", "fp32")
        for order in (4, 8)
        for mul in (False, True)
        for size in (*sizes[name], *((8192, 1), (128, 784))[: 2 * (name == "norm")])
    ]
    slow = [c for c in dict.fromkeys(everything + operands + rectified + orders) if c not in quick]
    yield from (pytest.param(c, id=str(c)) for c in quick)
    yield from (pytest.param(c, id=str(c), marks=pytest.mark.slow) for c in slow)


@pytest.fixture(scope="module")
def table() -> Iterator[list[str]]:
    lines = [f"{'kernel':<50}{'tile':>10}{'threads':>8}{'regs':>6}{'spill':>6}{'smem':>7}{'v4':>4}"]
    yield lines
    print("\n" + "\n".join(lines))


@pytest.mark.parametrize("case", list(cases()))
def test_compiled_kernel(case: Case, tmp_path: Path, table: list[str]):
    found = report(case.compile(), tmp_path)
    tile = case.tile
    table.append(
        f"{case!s:<50}{tile.rows:>5}x{tile.features:<5}{tile.threads:>7}"
        f"{found.registers:>6}{found.spills:>6}{found.shared:>7}{found.vectors:>4}"
    )
    assert found.spills == 0
    assert found.fp64 == 0
    if case.order <= 4:  # above, tiles of strided rows give a thread fewer elements
        assert found.vectors >= (1 if "forward" in case.kernel else 2)  # x, and grad


def test_rounding_and_offsets():
    text = Case("norm backward", 64, 1).compile().asm
    assert "cvt.rn.bf16x2.f32" in text["ptx"]
    assert re.search(r"arith\.muli .* : (?:i64|tensor<\d+x1xi64>)", text["ttir"])


@pytest.mark.parametrize("order", [1, 2, 4, 8])
def test_every_order_compiles(order: int, tmp_path: Path):
    found = report(Case("norm backward", 512, 1, order=order).compile(), tmp_path)
    assert (found.spills, found.fp64) == (0, 0)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("columns", [1, 4, 9])
def test_sums_of_groups(target: str, columns: int, tmp_path: Path):
    values = dict.fromkeys(("row_moments", "partials"), "*fp32") | {"group": "*i64"}
    values |= {"rows": "i32", "groups": "i32", "COUNT": columns, "BLOCK": sums._GROUP_BLOCK}
    compiled = compile_kernel(norm.sum_groups, values, target, sums._GROUP_THREADS)
    found = report(compiled, tmp_path)
    assert (found.spills, found.fp64) == (0, 0)


def test_it_says_why_it_is_not_available(monkeypatch):
    if not torch.cuda.is_available():
        assert kernels.available() == (False, "no CUDA or ROCm device is visible to torch")
    kernels.available.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert kernels.available() == (False, "the package 'triton' is not installed")
    monkeypatch.undo()
    kernels.available.cache_clear()


def test_import_does_not_need_triton():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import polyvision.kernels.triton as kernels, torch\n"
        "assert kernels.poly_norm_forward(torch.empty(0, 3), torch.ones(3), None, 1e-6, -1)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
