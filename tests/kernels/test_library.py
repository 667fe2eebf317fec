"""The operations under autograd, dispatch modes and function transforms."""

from __future__ import annotations

import pytest
import torch
from kernel_oracles import BIAS, WEIGHT, norm_formula, relu_formula
from polyvision.kernels import ops, selection

from polyvision import functional as F
from polyvision import kernels

BACKENDS = ["cpp", "reference"]


def leaves(*shapes, dtype=torch.float32):
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def operands(dtype=torch.float32):
    x, mul = leaves((5, 16), (5, 16), dtype=dtype)
    weight, bias = (v.clone().to(dtype).requires_grad_() for v in (WEIGHT[:3], BIAS))
    return x, weight, bias, mul


def value_and_gradients(function, *inputs):
    y = function(*inputs)
    return [y, *torch.autograd.grad(y.square().sum(), inputs)]


def assert_equal(results, others):
    assert len(results) == len(others)
    assert all(torch.equal(a, b) for a, b in zip(results, others, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck(backend, dtype):
    x, weight, bias, mul = operands(dtype)
    torch.library.opcheck(ops.norm, (x, weight, bias, 1e-6, -1, None, None, False, backend))
    rows = torch.randint(0, 2, (16,))
    weights = torch.stack([weight.detach(), -weight.detach()]).requires_grad_()
    torch.library.opcheck(ops.norm, (x, weights, None, 1e-6, 0, mul, rows, True, backend))
    torch.library.opcheck(ops.relu, (x, weight, bias, None, mul, None, backend))
    slope = torch.rand(1, requires_grad=True)
    torch.library.opcheck(ops.relu, (x[:, ::2], weight, None, slope, None, None, backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_eager_and_library_ways_agree_bit_by_bit(backend):
    x, weight, bias, mul = operands()

    def norm(x, weight, bias, mul):
        return ops.norm(x, weight, bias, 1e-6, -1, mul, None, False, backend)[0]

    def relu(x, weight, bias, mul):
        return ops.relu(x, weight, bias, None, mul, None, backend)

    with kernels.use_backend(backend):
        for eager, library in ((F.poly_norm, norm), (F.poly_relu, relu)):
            ours = value_and_gradients(
                lambda x, w, b, mul, f=eager: f(x, w, b, mul=mul), x, weight, bias, mul
            )
            assert_equal(ours, value_and_gradients(library, x, weight, bias, mul))


class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
def test_dispatch_modes_see_one_operation_and_no_copy(dtype, autocast):
    x = torch.randn(2, 8, 4, 4).to(dtype, memory_format=torch.channels_last).requires_grad_()
    weight, bias = WEIGHT[:3].clone().requires_grad_(), BIAS.clone().requires_grad_()
    with Recorder() as recorder, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = F.poly_norm(x, weight, bias, dim=1)
        z = F.poly_relu(x, weight, bias)
        torch.autograd.backward((y, z), (torch.ones_like(y), torch.ones_like(z)))
    assert y.dtype == z.dtype == x.grad.dtype == dtype
    assert weight.grad.dtype == torch.float32
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert sorted(s for s in recorder.seen if "polyvision" in s) == [
        "polyvision.poly_norm.default",
        "polyvision.poly_norm_backward.default",
        "polyvision.poly_relu.default",
        "polyvision.poly_relu_backward.default",
    ]
    assert not [s for s in recorder.seen if "clone" in s or "contiguous" in s or "copy" in s]


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_first_and_second_order(backend):
    x, mul = leaves((2, 3, 4), (2, 3, 4), dtype=torch.double)
    weight, bias = (v.double().requires_grad_() for v in (WEIGHT[:3], BIAS))
    slope = torch.tensor([0.3], dtype=torch.double, requires_grad=True)
    weights, group = leaves((4, 2), dtype=torch.double)[0], torch.tensor([[3, 0, 0], [1, 3, 1]])
    cases = [
        (lambda x, w, b, m: F.poly_norm(x, w, b, dim=1, mul=m), (x, weight, bias, mul)),
        (lambda x, w, b: F.poly_relu_norm(x, w, b), (x, weight, bias)),
        (lambda x, w, b, s, m: F.poly_relu(x, w, b, slope=s, mul=m), (x, weight, bias, slope, mul)),
        (lambda x, w, b: F.polycom(x, w, b, rho=torch.tanh, kind="II"), (x, weight, bias)),
        (lambda x, w: F.poly_norm(x, w, group=group), (x, weights)),
        (lambda x, w, m: F.poly_relu(x, w, mul=m, group=group), (x, weights, mul)),
    ]
    with kernels.use_backend(backend):
        for function, inputs in cases:
            assert torch.autograd.gradcheck(function, inputs)
            assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_statistics_are_written_for_a_backward_pass_only(backend, monkeypatch):
    module, saved = selection.load(backend), []
    forward = module.poly_norm_forward

    def record(*arguments, **options):
        y, stats = forward(*arguments, **options)
        saved.append(stats is not None)
        return y, stats

    monkeypatch.setattr(module, "poly_norm_forward", record)
    x, weight, bias, mul = operands()
    with kernels.use_backend(backend):
        trained = F.poly_norm(x, weight, bias, mul=mul)
        frozen = F.poly_norm(*(v.detach() for v in (x, weight, bias)), mul=mul.detach())
        with torch.no_grad():
            inferred = F.poly_norm(x, weight, bias, mul=mul)
        assert saved == [True, False, False]
        assert torch.equal(frozen, trained)
        assert torch.equal(inferred, trained)
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x.detach(), mul.detach())
            with pytest.raises(RuntimeError, match="jvp"):  # not silently without its tangent
                F.poly_norm(dual, weight.detach())


def test_function_transforms():
    x, weight, bias, _ = (v.detach() for v in operands(torch.double))

    def loss(weight, row):
        return F.poly_norm(row, weight, bias).square().sum()

    one = torch.stack([F.poly_norm(row, weight, bias) for row in x])
    torch.testing.assert_close(torch.vmap(lambda r: F.poly_norm(r, weight, bias))(x), one)
    per_sample = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(weight, x)
    loop = torch.stack([torch.func.grad(loss)(weight, row) for row in x])
    torch.testing.assert_close(per_sample, loop)
    reverse = torch.func.jacrev(lambda r: F.poly_relu(r, weight))(x[0])
    torch.testing.assert_close(
        reverse, torch.func.jacfwd(lambda r: relu_formula(r, weight, None))(x[0])
    )
    hessian = torch.func.hessian(loss, argnums=1)(weight, x[0])
    exact = torch.func.hessian(lambda r: norm_formula(r, weight, bias).square().sum())(x[0])
    torch.testing.assert_close(hessian, exact)
