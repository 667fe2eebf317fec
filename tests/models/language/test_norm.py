"""RMSNorm against its formula in float64, in every way it is called."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from polyvision.analysis.cost.saved_bytes import SavedTensors
from polyvision.models.language.norm import RMSNorm


def formula(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def random_norm(width: int, eps: float, dtype: torch.dtype) -> RMSNorm:
    norm = RMSNorm(width, eps).to(dtype)
    nn.init.normal_(norm.weight, mean=1.0, std=0.5)
    return norm


def value_and_gradients(call: object, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    y = call(x)
    slope = torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view_as(y)
    return y, *torch.autograd.grad((y * slope).sum(), (x, weight))


@pytest.mark.parametrize("eps", [1e-5, 0.3])
@pytest.mark.parametrize("shape", [(3, 5, 7), (4, 6), (1, 1), (9,), (0, 3)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 3e-6)])
def test_values_and_gradients(
    shape: tuple[int, ...], eps: float, dtype: torch.dtype, tolerance: float
) -> None:
    norm, x = random_norm(shape[-1], eps, dtype), torch.randn(shape, dtype=dtype)
    found = value_and_gradients(norm, x.requires_grad_(), norm.weight)
    wide = [t.detach().double().requires_grad_() for t in (x, norm.weight)]
    exact = value_and_gradients(lambda v: formula(v, wide[1], eps), *wide)
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=10 * tolerance)


def test_layouts_and_second_derivatives() -> None:
    norm = random_norm(5, 1e-3, torch.float64)
    x = torch.randn(5, 2, 3, dtype=torch.float64).transpose(0, 2).requires_grad_()
    torch.testing.assert_close(norm(x), formula(x, norm.weight, 1e-3))

    def call(x: Tensor, weight: Tensor) -> Tensor:
        return torch.func.functional_call(norm, {"weight": weight}, (x,))

    assert torch.autograd.gradcheck(call, (x, norm.weight))
    assert torch.autograd.gradgradcheck(call, (x, norm.weight))


def test_only_the_input_and_a_number_a_row_are_kept() -> None:
    norm, x = RMSNorm(64, 1e-5), torch.randn(10, 64, requires_grad=True)
    with SavedTensors() as saved:
        norm(x)
    assert saved.bytes_without([norm.weight]) == 4 * 10 * (64 + 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_inputs_and_backward_under_autocast(dtype: torch.dtype) -> None:
    norm = random_norm(64, 1e-5, torch.float32)
    x = torch.randn(8, 64)
    exact = formula(x.to(dtype).double(), norm.weight.double(), 1e-5)
    y = norm(x.to(dtype))
    assert y.dtype == dtype
    assert (y - exact).norm() <= 2 * torch.finfo(dtype).eps * exact.norm()
    expected = value_and_gradients(norm, x.requires_grad_(), norm.weight)
    with torch.autocast("cpu", torch.bfloat16):
        found = value_and_gradients(norm, x, norm.weight)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_it_is_torchs_norm_to_everyone_else() -> None:
    norm, theirs = random_norm(6, 1e-5, torch.float64), nn.RMSNorm(6, eps=1e-5).double()
    theirs.load_state_dict(norm.state_dict())
    x = torch.randn(4, 6, dtype=torch.float64)
    torch.testing.assert_close(norm(x), theirs(x))
    torch.testing.assert_close(torch.vmap(norm)(x), theirs(x))
