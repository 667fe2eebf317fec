"""Normalising activations: what they are known to do, large values, rows without variance."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from activation_oracles import ORACLES, build
from torch import Tensor, nn

from polyvision import create_activation, swap_activations
from polyvision.activations.normalising import ASH, NormSiLU, RadialBounding
from polyvision.errors import PolyvisionError
from polyvision.models.language.ffn import FeedForward
from polyvision.models.language.moe import MoE
from polyvision.models.language.shape import MoEShape

NAMES = ["ash", "normsilu", "radial_bounding"]
CASES = [(name, {}) for name in NAMES] + [("normsilu", {"subtract_mean": False})]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("name", "options"), CASES)
def test_values_whose_squares_overflow(name: str, options: Any, dtype: torch.dtype) -> None:
    module = build(name, **options)
    x = ((2 * torch.rand(8, 300) - 1) * torch.finfo(dtype).max).to(dtype)
    want = ORACLES[name](module.double(), x.double())
    got = module.float()(x).double()
    limit = {torch.float32: 2e-6, torch.float16: 3e-4, torch.bfloat16: 2e-3}[dtype]
    assert (got - want).norm() <= limit * want.norm()


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1.0, 1e30])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_rows_of_equal_values_have_finite_gradients(name: str, options: Any, scale: float) -> None:
    module = create_activation(name, **options)
    x = torch.full((2, 6), scale, requires_grad=True)
    y = module(x)
    grads = torch.autograd.grad(y.sum(), [x, *module.parameters()])
    assert all(t.isfinite().all() for t in (y, *grads))


def test_only_the_input_is_kept() -> None:
    for name, options in CASES:
        kept: list[Tensor] = []
        x = torch.randn(4, 6, requires_grad=True)
        module = create_activation(name, **options)
        with torch.autograd.graph.saved_tensors_hooks(lambda t, k=kept: k.append(t), lambda t: t):
            module(x)
        assert [t.data_ptr() for t in kept if t.numel() > 1] == [x.data_ptr()]


def test_ash_lets_the_top_of_a_normal_distribution_pass() -> None:
    x = torch.randn(64, 10_000) * 3 + 5
    y = ASH(alpha=1e4, z=1.96)(x)
    assert (y / x > 0.5).float().mean().item() == pytest.approx(0.025, abs=0.001)
    swish = ASH(alpha=0.5)
    rows = x - x.mean(-1, keepdim=True)
    torch.testing.assert_close(swish(rows), nn.functional.silu(rows), rtol=1e-4, atol=1e-4)


def test_a_language_model_refuses_statistics_over_all_tokens() -> None:
    with pytest.raises(PolyvisionError, match=r"act=ash with act.over=sample .* later ones"):
        FeedForward(8, 24, "ash", {"over": "sample"})
    with pytest.raises(PolyvisionError, match="unknown over of ASH 'batch'"):
        ASH(over="batch")
    ffn, x = FeedForward(8, 24, "ash"), torch.randn(1, 5, 8)
    changed = x.clone()
    changed[:, 3:] += 1
    torch.testing.assert_close(ffn(changed)[:, :3], ffn(x)[:, :3])


def test_normsilu_has_a_gain_for_each_feature_where_their_number_is_known() -> None:
    assert FeedForward(8, 24, "normsilu").activation.gain.shape == (24,)
    moe = MoE(8, 12, MoEShape(experts=3, top_k=2), "normsilu")
    assert moe.activation.gain.shape == (12,)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    swap_activations(model, "normsilu", inputs=torch.randn(1, 3, 8, 8))
    assert (model[1].gain.shape, model[1].dim) == ((1,), 1)
    with pytest.raises(PolyvisionError, match=r"the gain has 4 values, and dim -1 of x, .* has 5"):
        NormSiLU(features=4)(torch.randn(2, 5))


def test_radial_bounding_never_lengthens_a_difference() -> None:
    x, y = 2 * torch.randn(2, 1000, 8, dtype=torch.float64)
    for size in (1, 2, 3, 8):
        module = RadialBounding(size=size)
        assert ((module(x) - module(y)).norm(dim=1) <= (x - y).norm(dim=1) + 1e-12).all()
        lengths = torch.stack([g.norm(dim=1) for g in module(x).split(size, 1)])
        assert lengths.max() <= 1 + 1e-12
    with pytest.raises(PolyvisionError, match="size must be a positive integer, got 0"):
        RadialBounding(size=0)
