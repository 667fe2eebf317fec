"""The functions inside larger programs: residuals, autocast, checkpoints, threads, copies."""

from __future__ import annotations

import copy
import io
import pickle
import threading

import pytest
import timm
import torch
from kernel_oracles import BIAS, WEIGHT, norm_formula
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from polyvision import PolyCom, PolyNorm, PolyNorm2d, PolyPReLU, kernels
from polyvision import functional as F


def saved_bytes(function, *inputs):
    """Return the bytes that autograd keeps for the backward pass, each memory once."""
    kept = {}

    def keep(tensor):
        kept[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = function(*inputs)
    assert result.requires_grad
    return sum(kept.values())


@pytest.mark.parametrize("backend", ["cpp", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_keeps_x_and_twelve_bytes_a_row(backend, dtype):
    x = torch.randn(40, 64, dtype=dtype, requires_grad=True)
    module = PolyNorm()
    coefficients = 4 * 4
    with kernels.use_backend(backend), torch.autocast("cpu", torch.bfloat16):
        y = module(x)
        assert y.dtype == dtype
        size = x.numel() * x.element_size()
        assert saved_bytes(module, x) == size + 12 * 40 + coefficients
        assert saved_bytes(lambda x: F.poly_relu(x, module.weight, module.bias), x) == (
            size + coefficients
        )


def test_residual_gradient_and_the_given_gradient_stay_whole():
    x = torch.randn(6, 32, requires_grad=True)
    grad = torch.randn(6, 32)
    kept, module = grad.clone(), PolyNorm()
    (module(x) + x).backward(grad)
    exact = x.detach().double().requires_grad_()
    weight, bias = (v.detach().double() for v in module.parameters())
    (norm_formula(exact, weight, bias) + exact).backward(grad.double())
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=1e-5, atol=1e-6)
    assert torch.equal(grad, kept)


def test_backward_twice_gives_the_same():
    x = torch.randn(6, 32, requires_grad=True)
    y = PolyNorm()(x)
    first, second = (torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_expanded_and_strided_gradients():
    x = torch.randn(6, 32, requires_grad=True)
    weight = WEIGHT[:3].requires_grad_()
    for grad in (torch.ones(()).expand(6, 32), torch.randn(32, 6).T, torch.randn(6, 64)[:, ::2]):
        for function in (F.poly_norm, F.poly_relu):
            y = function(x, weight)
            strided = torch.autograd.grad(y, (x, weight), grad, retain_graph=True)
            dense = torch.autograd.grad(y, (x, weight), grad.contiguous())
            for a, b in zip(strided, dense, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "frozen", [["x"], ["weight", "bias"], ["x", "weight"], ["bias"]], ids="-".join
)
def test_frozen_inputs(frozen):
    inputs = {"x": torch.randn(6, 32), "weight": WEIGHT[:3].clone(), "bias": BIAS.clone()}
    for function in (F.poly_norm, F.poly_relu):
        full = {k: v.clone().requires_grad_() for k, v in inputs.items()}
        function(**full).sum().backward()
        some = {k: v.clone().requires_grad_(k not in frozen) for k, v in inputs.items()}
        function(**some).sum().backward()
        for name, value in some.items():
            assert (value.grad is None) == (name in frozen)
            assert value.grad is None or torch.equal(value.grad, full[name].grad)


def test_one_module_used_twice():
    module, x = PolyNorm(), torch.randn(6, 32)
    module(module(x)).sum().backward()
    twice = module.weight.grad.clone()
    copies = [copy.deepcopy(module) for _ in range(2)]
    for duplicate in copies:
        duplicate.zero_grad()
    copies[1](copies[0](x)).sum().backward()
    torch.testing.assert_close(twice, copies[0].weight.grad + copies[1].weight.grad)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_under_autocast(reentrant):
    module = torch.nn.Sequential(torch.nn.Linear(8, 16), PolyNorm(), torch.nn.Linear(16, 4))
    x = torch.randn(5, 8, requires_grad=True)
    gradients = []
    for run in (module, lambda x: checkpoint(module, x, use_reentrant=reentrant)):
        module.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            run(x).float().square().sum().backward()
        gradients.append([p.grad.clone() for p in module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("make", [PolyNorm, PolyNorm2d, PolyPReLU, PolyCom])
def test_copies_and_files(make):
    module, x = make(order=2), torch.randn(2, 4, 3, 3)
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    buffer.seek(0)
    loaded = make(order=2)
    loaded.load_state_dict(torch.load(buffer, weights_only=True))
    average = torch.optim.swa_utils.AveragedModel(module)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), loaded, average):
        assert torch.equal(other(x), module(x))


@pytest.mark.parametrize("foreach", [False, True])
def test_moving_average_of_timm(foreach):
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), PolyNorm())
    average = timm.utils.ModelEmaV3(module, decay=0.75, foreach=foreach)
    expected = [p.detach().clone() for p in module.parameters()]
    for _ in range(3):
        with torch.no_grad():
            for p in module.parameters():
                p.add_(torch.randn_like(p))
        average.update(module)
        expected = [0.75 * e + 0.25 * p for e, p in zip(expected, module.parameters(), strict=True)]
    torch.testing.assert_close(list(average.module.parameters()), expected)
    assert average.module[1].weight.unique().numel() == 3


@pytest.mark.parametrize("make", [PolyNorm, PolyNorm2d, PolyPReLU, PolyCom])
def test_meta_device_then_real_values(make):
    with torch.device("meta"):
        module = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), make())
        assert module(torch.empty(2, 3, 5, 5)).shape == (2, 4, 5, 5)
    module.to_empty(device="cpu")
    for part in module.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    fresh = make()
    for name, value in module[1].state_dict().items():
        assert torch.equal(value, fresh.state_dict()[name])


@pytest.mark.parametrize("backend", ["cpp", "reference"])
def test_threads_of_the_user(backend):
    xs = [torch.randn(50, 300) for _ in range(4)]
    module, results = PolyNorm(), {}

    def gradients(x):
        x = x.clone().requires_grad_()
        y = module(x)
        return [y.detach(), *torch.autograd.grad(y.square().sum(), (x, *module.parameters()))]

    def work(i):
        results[i] = [gradients(xs[i]) for _ in range(10)]

    with kernels.use_backend(backend):
        expected = [gradients(x) for x in xs]
        workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    for i, exact in enumerate(expected):
        assert len(results[i]) == 10
        for found in results[i]:
            assert all(torch.equal(a, b) for a, b in zip(found, exact, strict=True))


@pytest.mark.parametrize("rho", ["relu", "silu", "polyprelu"])
@pytest.mark.parametrize("kind", ["I", "II"])
def test_polycom_keeps_its_input_only(rho, kind):
    module, x = PolyCom(rho=rho, kind=kind), torch.randn(6, 32, requires_grad=True)
    parameters = list(module.parameters())
    small = sum(p.numel() for p in parameters) * 4
    assert saved_bytes(module, x) == x.numel() * 4 + small
    base = module.rho(x)
    y = sum(
        a * (base**i if kind == "I" else module.rho(x**i)) for i, a in enumerate(module.weight, 1)
    )
    exact = torch.autograd.grad((y + module.bias).square().sum(), (x, *parameters))
    ours = torch.autograd.grad(module(x).square().sum(), (x, *parameters))
    for a, b in zip(ours, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "activation", [PolyNorm(), torch.nn.GELU(), torch.relu], ids=["polynorm", "gelu", "relu"]
)
def test_ffn_down_keeps_the_pre_activation_only(activation):
    h, weight, bias = torch.randn(4, 5, 16), torch.randn(3, 16), torch.randn(3)
    parameters = list(activation.parameters()) if isinstance(activation, torch.nn.Module) else []
    inputs = [v.requires_grad_() for v in (h, weight, bias)] + parameters

    def down(h):
        return F.ffn_down(h, weight, activation, bias)

    kept = saved_bytes(down, h)
    assert kept == 4 * sum(v.numel() for v in inputs)
    plain = linear(activation(h), weight, bias)
    assert torch.equal(down(h), plain)
    exact = torch.autograd.grad(plain.square().sum(), inputs)
    for a, b in zip(torch.autograd.grad(down(h).square().sum(), inputs), exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)


def test_ffn_down_of_a_gate_under_autocast():
    gate, up, weight = (torch.randn(n, 16, requires_grad=True) for n in (5, 5, 3))

    def act(gate, up):
        return torch.nn.functional.silu(gate) * up

    with torch.autocast("cpu", torch.bfloat16):
        ours = F.ffn_down((gate, up), weight, act)
        plain = linear(act(gate, up), weight)
    assert torch.equal(ours, plain)
    inputs = (gate, up, weight)
    found = torch.autograd.grad(ours.float().sum(), inputs)
    for a, b in zip(found, torch.autograd.grad(plain.float().sum(), inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)
        assert a.dtype == torch.float32


def test_ffn_down_differentiates_twice():
    inputs = [
        torch.randn(s, dtype=torch.double, requires_grad=True) for s in ((2, 4), (3, 4), (3,))
    ]
    act = PolyNorm(dtype=torch.double)
    assert torch.autograd.gradgradcheck(lambda h, w, b: F.ffn_down(h, w, act, b), inputs)


@pytest.mark.parametrize("scale", [1.0, 1e6, 1e15])
def test_split_form_equals_the_whole(scale):
    x = (torch.randn(5, 64) * scale).requires_grad_()
    weight, bias = WEIGHT[:3].clone().requires_grad_(), BIAS.clone().requires_grad_()
    stats = sum(F.poly_norm_stats(part, 3) for part in x.split(16, -1))
    parts = [F.poly_norm_apply(p, stats, weight, bias, n=64) for p in x.split(16, -1)]
    y, whole = torch.cat(parts, -1), F.poly_norm(x, weight, bias)
    grad = torch.randn(5, 64)
    torch.testing.assert_close(y, whole, rtol=1e-5, atol=1e-6)
    found = torch.autograd.grad(y, (x, weight, bias), grad)
    exact = torch.autograd.grad(whole, (x, weight, bias), grad)
    torch.testing.assert_close(found[0] * scale, exact[0] * scale, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[1:], exact[1:], rtol=1e-4, atol=1e-4)
