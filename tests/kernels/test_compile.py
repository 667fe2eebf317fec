"""The operations under ``torch.compile``: one graph, no recompiling per row count, real code."""

from __future__ import annotations

import pytest
import torch
from kernel_oracles import BIAS, WEIGHT
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code

from polyvision import PolyNorm, kernels
from polyvision import functional as F


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


def operands(rows=5, dtype=torch.float32):
    x = torch.randn(rows, 16, dtype=dtype, requires_grad=True)
    return x, *(v.clone().requires_grad_() for v in (WEIGHT[:3], BIAS))


def value_and_gradients(function, *inputs):
    y = function(*inputs)
    return [y, *torch.autograd.grad(y.float().square().sum(), inputs)]


def assert_equal(results, others):
    assert all(torch.equal(a, b) for a, b in zip(results, others, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("function", [F.poly_norm, F.poly_relu_norm, F.poly_relu])
def test_one_graph_serves_every_number_of_rows(function, dtype):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    for rows in (5, 3, 7, 64, 2):  # the first number is taken as fixed, the second is not
        inputs = operands(rows, dtype)
        assert_equal(value_and_gradients(compiled, *inputs), value_and_gradients(function, *inputs))
    assert counter.frame_count == 2


def test_inductor_generates_code_around_the_operation():
    """The layers before and after become C++; the activation stays one call between them."""
    layers = torch.nn.Linear(8, 16), PolyNorm()

    def network(x):
        return layers[1](layers[0](x).sin()).sigmoid()

    parameters = [p for layer in layers for p in layer.parameters()]
    compiled = torch.compile(network, fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        _, code = run_and_get_code(lambda: compiled(torch.ones(5, 8)))
        assert "polyvision.poly_norm.default" in code[0]
        assert "cpp_fused" in code[0]
        for rows in (5, 3, 64):
            x = torch.randn(rows, 8)
            found, exact = (
                [y.detach(), *torch.autograd.grad(y.square().sum(), parameters)]
                for y in (compiled(x), network(x))
            )
            torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_inductor_fuses_the_formula_where_there_is_no_kernel():
    inputs = operands()
    with kernels.use_backend("reference"):
        for function in (F.poly_norm, F.poly_relu_norm, F.poly_relu):
            compiled = torch.compile(function, fullgraph=True)
            _, code = run_and_get_code(lambda f=compiled: f(*inputs))
            assert "cpp_fused" in code[0]
            assert "polyvision.poly" not in code[0]
            found = value_and_gradients(compiled, *inputs)
            exact = value_and_gradients(function, *inputs)
            torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)


def test_the_formula_is_compiled_where_there_is_no_kernel():
    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return graph

    with kernels.use_backend("reference"):
        torch.compile(F.poly_norm, fullgraph=True, backend=keep)(*operands())
    assert "rsqrt" in graphs[0].code
    assert "polyvision" not in graphs[0].code


def test_transforms_inside_compiled_code():
    """vmap, and gradients of each sample: of plain operations, with no rule of ours for vmap."""
    x, weight, bias = (v.detach() for v in operands())

    def loss(weight, row):
        return F.poly_norm(row, weight, bias).sum() + F.poly_relu(row, weight, bias).sum()

    per_sample = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))
    compiled = torch.compile(per_sample, fullgraph=True, backend="eager")
    assert torch.equal(compiled(weight, x), per_sample(weight, x))
    loop = torch.stack([torch.func.grad(loss)(weight, row) for row in x])
    torch.testing.assert_close(compiled(weight, x), loop)
