"""Launches with a compiler but no GPU: what Triton makes of arguments, and when it compiles.

The file runs itself in a process of its own, where a made-up driver names the chip and launching
stops after compiling.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)


@pytest.mark.parametrize(
    "layout",
    ["rows", *(pytest.param(n, marks=pytest.mark.slow) for n in ("chunks", "channels", "groups"))],
)
def test_one_compile_serves_every_number_of_rows(layout):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, __file__, layout]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    compiled, hints = json.loads(run.stdout)
    assert compiled == {
        "poly_norm_forward": 1,
        "poly_norm_backward": 1,
        "poly_relu_forward": 1,
        "poly_relu_backward": 1,
        "sum_groups": int(layout == "groups"),
    }
    # Pointers, sizes and strides are known to be multiples of 16: that makes loads wide.
    assert all(h.count("D") >= 7 for name, h in hints.items() if name != "sum_groups"), hints


def main(layout: str) -> None:
    import torch
    from polyvision.kernels import triton as kernels
    from polyvision.kernels.triton import norm, relu
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    class Driver:
        def get_current_device(self):
            return 0

        def get_current_stream(self, device=None):
            return 0

        def get_current_target(self):
            return GPUTarget("cuda", 90, 32)

    def compile_only(kernel, grid):
        return lambda *arguments, **options: kernel.warmup(*arguments, grid=grid, **options)

    driver.set_active(Driver())
    JITFunction.__getitem__ = compile_only
    weight, bias = torch.ones(3), torch.ones(1)

    def run(x, dim, weight=weight, bias=bias, slope=None, group=None):
        _, stats = kernels.poly_norm_forward(x, weight, bias, 1e-6, dim, None, group)
        kernels.poly_norm_backward(x, x, stats, weight, bias, 1e-6, dim, None, group)
        kernels.poly_relu_forward(x, weight, bias, slope, None, group)
        kernels.poly_relu_backward(x, x, weight, bias, slope, None, group)

    for rows in (1, 2, 3, 16, 17, 33, 64, 1000):
        if layout == "channels":
            run(torch.zeros(rows, 64, 4, 4, dtype=torch.bfloat16), 1, slope=torch.ones(64))
            continue
        size = 32768 if layout == "chunks" else 64
        x = torch.zeros(rows, size, dtype=torch.bfloat16)
        if layout == "groups":
            group = torch.zeros(rows, dtype=torch.int64)
            run(x, -1, torch.ones(5, 3), torch.ones(5, 1), group=group)
        else:
            run(x, -1)
    launched = (norm.poly_norm_forward, norm.poly_norm_backward, norm.sum_groups)
    launched += (relu.poly_relu_forward, relu.poly_relu_backward)
    caches = {kernel.__name__: kernel.device_caches[0][0] for kernel in launched}
    hints = {name: str(next(iter(cache), "")) for name, cache in caches.items()}
    print(json.dumps([{name: len(cache) for name, cache in caches.items()}, hints]))


if __name__ == "__main__":
    main(sys.argv[1])
