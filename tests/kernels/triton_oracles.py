"""What the tests in Triton's interpreter share: formulas, an exact bound, checks of whole calls.

Each formula has a second form, ``sizes``, in which no two terms cancel: it and its gradients bound
what rounding in fp32 can do to the result and to the gradients of the first.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from polyvision.kernels import triton as kernels

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
WEIGHT = torch.tensor([0.7, -1.3, 0.45, 0.9, -0.35, 0.6, -0.8, 0.25])
BIAS = torch.tensor([0.3])
# Error of the arithmetic relative to the sizes of its terms: 8 roundings of fp32.
ARITHMETIC = 5e-7


@triton.jit
def _narrow(source, target):
    tl.store(target, tl.load(source).to(tl.bfloat16))


def _truncates():
    """Tell whether the interpreter cuts bits off where the hardware rounds to bf16."""
    source, target = torch.tensor([1 + 2**-8 + 2**-9]), torch.zeros(1, dtype=BF16)
    _narrow[(1,)](source, target)
    return target.item() == 1


TRUNCATES = _truncates()


def stored(exact, dtype):
    """Return what the interpreter stores of exact values; a function that never decreases."""
    if dtype == BF16 and TRUNCATES:
        value = exact.float()
        # Rounding to fp32 must not carry a value over the one that the bits are cut off to.
        value = torch.where(value.abs() > exact.abs(), value.nextafter(torch.zeros(())), value)
        bits = value.view(torch.int32) & -0x10000
        return bits.view(torch.float32).double()
    return exact.to(dtype).double()


def assert_stored(got, exact, sizes, what=""):
    """Every element is what is stored of some number within the error of the arithmetic."""
    exact, slack = exact.detach(), ARITHMETIC * sizes.detach() + torch.finfo(FP32).tiny
    low, high = stored(exact - slack, got.dtype), stored(exact + slack, got.dtype)
    fits = (low <= got.double()) & (got.double() <= high)
    worst = [tuple(v[~fits][:3].tolist()) for v in (got, exact, sizes)]
    assert fits.all(), f"{what}: {int((~fits).sum())} values differ: got, exact, sizes = {worst}"


def _size(v):
    """Return |v|, whose derivative is 1 at 0 (that of ``abs`` is 0)."""
    return v if v is None else torch.where(v < 0, -v, v)


def norm_formula(
    x, weight, bias, mul=None, *, dim=-1, eps=1e-6, group=None, rectify=False, sizes=False
):
    base = x.relu() if rectify else x
    if sizes:
        base, weight, bias, mul = map(_size, (base, weight, bias, mul))
    y = torch.zeros_like(x)
    for i in range(weight.shape[-1]):
        a = weight[i] if group is None else weight[:, i][group].unsqueeze(dim)
        power = base ** (i + 1)
        root = (power.square().mean(dim, keepdim=True) + eps).rsqrt()
        # The derivative of the root is the one term of the other sign.
        y = y + a * power * (2 * root.detach() - root if sizes else root)
    if bias is not None:
        y = y + (bias if group is None else bias[group].unsqueeze(dim))
    return y if mul is None else y * mul


def relu_formula(x, weight, bias, slope=None, mul=None, *, group=None, sizes=False):
    negative = 0 * x
    if slope is not None:
        channels = [-1] + [1] * (x.ndim - 2)
        negative = x * (slope.sum() if slope.numel() == 1 else slope.view(channels))
    base = torch.where(x <= 0, negative, x)
    if sizes:
        base, weight, bias, mul = map(_size, (base, weight, bias, mul))
    y = torch.zeros_like(x)
    for i in range(weight.shape[-1]):
        a = weight[i] if group is None else weight[:, i][group].unsqueeze(-1)
        y = y + a * base ** (i + 1)
    if bias is not None:
        y = y + (bias.sum() if group is None else bias[group].unsqueeze(-1))
    return y if mul is None else y * mul


def guarded(shape, dtype, scale=1.0):
    """A contiguous tensor with nan behind its last element."""
    count = math.prod(shape)
    memory = torch.full((count + 4096,), torch.nan, dtype=dtype)
    memory[:count] = (torch.randn(count) * scale).to(dtype)
    return memory[:count].view(shape)


def _check(y, found, formula, tensors, grad, names):
    """Compare a result and its gradients with those of a formula in float64."""
    x = tensors[0]
    leaves = [t if t is None else t.double().requires_grad_() for t in tensors]
    given = [t for t in leaves if t is not None]
    exact, sizes = formula(*leaves), formula(*leaves, sizes=True)
    assert_stored(y, exact, sizes, "y")
    assert y.stride() == torch.empty_like(x).stride()
    gradients = iter(torch.autograd.grad(exact, given, grad.double()))
    bounds = iter(torch.autograd.grad(sizes, given, grad.double().abs()))
    for name, got, like in zip(names, found, tensors, strict=True):
        if like is None:
            assert got is None
            continue
        assert got.shape == like.shape, name
        assert got.dtype == like.dtype, name
        assert_stored(got, next(gradients), next(bounds).abs(), name)
        if name in ("dx", "dmul"):
            assert got.stride() == torch.empty_like(like).stride()


def check_norm(x, weight, bias=BIAS, mul=None, dim=-1, group=None, rectify=False, grad=None):
    """Run PolyNorm forward and backward and compare everything."""
    grad = torch.randn_like(x) if grad is None else grad
    before = [t.clone() for t in (x, grad)]
    y, stats = kernels.poly_norm_forward(x, weight, bias, 1e-6, dim, mul, group, rectify)
    found = kernels.poly_norm_backward(grad, x, stats, weight, bias, 1e-6, dim, mul, group, rectify)
    assert all(torch.equal(a, b) for a, b in zip(before, (x, grad), strict=True))
    rows = list(x.shape)
    del rows[dim]
    assert stats.shape == (weight.shape[-1], *rows)
    assert stats.dtype == torch.float32

    def formula(*leaves, sizes=False):
        return norm_formula(*leaves, dim=dim, group=group, rectify=rectify, sizes=sizes)

    _check(y, found, formula, (x, weight, bias, mul), grad, ("dx", "dweight", "dbias", "dmul"))


def check_relu(x, weight, bias=BIAS, slope=None, mul=None, group=None, grad=None):
    """Run PolyReLU forward and backward and compare everything."""
    grad = torch.randn_like(x) if grad is None else grad
    y = kernels.poly_relu_forward(x, weight, bias, slope, mul, group)
    found = kernels.poly_relu_backward(grad, x, weight, bias, slope, mul, group)

    def formula(*leaves, sizes=False):
        return relu_formula(*leaves, group=group, sizes=sizes)

    names = ("dx", "dweight", "dbias", "dslope", "dmul")
    _check(y, found, formula, (x, weight, bias, slope, mul), grad, names)
