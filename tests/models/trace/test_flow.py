"""What the data flow tells: activations written by hand, attention kernels, positive results."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyvision import PolyNorm, swap_activations
from polyvision.errors import PolyvisionError

IMAGE = torch.zeros(2, 3, 8, 8)
TOKENS = torch.zeros(2, 5, 8)


class ByHand(nn.Module):
    """A convolution, an activation written in a method, and another convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.out = nn.Conv2d(4, 4, 1)
        self.squash = nn.Sigmoid()
        self.relu6 = nn.ReLU6()
        self.relu = nn.ReLU()
        self.beta = nn.Parameter(torch.ones(1))
        self.register_buffer("mask", torch.tensor([True, False] * 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.act(self.conv(x)))

    def act(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def mish(self, x: Tensor) -> Tensor:
        return x * torch.tanh(F.softplus(x))

    def hardswish(self, x: Tensor) -> Tensor:
        return x * F.hardtanh(x + 3, 0.0, 6.0) / 6

    def hardswish_of_a_module(self, x: Tensor) -> Tensor:
        return x * self.relu6(x + 3) / 6

    def gelu(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))

    def gelu_in_two_statements(self, x: Tensor) -> Tensor:
        cdf = 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))
        return x * cdf

    def gelu_of_the_normal_distribution(self, x: Tensor) -> Tensor:
        return x * torch.special.ndtr(x)

    def gelu_tanh(self, x: Tensor) -> Tensor:
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3))
        return 0.5 * x * (1 + torch.tanh(inner))

    def silu(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)

    def silu_of_a_module(self, x: Tensor) -> Tensor:
        return x * self.squash(x)

    def silu_with_a_parameter(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.beta * x)

    def silu_in_place(self, x: Tensor) -> Tensor:
        x *= torch.sigmoid(x)
        return x

    def relu_by_clamp(self, x: Tensor) -> Tensor:
        return x.clamp(min=0)

    def relu_by_clamp_in_place(self, x: Tensor) -> Tensor:
        x = x.clone()
        x.clamp_(min=0)
        return x

    def relu_by_maximum(self, x: Tensor) -> Tensor:
        return torch.maximum(x, torch.zeros_like(x))

    def leaky_relu(self, x: Tensor) -> Tensor:
        return torch.where(x > 0, x, 0.2 * x)

    def relu2(self, x: Tensor) -> Tensor:
        return F.relu(self.out(x)) ** 2

    def softplus(self, x: Tensor) -> Tensor:
        return torch.log(1 + torch.exp(x))

    def sine(self, x: Tensor) -> Tensor:
        return torch.sin(30 * x)

    def unknown(self, x: Tensor) -> Tensor:
        return x * torch.tanh(F.softplus(1.5 * x))

    def larger(self, x: Tensor) -> Tensor:
        return torch.max(x, self.out(x))

    def area_sine(self, x: Tensor) -> Tensor:
        return torch.asinh(x)

    def assigned(self, x: Tensor) -> Tensor:
        y = x.clone()
        y[y < 0] = 0
        return y

    def assigned_leaky(self, x: Tensor) -> Tensor:
        x[x < 0] *= 0.1
        return x

    def split(self, x: Tensor) -> Tensor:
        x = F.relu(x)
        return x * x

    def guarded_norm(self, x: Tensor) -> Tensor:
        x = (x - x.mean(1, keepdim=True)) * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6)
        return self.relu(x / x.norm(dim=1, keepdim=True).clamp(min=1e-6))

    def sine_of_relu(self, x: Tensor) -> Tensor:
        return torch.sin(self.relu(x))

    def residual(self, x: Tensor) -> Tensor:
        return x + math.sqrt(2) * self.relu(x)

    def clipped(self, x: Tensor) -> Tensor:
        return self.relu(x.clamp(0, 300)).clamp(max=100)

    def limited_above(self, x: Tensor) -> Tensor:
        return self.relu(self.out(x.clamp(max=7)))

    def masked(self, x: Tensor) -> Tensor:
        x = torch.where(self.mask, x, torch.zeros_like(x))
        x = self.relu(x.masked_fill(torch.eye(8, dtype=torch.bool), -1e9))
        x[..., ~self.mask] = 0
        return x

    def gate(self, x: Tensor) -> Tensor:
        return self.relu(x) * torch.sigmoid(self.out(x))


def network(act: Callable[[ByHand, Tensor], Tensor]) -> ByHand:
    """Return a network of a class of its own whose forward applies ``act``."""
    return type("Network", (ByHand,), {"act": act})()


@pytest.mark.parametrize(
    ("act", "was"),
    [
        (ByHand.mish, "mish()"),
        (ByHand.hardswish, "hardswish()"),
        (ByHand.hardswish_of_a_module, "hardswish()"),
        (ByHand.gelu, "gelu()"),
        (ByHand.gelu_in_two_statements, "gelu()"),
        (ByHand.gelu_of_the_normal_distribution, "gelu()"),
        (ByHand.gelu_tanh, "gelu()"),
        (ByHand.silu, "silu()"),
        (ByHand.silu_of_a_module, "silu()"),
        (ByHand.silu_with_a_parameter, "silu()"),
        (ByHand.silu_in_place, "silu()"),
        (ByHand.relu_by_clamp, "relu()"),
        (ByHand.relu_by_clamp_in_place, "relu()"),
        (ByHand.relu_by_maximum, "relu()"),
        (ByHand.leaky_relu, "leaky_relu()"),
        (ByHand.relu2, "relu2()"),
        (ByHand.softplus, "softplus()"),
    ],
)
def test_an_activation_written_by_hand_is_replaced_whole(
    act: Callable[[ByHand, Tensor], Tensor], was: str
) -> None:
    model = network(act)
    report = swap_activations(model, "polynorm", inputs=IMAGE)
    (site,) = report.sites
    assert (site.was, site.how, site.dim, site.role) == (was, "expression", 1, "block")
    assert {k.reason for k in report.kept} == {"never called"} or not report.kept
    x = torch.randn(2, 3, 8, 8)
    h = model.conv(x)
    h = model.out(h) if was == "relu2()" else h
    torch.testing.assert_close(model(x), model.out(model.get_submodule(site.name)(h)))
    assert torch.equal(copy.deepcopy(model)(x), model(x))


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (
            ByHand.sine,
            "sin (sin()): pointwise and nonlinear, but no known activation: torch.sin(30",
        ),
        (ByHand.unknown, "activation: x * torch.tanh(F.softplus(1.5 * x)) (test_flow.py:"),
        (ByHand.area_sine, "no known activation: torch.asinh(x) (test_flow.py:"),
        (ByHand.assigned, "no known activation: y[y < 0] (test_flow.py:"),
        (ByHand.assigned_leaky, "no known activation: x[x < 0] (test_flow.py:"),
        (ByHand.larger, "no known activation: torch.max(x, self.out(x)) (test_flow.py:"),
        (ByHand.split, "relu2 is written by hand, and x * x does not hold its input"),
    ],
)
def test_what_is_no_known_activation_is_left_over_and_named(
    act: Callable[[ByHand, Tensor], Tensor], text: str
) -> None:
    model = network(act)
    before = repr(model)
    with pytest.raises(PolyvisionError, match=re.escape(text)) as caught:
        swap_activations(model, "polynorm", inputs=IMAGE)
    assert "\n" not in str(caught.value)
    assert repr(model) == before
    assert "1 activations cannot be replaced" in str(caught.value)  # no part of it was


@pytest.mark.parametrize(
    "act",
    [
        *(ByHand.guarded_norm, ByHand.residual, ByHand.clipped, ByHand.limited_above),
        *(ByHand.masked, ByHand.gate),
    ],
)
def test_norms_guards_and_gates_are_no_activations(
    act: Callable[[ByHand, Tensor], Tensor],
) -> None:
    report = swap_activations(network(act), "polynorm", inputs=IMAGE)
    assert [s.name for s in report.sites] == ["relu"]
    gates = {ByHand.gate: ["sigmoid()"], ByHand.clipped: ["clamp()"]}.get(act, [])
    assert [gate.was for gate in report.gates] == gates


def test_the_input_of_an_expression_may_itself_hold_a_site() -> None:
    class Nested(ByHand):
        def act(self, x: Tensor) -> Tensor:
            return (h := F.gelu(x)) * torch.sigmoid(h) + self.out(self.relu(x)).clamp(min=0)

    model = Nested()
    report = swap_activations(model, "relu2", inputs=IMAGE)
    assert [s.was for s in report.sites] == ["gelu()", "silu()", "ReLU", "relu()"]
    x = torch.randn(2, 3, 8, 8)
    h = model.conv(x)
    right = model.out(h.relu().square()).relu().square()
    expected = model.out(h.relu().square().relu().square() + right)
    torch.testing.assert_close(model(x), expected)


class Mish(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.tanh(F.softplus(x))


class HardSigmoid(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.relu6 = nn.ReLU6()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu6(x + 3) / 6


class HardSwish(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sigmoid = HardSigmoid()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.sigmoid(x)


def _gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


class GeluFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return _gelu(x)


class FunctionGelu(nn.Module):
    """Has a backward pass of its own in training, as that of BLOOM."""

    def forward(self, x: Tensor) -> Tensor:
        return GeluFunction.apply(x) if self.training else _gelu(x)


def _silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


class Scripted(nn.Module):
    """Computes what no Python function shows."""

    def __init__(self) -> None:
        super().__init__()
        self.function = torch.jit.script(_silu)

    def __deepcopy__(self, memo: object) -> Scripted:
        return Scripted()

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")
@pytest.mark.parametrize("cls", [Mish, HardSwish, FunctionGelu, Scripted])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_module_of_ones_own_that_is_an_activation_is_one_site(
    cls: type[nn.Module], device: str
) -> None:
    act = cls()
    model = nn.Sequential(nn.Conv2d(3, 4, 1), act, nn.Conv2d(4, 4, 1), act).to(device)
    report = swap_activations(model, "polynorm", inputs=IMAGE)
    assert [(s.name, s.was, s.how, s.dim) for s in report.sites] == [
        ("1", cls.__name__, "module", 1),
        ("3", cls.__name__, "module", 1),
    ]
    assert report.kept == ()
    assert isinstance(model[1], PolyNorm)
    assert model[1] is not model[3]


def test_a_hard_sigmoid_of_ones_own_is_a_gate() -> None:
    class Gated(ByHand):
        def __init__(self) -> None:
            super().__init__()
            self.sigmoid = HardSigmoid()

        def act(self, x: Tensor) -> Tensor:
            return self.relu(x) * self.sigmoid(self.out(x))

    report = swap_activations(Gated(), "polynorm", inputs=IMAGE)
    assert [gate.name for gate in report.gates] == ["sigmoid"]
    assert [s.name for s in report.sites] == ["relu"]


class Attention(nn.Module):
    """Linear attention with a nonlinear function of queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.first(x))
        return self.last(self.attend(self.q(x), self.k(x), self.v(x)))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise NotImplementedError

    def elu_plus_one(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = F.elu(q) + 1, F.elu(k) + 1
        inverse = 1 / (torch.einsum("bnd,bd->bn", q, k.sum(1)) + 1e-6)
        return torch.einsum("bnd,bde,bn->bne", q, torch.einsum("bnd,bne->bde", k, v), inverse)

    def padded(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        v = F.pad(v, (0, 1), value=1.0)
        out = F.relu(q) @ (F.relu(k).transpose(1, 2) @ v)
        return out[..., :-1] / (out[..., -1:] + 1e-5)

    def without_quotient(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.silu(q) @ (F.silu(k).transpose(1, 2) @ v)

    def of_scores(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.relu(q @ k.transpose(1, 2)) @ v

    def by_elements(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = F.relu(q), F.relu(k)
        out = (q[..., None] * (k[..., None] * v[..., None, :]).sum(1, keepdim=True)).sum(-2)
        return out / (q * k.sum(1, keepdim=True)).sum(-1, keepdim=True).clamp(min=1e-6)

    def of_weights(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = F.relu(q[..., :1])
        return weights / (weights.sum(1, keepdim=True) + 1e-6) * v

    def softmax(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (F.relu(q) @ F.relu(k).transpose(1, 2)).softmax(-1) @ F.relu(v)


@pytest.mark.parametrize(
    ("attend", "kernels", "sites"),
    [
        (Attention.elu_plus_one, 2, 1),
        (Attention.padded, 2, 1),
        (Attention.without_quotient, 2, 1),
        (Attention.of_scores, 1, 1),
        (Attention.by_elements, 2, 1),
        (Attention.of_weights, 1, 1),
        (Attention.softmax, 0, 4),
    ],
)
def test_the_kernels_of_linear_attention_stay(
    attend: Callable[..., Tensor], kernels: int, sites: int
) -> None:
    model = type("Network", (Attention,), {"attend": attend})()
    report = swap_activations(copy.deepcopy(model), "polynorm", inputs=TOKENS)
    assert [k.role for k in report.kept] == ["kernel"] * kernels
    assert {k.reason for k in report.kept} <= {"an attention kernel"}
    assert len(report.sites) == sites
    if kernels:
        asked = swap_activations(model, "relu2", inputs=TOKENS, include="kernel")
        assert [s.role for s in asked.sites] == ["kernel"] * kernels


def test_the_kernels_of_efficientvit_stay_and_its_gradient_is_moderate() -> None:
    torch.manual_seed(0)
    model = timm.create_model("efficientvit_b0", num_classes=4)
    report = swap_activations(model, "polynorm", inputs=torch.empty(2, 3, 64, 64))
    kernels = [k.name.rpartition(".")[2] for k in report.kept if k.role == "kernel"]
    assert kernels == ["kernel_func", "kernel_func_2"] * 4
    assert len(report.sites) == 24
    model(torch.randn(2, 3, 64, 64)).square().sum().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert torch.nn.utils.get_total_norm(gradients) < 1e6


class Heads(nn.Module):
    """A value and three standard deviations; a scale inside, and an ordinary softplus."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.weights = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> list[Tensor]:
        weights = F.relu(self.weights)
        x = F.softplus(self.layers[0](x * weights[0]))
        x = x + torch.randn_like(x) * F.softplus(self.layers[1](x))
        mean, first, second, third = (layer(x) for layer in self.layers[2:])
        return [mean, F.softplus(first), torch.exp(second), F.elu(third) + 1]


def test_positive_results_stay() -> None:
    report = swap_activations(Heads(), "polynorm", inputs=TOKENS)
    assert [(s.was, s.role) for s in report.sites] == [("softplus()", "block")]
    assert [(k.was, k.role) for k in report.kept] == [
        ("relu()", "positive"),
        ("softplus()", "positive"),
        ("softplus()", "positive"),
        ("exp()", "positive"),
        ("elu()", "positive"),
    ]


def test_a_softplus_module_at_the_end_stays() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2), nn.Softplus())
    report = swap_activations(model, "polynorm", inputs=TOKENS)
    assert [s.name for s in report.sites] == ["1"]
    assert bool((model(torch.randn(64, 8)) > 0).all())
    assert [s.name for s in swap_activations(model, "relu", include="3", inputs=TOKENS).sites] == [
        "3"
    ]


def test_a_function_of_an_activation_does_not_hide_it() -> None:
    report = swap_activations(
        network(ByHand.sine_of_relu), "polynorm", inputs=IMAGE, on_leftover="ignore"
    )
    assert [s.name for s in report.sites] == ["relu"]
    assert [left.name for left in report.leftovers] == ["sin"]


def test_the_activation_of_bloom_is_one_site() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BloomConfig(vocab_size=20, hidden_size=16, n_layer=2, n_head=2)
    inputs = {"input_ids": torch.zeros(2, 5, dtype=torch.int64)}
    report = swap_activations(transformers.BloomModel(config), "polynorm", inputs=inputs)
    assert [(s.name, s.was, s.dim) for s in report.sites] == [
        (f"h.{i}.mlp.gelu_impl", "BloomGelu", -1) for i in range(2)
    ]
    assert report.kept == ()
