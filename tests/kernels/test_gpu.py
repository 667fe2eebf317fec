"""What only a GPU can show: CUDA graphs, autocast on CUDA, launches beside the current device."""

from __future__ import annotations

import pytest
import torch
from kernel_oracles import BIAS, WEIGHT

from polyvision import functional as F

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def norm_of_rows(x, weight, bias):
    return F.poly_norm(x, weight, bias)


def norm_of_channels(x, weight, bias):
    return F.poly_norm(x, weight, bias, dim=1)


FUNCTIONS = [norm_of_rows, norm_of_channels, F.poly_relu]


def operands(dtype, device="cuda"):
    x = torch.randn(4, 64, 8, 16, device=device).to(dtype).requires_grad_()
    return x, *(v.to(device).requires_grad_() for v in (WEIGHT[:3], BIAS))


def value_and_gradients(function, inputs, grad):
    y = function(*inputs)
    return [y.detach(), *torch.autograd.grad(y, inputs, grad)]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_cuda_graph(function):
    inputs = operands(torch.bfloat16)
    grad = torch.randn_like(inputs[0])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles, and fills the allocator
        for _ in range(3):
            value_and_gradients(function, inputs, grad)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = value_and_gradients(function, inputs, grad)
    for _ in range(2):
        with torch.no_grad():
            inputs[0].normal_()
            grad.normal_()
        graph.replay()
        exact = value_and_gradients(function, inputs, grad)
        assert all(torch.equal(a, b) for a, b in zip(results, exact, strict=True))


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_autocast_makes_no_copy_of_the_input(function, dtype):
    inputs = operands(dtype)
    plain = function(*inputs)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.autocast("cuda", torch.float16):
        y = function(*inputs)
    assert y.dtype == dtype
    assert torch.equal(y, plain)
    # The result and a few numbers a row, each block rounded up; a cast copy would be as large as x.
    size = y.numel() * y.element_size()
    assert torch.cuda.max_memory_allocated() - before < 1.5 * size


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_device_of_the_input_computes(function):
    first = [v.detach() for v in operands(torch.float32)]
    second = [v.to("cuda:1") for v in first]
    with torch.cuda.device(0):
        assert torch.equal(function(*second).to("cuda:0"), function(*first))
