"""Numerics of the C++ kernels and of the closed form, against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_oracles import (
    BIAS,
    TOLERANCE,
    WEIGHT,
    assert_close,
    assert_matches,
    evaluate,
    norm_formula,
    relu_formula,
)

from polyvision import functional as F
from polyvision import kernels

BACKENDS = ["cpp", "reference"]
DTYPES = list(TOLERANCE)
LENGTHS = [1, 2, 7, 64, 123, 512, 1000, 3072, 4096, 8256, 13824, 65536]


@pytest.fixture(params=BACKENDS)
def backend(request):
    with kernels.use_backend(request.param):
        yield request.param


def coefficients(order, dtype=torch.float32):
    return WEIGHT[:order].to(dtype), BIAS.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", LENGTHS)
def test_poly_norm(backend, length, dtype):
    many = [1000] if length <= 123 else []
    for rows in [0, 1, 3, 33 if length <= 13824 else 5, *many]:
        w, b = coefficients(3, dtype if dtype == torch.float64 else torch.float32)
        x = torch.randn(rows, length).to(dtype)
        assert_matches(F.poly_norm, norm_formula, [x, w, b], cancels=length <= 7)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [n for n in LENGTHS if n > 123])
def test_poly_norm_of_many_rows(backend, length, dtype):
    """What ``test_poly_norm`` leaves out for time: 33 and 1000 rows of every length."""
    w, b = coefficients(3, dtype if dtype == torch.float64 else torch.float32)
    for rows in (33, 1000):
        x = torch.randn(rows, length).to(dtype)
        assert_matches(F.poly_norm, norm_formula, [x, w, b])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(9,), (0, 5), (3, 7), (33, 1000), (2, 4097)], ids=str)
def test_poly_relu(backend, shape, dtype):
    w, b = coefficients(3, dtype if dtype == torch.float64 else torch.float32)
    x = torch.randn(shape).to(dtype)
    assert_matches(F.poly_relu, relu_formula, [x, w, b])


def test_poly_relu_of_a_scalar(backend):
    x = torch.tensor(2.0, requires_grad=True)
    y = F.poly_relu(x, torch.tensor([1.0, 0.5]), torch.tensor([0.25]))
    y.backward()
    assert (y.item(), x.grad.item()) == (4.25, 3.0)


@pytest.mark.parametrize("order", range(1, 9))
def test_every_order(backend, order):
    w, b = coefficients(order)
    x = torch.randn(5, 77)
    assert_matches(F.poly_norm, norm_formula, [x, w, b])
    assert_matches(F.poly_norm, norm_formula, [x, w, None])
    assert_matches(F.poly_relu, relu_formula, [x, w, b])


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_gated_and_rectified_forms(backend, dtype):
    w, b = coefficients(3)
    x, mul = torch.randn(2, 5, 77).to(dtype)

    def gated(function):
        return lambda x, w, b, mul: function(x, w, b, mul=mul)

    def rectified(x, w, b, mul):
        return norm_formula(x, w, b, mul=mul, rectify=True)

    assert_matches(gated(F.poly_norm), gated(norm_formula), [x, w, b, mul])
    assert_matches(gated(F.poly_relu_norm), rectified, [x, w, b, mul])
    assert_matches(gated(F.poly_relu), gated(relu_formula), [x, w, b, mul])


@pytest.mark.parametrize("slope", [torch.tensor([0.3]), torch.linspace(-0.2, 0.5, 6)], ids=len)
def test_slope(backend, slope):
    w, b = coefficients(3)

    def run(x, w, b, slope):
        return F.poly_relu(x, w, b, slope=slope)

    assert_matches(run, relu_formula, [torch.randn(4, 6, 3, 5), w, b, slope])
    assert_matches(run, relu_formula, [torch.randn(4, 6), w, b, slope])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_coefficients_of_any_dtype(backend, dtype):
    w, b = coefficients(3, dtype)
    x = torch.randn(33, 100)
    y, found = evaluate(F.poly_norm, [x, w, b], torch.ones_like(x))
    exact, reference = evaluate(norm_formula, [v.double() for v in (x, w, b)], torch.ones_like(x))
    assert_close(y, exact)
    for value, other in zip(found[1:], reference[1:], strict=True):
        torch.testing.assert_close(value, other.to(dtype))


@pytest.mark.parametrize("exponent", [-30, -20, -10, -6, -3, -2, -1, 1, 3, 4, 5, 6, 10, 20, 30])
def test_scales(backend, exponent):
    """Where x is small eps decides, where it is large x^6 overflows; dx must not cancel there."""
    w, b = coefficients(3)
    for shape in [(3, 64), (3, 5000)]:
        assert_matches(F.poly_norm, norm_formula, [torch.randn(shape) * 10.0**exponent, w, b])


def test_half_precision_with_large_values(backend):
    w, b = coefficients(3)
    for scale in (3, 10, 1000):
        x = (torch.randn(4, 8192) * scale).half()
        assert_matches(F.poly_norm, norm_formula, [x, w, b])
    assert_matches(
        F.poly_norm, norm_formula, [torch.full((2, 512), 8000.0).half(), w, b], cancels=True
    )


def test_rows_of_zeros_and_of_one_value(backend):
    w, b = coefficients(3)
    zero = torch.zeros(2, 50)
    assert_matches(F.poly_norm, norm_formula, [zero, w, b])
    for value in (1e-20, 1.0, 1e6, 3e38):
        one_hot = zero.clone()
        one_hot[0, 7], one_hot[1, 49] = value, -value
        y = F.poly_norm(one_hot, w, b)
        assert_close(y, norm_formula(one_hot.double(), w.double(), b.double()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_inf_and_nan_follow_the_formula(backend, dtype):
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([[inf, 1, -2], [-inf, 0, 2], [nan, 1, 2], [inf, nan, 1], [1, 2, 3]])
    x = x.to(dtype)
    w = WEIGHT[:3].abs()
    for function, formula in ((F.poly_norm, norm_formula), (F.poly_relu, relu_formula)):
        exact = formula(x.double(), w.double(), BIAS.double())
        torch.testing.assert_close(
            function(x, w, BIAS).double(), exact, equal_nan=True, rtol=1e-2, atol=1e-6
        )


def test_sums_do_not_depend_on_the_number_of_threads():
    x, grad = torch.randn(2, 300, 1000)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            y, found = evaluate(F.poly_norm, [x, WEIGHT[:3], BIAS], grad)
            results.append([y, *found])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("dim", [-1, 1])
def test_groups_of_rows(backend, dim):
    """Per-expert coefficients: every row takes its own, and a group without rows gets zeros."""
    x = torch.randn(7, 6, 5, requires_grad=True)
    weight = torch.randn(4, 3, requires_grad=True)
    bias = torch.randn(4, 1, requires_grad=True)
    group = torch.randint(0, 3, (7, 6) if dim == -1 else (7, 5))
    grad = torch.randn_like(x)

    def loop(x, weight, bias):
        rows, numbers = x.movedim(dim, -1).flatten(0, 1), group.flatten()
        y = [norm_formula(r, weight[g], bias[g]) for r, g in zip(rows, numbers, strict=True)]
        return torch.stack(y).view(x.movedim(dim, -1).shape).movedim(-1, dim)

    def ours(x, weight, bias):
        return F.poly_norm(x, weight, bias, dim=dim, group=group)

    y, found = evaluate(ours, [x, weight, bias], grad)
    exact, reference = evaluate(loop, [v.double() for v in (x, weight, bias)], grad.double())
    torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-5)
    for value, other in zip(found, reference, strict=True):
        torch.testing.assert_close(value.double(), other, rtol=1e-4, atol=1e-4)
    assert not found[1][3].any()


def test_groups_of_poly_relu(backend):
    x, weight, bias = torch.randn(7, 6, 5), torch.randn(4, 2), torch.randn(4, 1)
    group = torch.randint(0, 4, (7, 6))
    y = F.poly_relu(x, weight, bias, group=group)
    base = x.relu()
    w, b = weight[group], bias[group]
    torch.testing.assert_close(y, w[..., :1] * base + w[..., 1:] * base.square() + b)


def test_group_out_of_range_is_an_error():
    x, weight = torch.randn(3, 5), torch.randn(2, 3)
    with kernels.use_backend("cpp"), pytest.raises(ValueError, match=r"0 to 1.*it holds 0 to 2"):
        F.poly_norm(x, weight, group=torch.tensor([0, 1, 2]))


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    order=st.integers(1, 5),
    exponent=st.integers(-8, 8),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_any_shape_dim_and_stride(data, order, exponent, dtype):
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    shape[data.draw(st.integers(0, len(shape) - 1))] = data.draw(st.integers(8, 40))
    dim = max(range(len(shape)), key=lambda d: shape[d])
    x = torch.randn([size + 2 for size in shape], dtype=dtype) * 10.0**exponent
    for d, size in enumerate(shape):  # slices: each dimension keeps a gap in memory
        x = x.narrow(d, data.draw(st.integers(0, 2)), size)
    axes = data.draw(st.permutations(range(len(shape))))
    x, dim = x.permute(axes), axes.index(dim)
    grad = torch.randn(1, dtype=dtype).expand(x.shape) if data.draw(st.booleans()) else None
    weight, bias = coefficients(order, dtype)
    for backend in BACKENDS:
        with kernels.use_backend(backend):
            y, found = evaluate(
                lambda x, w, b: F.poly_norm(x, w, b, dim=dim),
                [x, weight, bias],
                torch.randn(x.shape, dtype=dtype) if grad is None else grad,
            )
            exact = norm_formula(x.double(), weight.double(), bias.double(), dim=dim)
            assert_close(y, exact)
            assert y.stride() == found[0].stride() == torch.empty_like(x).stride()
