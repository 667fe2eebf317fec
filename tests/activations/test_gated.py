"""Gated activations: known values, the fused product, experts with coefficients of their own."""

from __future__ import annotations

import re
from typing import Any

import pytest
import timm
import torch
from activation_oracles import build
from torch import Tensor, nn

from polyvision import activation_names, create_activation, swap_activations
from polyvision.activations import SwiGLUClip, gated
from polyvision.errors import PolyvisionError
from polyvision.models.language.moe import MoE
from polyvision.models.language.shape import MoEShape

GATED = activation_names("gated")
OWN = MoEShape(experts=3, top_k=2, expert_coefficients=True)


@pytest.mark.parametrize(
    ("name", "options", "other"),
    [
        ("xswiglu", {}, "glu"),
        ("xswiglu", {"second_order": True}, "swiglu"),
        ("xgeglu", {"second_order": True}, "geglu"),
        ("polyrelu_glu", {"init": "base"}, "reglu"),
        ("swiglu_clip", {"alpha": 1.0, "shift": 0.0, "limit": 1e9}, "swiglu"),
    ],
)
def test_a_new_unit_contains_an_old_one(name: str, options: dict[str, Any], other: str) -> None:
    gate, up = torch.randn(2, 50, 8).double() * 3
    module, plain = create_activation(name, **options).double(), create_activation(other)
    torch.testing.assert_close(module(gate, up), plain(gate, up), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("t", "value"), [(10, 5.26), (100, 3.51), (1e3, 1.89), (1e4, 1.31)])
def test_powlu_grows_less_and_less(t: float, value: float) -> None:
    one = torch.ones(1, dtype=torch.float64)
    assert create_activation("powlu")(one * t, one).item() == pytest.approx(value, abs=0.005)


def test_powlu_times_its_input_is_monotone_where_it_is_positive() -> None:
    x = torch.linspace(0, 200, 200_001, dtype=torch.float64)
    for m in (0.5, 3.0, 9.9):
        assert create_activation("powlu", m=m)(x, x).diff().min() > -1e-12


@pytest.mark.parametrize("t", [0.0, -0.0, 1e-45, 1e-38, 3e38, -3e38])
def test_powlu_has_finite_gradients_at_the_ends(t: float) -> None:
    gate = torch.tensor([t], requires_grad=True)
    create_activation("powlu")(gate, torch.ones(1)).backward()
    assert gate.grad.isfinite().all()
    if t == 0:
        assert gate.grad.item() == 0.5


def test_swiglu_clip_stays_within_its_bound() -> None:
    gate, up = 1e4 * torch.randn(2, 1000)
    assert create_activation("swiglu_clip")(gate, up).abs().max() <= 56
    assert repr(SwiGLUClip(limit=2)) == "SwiGLUClip(limit=2.0, alpha=1.702, shift=1.0)"


@pytest.mark.parametrize("name", ["polynorm", "polyrelu"])
def test_the_product_is_taken_in_the_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call; the result of the polynomial is not rounded before the product."""
    calls = []
    function = getattr(gated.functional, name.replace("poly", "poly_"))

    def counted(*arguments: Any, **keywords: Any) -> Tensor:
        calls.append(keywords.get("mul"))
        return function(*arguments, **keywords)

    monkeypatch.setattr(gated.functional, name.replace("poly", "poly_"), counted)
    module, plain = build(f"{name}_glu"), build(name)
    gate, up = torch.randn(2, 64, 96).bfloat16()
    got = module(gate, up)
    (given,) = calls
    assert given is up
    exact = plain(gate.float()) * up.float()  # rounding the polynomial too would be 2.5e-3
    assert (got.float() - exact).norm() <= 1.8e-3 * exact.norm()


@pytest.mark.parametrize("name", ["polynorm_glu", "polyrelu_glu"])
@pytest.mark.parametrize("norm", ["rms", "l2"])
def test_each_expert_has_its_own_coefficients(name: str, norm: str) -> None:
    options = {"norm": norm} if name == "polynorm_glu" else {}
    moe = MoE(8, 24, OWN, name, options).double()
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.copy_(torch.randn_like(parameter) / 2)
    assert moe.activation.weight.shape == (3, 3)
    x = torch.randn(7, 8, dtype=torch.float64, requires_grad=True)

    def plainly(x: Tensor) -> Tensor:
        rows = []
        for token in x:
            p = (moe.router.weight @ token).softmax(0)
            out = torch.zeros_like(token)
            for e in p.topk(2).indices.tolist():
                own = create_activation(name, **options).double()
                parameters = {
                    "weight": moe.activation.weight[e],
                    "bias": moe.activation.bias[e],
                }
                h = torch.func.functional_call(
                    own, parameters, (moe.gate[e] @ token, moe.up[e] @ token)
                )
                out = out + p[e] * (moe.down[e] @ h)
            rows.append(out)
        return torch.stack(rows)

    got, want = moe(x)[0], plainly(x)
    torch.testing.assert_close(got, want)
    variables = [x, *moe.parameters()]
    torch.testing.assert_close(
        torch.autograd.grad(got.square().sum(), variables),
        torch.autograd.grad(want.square().sum(), variables),
    )


def test_what_has_no_coefficients_for_each_expert_names_what_has() -> None:
    with pytest.raises(PolyvisionError, match=r"'powlu' has none: .*polynorm_glu, polyrelu,"):
        MoE(8, 24, OWN, "powlu")


@pytest.mark.parametrize("name", GATED)
def test_a_gated_one_in_a_vision_network_is_refused_with_what_fits(name: str) -> None:
    fitting = activation_names("pointwise", "normalising", "stochastic")
    text = f"{name} is gated: it needs two inputs"
    with pytest.raises(PolyvisionError, match=text) as error:
        swap_activations(nn.Sequential(nn.ReLU()), name, inputs=torch.randn(1, 4))
    assert f"choose one of: {', '.join(fitting)}." in str(error.value)


def test_the_gated_layers_of_timm_take_a_gate_of_any_kind() -> None:
    """Their product is their own: PolyNorm in the place of SiLU makes them a gated PolyNorm."""
    layer = timm.layers.SwiGLU(8, 12)
    x = torch.randn(2, 5, 8)
    swap_activations(layer, "polynorm", inputs=x)
    assert re.search(r"\(act\): PolyNorm", repr(layer))
    want = create_activation("polynorm_glu")(layer.fc1_g(x), layer.fc1_x(x))
    torch.testing.assert_close(layer(x), layer.fc2(want))


def test_alpha_of_one_expanded_gate_does_not_load_into_another():
    values = create_activation("xgeglu", alpha=0.5).state_dict()
    assert create_activation("xgeglu").load_state_dict(values).missing_keys == []
    for other in (create_activation("xswiglu"), create_activation("xgeglu", second_order=True)):
        with pytest.raises(RuntimeError, match="XGEGLU"):
            other.load_state_dict(values)
