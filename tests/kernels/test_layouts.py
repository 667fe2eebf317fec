"""The same values whatever the memory layout: rows, NCHW, channels_last, transposed, sliced, mixed.

The incoming gradient is always contiguous, so that layouts also meet within one call.
"""

from __future__ import annotations

import pytest
import torch
from kernel_oracles import BIAS, WEIGHT, assert_matches, evaluate, norm_formula, relu_formula

from polyvision import functional as F
from polyvision import kernels

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def _channels_last(x):
    return x.to(memory_format=torch.channels_last)


# Shapes with features in dimension 1. C++ takes 8 or 16 neighbouring rows of NCHW at a time: there
# are whole strips, the rest of one (35 = 2 x 16 + 3), one strip and too few rows for a strip.
LAYOUTS = {
    "NCHW 7x5": lambda: torch.randn(3, 19, 7, 5),
    "NCHW 4x4": lambda: torch.randn(2, 40, 4, 4),
    "NCHW 3x3": lambda: torch.randn(2, 20, 3, 3),
    "NCHW 2x1": lambda: torch.randn(2, 20, 2, 1),
    "NCHW, many channels": lambda: torch.randn(1, 700, 5, 5),
    "channels_last": lambda: _channels_last(torch.randn(3, 19, 7, 5)),
    "transposed": lambda: torch.randn(24, 50).t(),
    "sliced": lambda: torch.randn(3, 40, 9, 8)[:, 2:38:2, 1:8, ::2],
    "volumes": lambda: torch.randn(2, 18, 3, 4, 5),
}


@pytest.fixture(params=["cpp", "reference"])
def backend(request):
    with kernels.use_backend(request.param):
        yield request.param


def _input(layout, dtype):
    x = LAYOUTS[layout]()
    rounded = x.to(dtype)  # keeps dense layouts; a slice becomes a slice again
    if layout == "sliced":
        rounded = torch.randn(3, 40, 9, 8).to(dtype)[:, 2:38:2, 1:8, ::2]
    return rounded


def _coefficients(dtype):
    dtype = dtype if dtype == torch.float64 else torch.float32
    return WEIGHT[:3].to(dtype), BIAS.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_poly_norm(backend, layout, dtype):
    x, (w, b) = _input(layout, dtype), _coefficients(dtype)
    mul = torch.randn(x.shape).to(dtype)

    def ours(x, w, b, mul=None):
        return F.poly_norm(x, w, b, dim=1, mul=mul)

    def formula(x, w, b, mul=None):
        return norm_formula(x, w, b, mul, dim=1)

    assert_matches(ours, formula, [x, w, b])
    assert_matches(ours, formula, [x, w, b, mul])
    assert_matches(ours, formula, [x, w, b, torch.empty_like(x).copy_(mul)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_poly_relu_norm(backend, layout, dtype):
    x, (w, b) = _input(layout, dtype), _coefficients(dtype)

    def formula(x, w, b):
        return norm_formula(x, w, b, dim=1, rectify=True)

    assert_matches(lambda x, w, b: F.poly_relu_norm(x, w, b, dim=1), formula, [x, w, b])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_poly_relu(backend, layout, dtype):
    x, (w, b) = _input(layout, dtype), _coefficients(dtype)
    slope = torch.linspace(-0.4, 0.6, x.shape[1]).to(w.dtype)
    mul = torch.randn(x.shape).to(dtype)

    def ours(x, w, b, slope, mul=None):
        return F.poly_relu(x, w, b, slope=slope, mul=mul)

    assert_matches(ours, relu_formula, [x, w, b, slope])
    assert_matches(ours, relu_formula, [x, w, b, slope[:1]])
    assert_matches(ours, relu_formula, [x, w, b, slope, mul])
    assert_matches(
        lambda x, w, b, mul: F.poly_relu(x, w, b, mul=mul),
        lambda x, w, b, mul: relu_formula(x, w, b, None, mul),
        [x, w, b, mul],
    )


@pytest.mark.parametrize("width", [9, 17, 36, 44])
def test_slopes_where_no_operand_is_dense(backend, width):
    """The last strip of a row has fewer rows than lanes; those before it must leave no trace."""
    w, b = _coefficients(torch.float32)
    x, mul, grad = (torch.randn(2, 6, 2 * width)[..., ::2] for _ in range(3))
    inputs = [x, w, b, torch.linspace(-0.4, 0.6, 6), mul]
    slope_at = 3

    def ours(x, w, b, slope, mul):
        return F.poly_relu(x, w, b, slope=slope, mul=mul)

    _, found = evaluate(ours, inputs, grad)
    _, exact = evaluate(relu_formula, [v.double() for v in inputs], grad.double())
    torch.testing.assert_close(found[slope_at].double(), exact[slope_at], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[0].double(), exact[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("operand", ["x", "mul", "grad"])
@pytest.mark.parametrize("function", [F.poly_norm, F.poly_relu])
def test_views_that_only_note_a_negation(backend, function, operand):
    """The imaginary part of a conjugate shares memory that holds the opposite numbers."""
    tensors = {name: torch.randn(4, 16) for name in ("x", "mul", "grad")}
    negated = torch.randn(4, 16, dtype=torch.complex64).conj().imag
    assert negated.is_neg()

    def results(value):
        given = tensors | {operand: value}
        inputs = [given["x"], WEIGHT[:3], given["mul"]]
        return evaluate(lambda x, w, mul: function(x, w, mul=mul), inputs, given["grad"])

    torch.testing.assert_close(results(negated), results(negated.resolve_neg()), rtol=0, atol=0)


def test_a_gradient_of_zeros_without_memory(backend):
    grad = torch._efficientzerotensor((4, 16))
    for function in (F.poly_norm, F.poly_relu):
        _, found = evaluate(function, [torch.randn(4, 16), WEIGHT[:3]], grad)
        assert not any(g.any() for g in found)


@pytest.mark.parametrize("exponent", [-30, -8, 8, 25])
def test_neighbouring_rows_of_unlike_size(backend, exponent):
    """Rows whose powers overflow stand beside rows whose powers do not."""
    w, b = _coefficients(torch.float32)
    x = torch.randn(2, 33, 5, 7)
    x[:, :, ::2, 1::3] *= 10.0**exponent
    x[0, :, 3] = 0
    for tensor in (x, _channels_last(x)):
        assert_matches(
            lambda x, w, b: F.poly_norm(x, w, b, dim=1),
            lambda x, w, b: norm_formula(x, w, b, dim=1),
            [tensor, w, b],
        )


def test_neighbouring_rows_that_are_not_finite(backend):
    w, b = _coefficients(torch.float32)
    x = torch.randn(1, 9, 5, 7)
    x[0, 3, 1, 2], x[0, 5, 2, 4] = float("inf"), float("nan")
    y = F.poly_norm(x, w, b, dim=1)
    exact = norm_formula(x.double(), w.double(), b.double(), dim=1)
    torch.testing.assert_close(y.double(), exact, equal_nan=True, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_group_a_pixel(backend, dtype):
    """Coefficients by row where neighbouring rows share a strip."""
    x = torch.randn(2, 12, 6, 7).to(dtype)
    weight, bias = torch.randn(4, 3), torch.randn(4, 1)
    group = torch.randint(0, 4, (2, 6, 7))

    def formula(x, weight, bias):
        x, w, b = x.movedim(1, -1), weight[group], bias[group]
        y = b
        for i in range(3):
            power = x ** (i + 1)
            rms = torch.sqrt(power.square().mean(-1, keepdim=True) + 1e-6)
            y = y + w[..., i : i + 1] * power / rms
        return y.movedim(-1, 1)

    def ours(x, weight, bias):
        return F.poly_norm(x, weight, bias, dim=1, group=group)

    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert_matches(ours, formula, [x, weight.to(wide), bias.to(wide)])
