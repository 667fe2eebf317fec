"""Numerics of the Triton kernels in Triton's interpreter, against float64 formulas.

``test_triton_numerics.py`` runs this file in a process of its own, since the interpreter must be
switched on before Triton is imported. To run it directly:
``TRITON_INTERPRET=1 pytest tests/kernels/interpreter_cases.py``.
"""

from __future__ import annotations

import pytest
import torch
from polyvision.kernels import ops, use_backend
from polyvision.kernels import triton as kernels
from polyvision.kernels.triton import config, launch
from triton_oracles import (
    BF16,
    BIAS,
    FP16,
    FP32,
    WEIGHT,
    assert_stored,
    check_norm,
    check_relu,
    guarded,
    norm_formula,
)

from polyvision import functional as F


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    monkeypatch.setattr(config, "_PROGRAMS_PER_SM", 3)


def grid():
    """Rows and features: one row a tile, several, parts of a tile, chunks; the large ones slow."""
    quick = [(33, 1), (33, 2), (3, 7), (33, 64), (1, 123), (5, 257), (3, 512), (3, 1000), (1, 4100)]
    sizes = (1, 2, 7, 64, 123, 512, 1000, 3072, 4096, 8256, 13824, 65536)
    full = [(n, size) for size in sizes for n in (1, 3, 33, 1000) if n * size < 1 << 18]
    return quick + [pytest.param(*c, marks=pytest.mark.slow) for c in full if c not in quick]


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=str)
@pytest.mark.parametrize(("rows", "size"), grid())
def test_norm_of_rows(rows, size, dtype):
    check_norm(guarded((rows, size), dtype, 2), WEIGHT[:3], mul=guarded((rows, size), dtype))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=str)
@pytest.mark.parametrize(("rows", "size"), grid())
@pytest.mark.parametrize("rectify", [False, True])
def test_norm_of_rows_of_order_eight(rows, size, dtype, rectify):
    check_norm(guarded((rows, size), dtype, 2), WEIGHT, None, rectify=rectify)


@pytest.mark.parametrize("order", range(1, 9))
@pytest.mark.parametrize("bias", [None, BIAS], ids=["plain", "bias"])
def test_norm_of_every_order(order, bias):
    check_norm(guarded((5, 48), FP32, 1.5), WEIGHT[:order], bias)


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(config, "_LONGEST", 32)
    monkeypatch.setattr(config, "_CHUNK", 32)
    monkeypatch.setattr(config, "_STRIDED_LONGEST", 8)
    monkeypatch.setattr(config, "_STRIDED_CHUNK", 8)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    "size", [33, 129, *(pytest.param(n, marks=pytest.mark.slow) for n in (64, 95))]
)
@pytest.mark.parametrize("rectify", [False, True])
def test_norm_of_rows_in_chunks(size, rectify):
    x = guarded((3, size), FP32)
    x[0, size // 2 :] *= 1e4  # the scale grows on the way
    check_norm(x, WEIGHT[:3], mul=guarded((3, size), FP32), rectify=rectify)
    check_norm(guarded((2, size), BF16, 3), WEIGHT[:8], None)


@pytest.mark.parametrize("shape", [(2, 5, 7, 3), (1, 64, 5, 5), (2, 23, 40)])
def test_norm_over_channels(shape):
    x, mul = guarded(shape, BF16, 2), guarded(shape, BF16)
    check_norm(x, WEIGHT[:3], mul=mul, dim=1)
    check_norm(x, WEIGHT[:3], dim=1, rectify=True)


@pytest.mark.usefixtures("small_tiles")
def test_norm_over_channels_in_chunks(monkeypatch):
    monkeypatch.setattr(config, "STRIDED_ROWS", 4)
    check_norm(guarded((2, 23, 3, 3), FP32, 2), WEIGHT[:3], mul=torch.randn(2, 23, 3, 3), dim=1)


LAYOUTS = {
    "channels_last": (lambda t: t.to(memory_format=torch.channels_last), (2, 6, 5, 3), 1),
    "transposed": (lambda t: t.transpose(0, 1), (4, 5, 12), -1),
    "feature first": (lambda t: t.transpose(0, 2), (12, 3, 4), -1),
    "half": (lambda t: t.chunk(2, -1)[1], (3, 4, 24), -1),
    "half of the channels": (lambda t: t.chunk(2, 1)[0], (3, 8, 5, 2), 1),
    "every other": (lambda t: t[..., ::2], (3, 4, 10), -1),
    "expanded": (lambda t: t[:1].expand(4, 5, 6), (1, 5, 6), -1),
    "size one": (lambda t: t[:, :1], (3, 5, 6), 1),
    "alone": (lambda t: t[0, 0], (2, 2, 9), 0),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name):
    view, shape, dim = LAYOUTS[name]
    x, mul, grad = (view(guarded(shape, FP32)) for _ in range(3))
    check_norm(x, WEIGHT[:3], mul=mul, dim=dim, grad=grad)
    check_norm(x, WEIGHT[:3], mul=mul.contiguous(), dim=dim, grad=torch.randn(x.shape))
    check_norm(x.contiguous(), WEIGHT[:3], mul=mul, dim=dim, grad=grad)
    check_relu(x, WEIGHT[:3], mul=mul, grad=grad)
    check_relu(x.contiguous(), WEIGHT[:3], mul=mul, grad=grad)


def test_expanded_gradient():
    x = guarded((4, 20), FP32)
    check_norm(x, WEIGHT[:3], grad=torch.ones(()).expand(4, 20))


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 0.1, 1e5, 1e6, 1e12, 1e30])
def test_norm_of_every_scale(scale):
    check_norm(guarded((4, 123), FP32, scale), WEIGHT[:3], grad=torch.randn(4, 123) * scale)


def test_norm_of_special_rows():
    x = torch.zeros(5, 96)
    x[1, 7] = 3e4  # one-hot
    x[2] = 12.5  # constant
    x[3] = torch.finfo(FP32).max
    x[4, ::2] = 1e-20
    check_norm(x, WEIGHT[:3])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, in the interpreter
@pytest.mark.parametrize("rectify", [False, True])
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_norm_of_rows_that_are_not_finite(value, rectify):
    x = torch.randn(3, 40)
    x[1, 4] = value
    y, stats = kernels.poly_norm_forward(x, WEIGHT[:3], BIAS, 1e-6, -1, None, None, rectify)
    want = norm_formula(x.double(), WEIGHT[:3], BIAS, rectify=rectify)
    torch.testing.assert_close(y.double(), want, equal_nan=True, rtol=1e-5, atol=1e-5)
    v = x.double().requires_grad_()
    want = norm_formula(v, WEIGHT[:3], BIAS, rectify=rectify)
    (want,) = torch.autograd.grad(want, v, torch.ones_like(want))
    dx, *_ = kernels.poly_norm_backward(
        torch.ones_like(x), x, stats, WEIGHT[:3], BIAS, 1e-6, -1, None, None, rectify
    )
    assert torch.equal(dx[1].isnan(), want[1].isnan())
    torch.testing.assert_close(dx[::2].double(), want[::2], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "index", [torch.int64, pytest.param(torch.int32, marks=pytest.mark.slow)], ids=str
)
def test_groups(index):
    weight, bias = torch.randn(5, 3), torch.randn(5)
    group = torch.tensor([[3, 0, 0], [4, 3, 3], [0, 4, 1], [3, 3, 0]], dtype=index)  # no 2
    for x in (guarded((4, 3, 50), FP32), guarded((3, 4, 50), FP32).transpose(0, 1)):
        check_norm(x, weight, bias, mul=torch.randn(4, 3, 50), group=group)
        check_relu(x, weight, bias, mul=torch.randn(4, 3, 50), group=group)
    check_norm(guarded((4, 50, 3), FP32), weight, bias, dim=1, group=group)


def test_groups_of_wide_rows_relu():
    check_relu(guarded((2, 5000), FP32), WEIGHT.view(2, 4), None, group=torch.tensor([1, 0]))


@pytest.mark.parametrize("order", range(1, 9))
@pytest.mark.parametrize("slope", [None, torch.tensor([0.25])], ids=["relu", "prelu"])
def test_relu_of_every_order(order, slope):
    check_relu(guarded((3, 70), FP32), WEIGHT[:order], None if order % 2 else BIAS, slope)


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
@pytest.mark.parametrize("count", [1, 255, 5000, 40000])
def test_relu_of_any_length(count, dtype):
    check_relu(guarded((count,), dtype), WEIGHT[:3], slope=torch.tensor([0.1]))
    check_relu(guarded((), dtype), WEIGHT[:3])


@pytest.mark.parametrize("shape", [(3, 5), (2, 5, 3, 3), (2, 70, 9), (1, 5, 50, 50)])
def test_slopes_per_channel(shape):
    slope = torch.randn(shape[1])
    check_relu(guarded(shape, FP32), WEIGHT[:3], slope=slope, mul=guarded(shape, FP32))
    if len(shape) == 4:
        x = guarded(shape, FP32).to(memory_format=torch.channels_last)
        check_relu(x, WEIGHT[:3], slope=slope)


def test_slopes_per_channel_with_groups():
    weight, group = torch.randn(3, 2), torch.tensor([[2, 0, 1], [1, 1, 0]])
    check_relu(torch.randn(2, 3, 6), weight, None, torch.randn(3), group=group)
    check_relu(torch.randn(2, 6), weight, None, torch.randn(6), group=torch.tensor([2, 0]))


def test_relu_outside_of_finite():
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0, 2.0])
    y = kernels.poly_relu_forward(x, WEIGHT[:2].abs(), None)
    torch.testing.assert_close(y, torch.tensor([torch.inf, 0, torch.nan, 0, 6.6]), equal_nan=True)
    dx, *_ = kernels.poly_relu_backward(torch.ones(5), x, WEIGHT[:2].abs(), None)
    torch.testing.assert_close(dx, torch.tensor([torch.inf, 0, torch.nan, 0, 5.9]), equal_nan=True)


def test_only_what_is_needed():
    x = torch.randn(4, 9)
    _, stats = kernels.poly_norm_forward(x, WEIGHT[:3], BIAS, 1e-6, -1, x)
    everything = kernels.poly_norm_backward(x, x, stats, WEIGHT[:3], BIAS, 1e-6, -1, x)
    slope = torch.ones(1)
    all_relu = kernels.poly_relu_backward(x, x, WEIGHT[:3], BIAS, slope, x)
    for k in range(5):
        needs = [i == k for i in range(5)]
        relu = kernels.poly_relu_backward(x, x, WEIGHT[:3], BIAS, slope, x, None, needs)
        assert [g is not None for g in relu] == needs
        assert torch.equal(relu[k], all_relu[k])
    for k in range(4):
        needs = [i == k for i in range(4)]
        found = kernels.poly_norm_backward(
            x, x, stats, WEIGHT[:3], BIAS, 1e-6, -1, x, None, False, needs
        )
        assert [g is not None for g in found] == needs
        assert torch.equal(found[k], everything[k])
    assert kernels.poly_norm_forward(x, WEIGHT, None, 1e-6, -1, save_stats=False)[1] is None


@pytest.mark.parametrize(("shape", "dim"), [((0, 5), -1), ((3, 0, 5), -1), ((4, 0), 1)])
def test_empty(shape, dim):
    x = torch.empty(shape)
    y, stats = kernels.poly_norm_forward(x, WEIGHT[:3], BIAS, 1e-6, dim)
    rows = list(shape)
    del rows[dim]
    assert y.shape == x.shape
    assert stats.shape == (3, *rows)
    gradients = kernels.poly_norm_backward(x, x, stats, WEIGHT[:3], BIAS, 1e-6, dim)
    assert kernels.poly_relu_forward(x, WEIGHT[:3], BIAS).shape == x.shape
    relu = kernels.poly_relu_backward(x, x, WEIGHT[:3], BIAS)
    assert gradients[0].shape == relu[0].shape == shape
    for coefficients in (*gradients[1:3], *relu[1:3]):
        assert not coefficients.any()


def test_coefficients_of_any_dtype():
    x = torch.randn(3, 8)
    for dtype in (BF16, FP16, torch.float64):
        weight, bias = WEIGHT[:3].to(dtype), BIAS.to(dtype)
        y, stats = kernels.poly_norm_forward(x, weight, bias, 1e-6, -1)
        exact = [v.double() for v in (x, weight, bias)]
        assert_stored(y, norm_formula(*exact), norm_formula(*exact, sizes=True))
        _, dweight, dbias, _ = kernels.poly_norm_backward(x, x, stats, weight, bias, 1e-6, -1)
        assert dweight.dtype == dbias.dtype == dtype


def test_backward_is_repeatable():
    x = torch.randn(9, 600)
    _, stats = kernels.poly_norm_forward(x, WEIGHT[:3], BIAS, 1e-6, -1)
    first, second = (
        kernels.poly_norm_backward(x, x, stats, WEIGHT[:3], BIAS, 1e-6, -1) for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first[:3], second[:3], strict=True))


def test_nothing_is_written_outside(monkeypatch):
    memories = []

    def room(like, dtype=None):
        memory = torch.full((like.numel() + 4096,), 77.0, dtype=dtype or like.dtype)
        memories.append((memory, like.numel()))
        return memory[: like.numel()].view(like.shape)

    x, mul = torch.randn(33, 21), torch.randn(33, 21)
    image = torch.randn(2, 9, 3, 5)
    monkeypatch.setattr(launch.torch, "empty_like", room)
    _, stats = kernels.poly_norm_forward(x, WEIGHT[:3], BIAS, 1e-6, -1, mul)
    kernels.poly_norm_backward(x, x, stats, WEIGHT[:3], BIAS, 1e-6, -1, mul)
    _, stats = kernels.poly_norm_forward(image, WEIGHT[:3], BIAS, 1e-6, 1)
    kernels.poly_norm_backward(image, image, stats, WEIGHT[:3], BIAS, 1e-6, 1)
    kernels.poly_relu_forward(x, WEIGHT[:3], BIAS)
    kernels.poly_relu_backward(image, image, WEIGHT[:3], BIAS, torch.randn(9))
    assert len(memories) == 7
    for memory, count in memories:
        assert (memory[count:] == 77).all()
        assert (memory[:count] != 77).all()


def test_every_launch_is_on_the_device_of_x(monkeypatch):
    guarded_tensors = []

    def device_of(x):
        guarded_tensors.append(x)
        return torch.no_grad()

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    x = torch.randn(3, 8)
    _, stats = kernels.poly_norm_forward(x, WEIGHT, BIAS, 1e-6, -1)
    kernels.poly_norm_backward(x, x, stats, WEIGHT, BIAS, 1e-6, -1)
    kernels.poly_relu_forward(x, WEIGHT, BIAS)
    kernels.poly_relu_backward(x, x, WEIGHT, BIAS)
    assert [t is x for t in guarded_tensors] == [True] * 4


def test_it_is_available():
    assert kernels.available() == (True, "Triton's interpreter, because TRITON_INTERPRET=1")
    assert kernels.supports(torch.empty(0, dtype=BF16))
    assert not kernels.supports(torch.empty(0, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_opcheck(dtype):
    x, mul = (torch.randn(5, 16).to(dtype).requires_grad_() for _ in range(2))
    weight, slope = WEIGHT[:3].clone().requires_grad_(), torch.rand(1, requires_grad=True)
    torch.library.opcheck(ops.norm, (x, weight, BIAS, 1e-6, -1, mul, None, True, "triton"))
    rows, weights = torch.randint(0, 2, (16,)), torch.stack([weight.detach(), -weight.detach()])
    torch.library.opcheck(ops.norm, (x, weights, None, 1e-6, 0, None, rows, False, "triton"))
    torch.library.opcheck(ops.relu, (x, weight, BIAS, slope, mul, None, "triton"))


def test_all_ways_give_the_same_bits():
    """Eager calls, the library's operations, and the compiled program."""
    x = torch.randn(5, 16, requires_grad=True)
    weight, bias = WEIGHT[:3].clone().requires_grad_(), BIAS.clone().requires_grad_()

    def library(x, weight, bias):
        return ops.norm(x, weight, bias, 1e-6, -1, None, None, False, "triton")[0]

    results = []
    with use_backend("triton"):
        compiled = torch.compile(F.poly_norm, fullgraph=True, backend="aot_eager")
        for function in (F.poly_norm, library, compiled):
            y = function(x, weight, bias)
            results.append([y, *torch.autograd.grad(y.square().sum(), (x, weight, bias))])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
