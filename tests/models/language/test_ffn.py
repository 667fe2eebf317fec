"""The feed-forward network: both forms, equal parameters, any activation."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from polyvision.activations import activation_names, register_activation, registry
from polyvision.analysis.cost.saved_bytes import SavedTensors
from polyvision.errors import PolyvisionError
from polyvision.models.language.ffn import FeedForward, gated_hidden


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def relu(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, 0.0)


FORMULAS = {
    "relu": relu,
    "relu2": lambda x: relu(x) ** 2,
    "gelu": gelu,
    "silu": lambda x: x * sigmoid(x),
    "polyrelu": lambda x: (relu(x) + relu(x) ** 2 + relu(x) ** 3) / 3,
    "polynorm": lambda x: (
        sum(x**i / (x ** (2 * i)).mean(-1, keepdim=True).add(1e-6).sqrt() for i in (1, 2, 3)) / 3
    ),
    "glu": lambda gate, up: sigmoid(gate) * up,
    "reglu": lambda gate, up: relu(gate) * up,
    "geglu": lambda gate, up: gelu(gate) * up,
    "swiglu": lambda gate, up: gate * sigmoid(gate) * up,
}


@pytest.mark.parametrize("name", FORMULAS)
def test_values(name: str) -> None:
    ffn = FeedForward(6, 24, name).double()
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    weights = [linear.weight for linear in (ffn.gate, ffn.up) if linear is not None]
    expected = FORMULAS[name](*(x @ w.T for w in weights)) @ ffn.down.weight.T
    torch.testing.assert_close(ffn(x), expected)


@pytest.mark.parametrize("name", activation_names())
def test_every_activation_has_the_parameters_of_relu(name: str) -> None:
    networks = [FeedForward(64, 171, a) for a in (name, "relu")]
    counts = [sum(p.numel() for p in each.parameters()) for each in networks]
    counts[0] -= 64 * getattr(networks[0].activation, "mixing", 0)  # stated in the plan
    assert counts[0] == pytest.approx(counts[1], rel=0.01)


def test_gated_hidden_is_two_thirds() -> None:
    # The pairs of the paper's Tables 5, 6 and 10 are exact.
    paper = {3072: 2048, 3840: 2560, 6144: 4096, 8256: 5504, 1536: 1024}
    assert {hidden: gated_hidden(hidden) for hidden in paper} == paper
    for hidden in range(50, 9000):
        assert 3 * gated_hidden(hidden) == pytest.approx(2 * hidden, rel=0.01)
        if hidden >= 600 and hidden % 3:
            assert gated_hidden(hidden) % 8 == 0
    assert all(gated_hidden(hidden) >= 1 for hidden in range(1, 50))


@pytest.fixture
def own_activations() -> Iterator[None]:
    """Four activations of a user; removed again afterwards."""
    known = set(registry._REGISTRY)

    @register_activation("own", kind="pointwise", source="-", formula="s x^2")
    class Own(nn.Module):
        def __init__(self, *, scale: float = 1.0) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor([scale]))

        def forward(self, x: Tensor) -> Tensor:
            return self.scale * x * x

    @register_activation("own_gated", kind="gated", source="-", formula="gate - 2 up")
    class OwnGated(nn.Module):
        def forward(self, gate: Tensor, up: Tensor) -> Tensor:
            return gate - 2 * up

    @register_activation("own_softmax", kind="normalising", source="-", formula="softmax(x)")
    def own_softmax(*, dim: int = 1) -> nn.Module:
        return nn.Softmax(dim)

    @register_activation("own_random", kind="stochastic", source="-", formula="x or 0")
    class OwnRandom(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            mask = torch.rand(x.shape[-1]) < 0.5
            self.kept = mask.nonzero()
            return x * mask

    yield
    for name in set(registry._REGISTRY) - known:
        del registry._REGISTRY[name]


@pytest.mark.usefixtures("own_activations")
def test_an_activation_of_the_user() -> None:
    x = torch.randn(2, 5, 6)
    ffn = FeedForward(6, 24, "own", {"scale": 3.0})
    torch.testing.assert_close(ffn(x), ffn.down(3 * ffn.up(x) ** 2))
    ffn = FeedForward(6, 24, "own_gated")
    torch.testing.assert_close(ffn(x), ffn.down(ffn.gate(x) - 2 * ffn.up(x)))
    ffn = FeedForward(6, 24, "own_softmax")  # over the hidden layer, whatever its default is
    torch.testing.assert_close(ffn(x), ffn.down(ffn.up(x).softmax(-1)))


@pytest.mark.usefixtures("own_activations")
def test_initial_matrices_leave_the_activation_alone() -> None:
    ffn = FeedForward(200, 300, "own", {"scale": 7.0})
    ffn.init_matrices(lambda matrix, _: nn.init.normal_(matrix, std=0.5))
    assert ffn.activation.scale.item() == 7.0
    for linear in (ffn.up, ffn.down):
        assert linear.weight.std().item() == pytest.approx(0.5, rel=0.02)


def test_options_reach_the_activation() -> None:
    assert FeedForward(6, 24, "polynorm", {"order": 2}).activation.weight.shape == (2,)


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("polynrom", {}, "unknown activation 'polynrom'. Did you mean 'polynorm'?"),
        ("polynorm", {"ordr": 2}, "has no option 'ordr'; Did you mean 'order'? its options: bias"),
        ("polynorm", {"dim": 1}, "activation 'polynorm' has no option 'dim';"),
        ("relu", {"order": 2}, "activation 'relu' has no option 'order'; it has none."),
        ("polynorm", {"order": 9}, "order must be an integer from 1 to 8, got 9"),
    ],
)
def test_errors(name: str, options: dict[str, int], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        FeedForward(6, 24, name, options)


def test_an_unknown_option_is_the_users_mistake() -> None:
    with pytest.raises(PolyvisionError):
        FeedForward(6, 24, "polynorm", {"ordr": 2})


def plainly(ffn: FeedForward, x: Tensor) -> Tensor:
    h = [matrix(x) for matrix in (ffn.gate, ffn.up, ffn.mixing) if matrix is not None]
    return ffn.down(ffn.activation(*h))


def gradients(ffn: FeedForward, x: Tensor, y: Tensor) -> list[Tensor]:
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    return list(torch.autograd.grad((y * weights).sum(), [x, *ffn.parameters()]))


@pytest.mark.parametrize("name", activation_names("pointwise", "normalising", "gated"))
def test_gradients_are_those_of_the_plain_form(name: str) -> None:
    ffn = FeedForward(6, 24, name).double()
    with torch.no_grad():
        for parameter in ffn.activation.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))  # coefficients that differ
    x = torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True)
    expected, found = (gradients(ffn, x, form(ffn, x)) for form in (plainly, FeedForward.__call__))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["polynorm", "polyrelu", "swiglu"])
def test_gradients_under_autocast(name: str, dtype: torch.dtype) -> None:
    ffn = FeedForward(16, 48, name)
    x = torch.randn(7, 16, requires_grad=True)
    with torch.autocast("cpu", dtype):
        outputs = [form(ffn, x) for form in (plainly, FeedForward.__call__)]
    assert outputs[1].dtype == dtype
    expected, found = (gradients(ffn, x, y) for y in outputs)
    for a, b in zip(expected, found, strict=True):
        assert a.dtype == b.dtype == torch.float32
        assert (a - b).norm() <= 2 * torch.finfo(dtype).eps * a.norm()


@pytest.mark.parametrize(
    ("name", "kept", "compiled"),
    [("polynorm", 48, False), ("polyrelu", 48, False), ("gelu", 48, False), ("swiglu", 64, False)]
    + [("swiglu", 64, True), pytest.param("polynorm", 48, True, marks=pytest.mark.slow)],
)
def test_only_the_pre_activation_is_kept(name: str, kept: int, compiled: bool) -> None:
    """Input of 16 and pre-activation of 48, or 2 x 32, values a token: nothing behind them."""
    ffn, x = FeedForward(16, 48, name), torch.randn(64, 16, requires_grad=True)
    # Divides a compiled graph into forward and backward pass as inductor does.
    backend = "aot_eager_decomp_partition"
    call = torch.compile(ffn, fullgraph=True, backend=backend) if compiled else ffn
    with SavedTensors() as saved:
        y = call(x)
    weights = 4 * sum(p.numel() for p in ffn.parameters())
    assert (saved.bytes - weights) / 64 <= 4 * (16 + kept)
    torch.testing.assert_close(gradients(ffn, x, y), gradients(ffn, x, plainly(ffn, x)))


@pytest.mark.usefixtures("own_activations")
def test_what_draws_random_numbers_is_not_repeated() -> None:
    ffn = FeedForward(6, 24, "own_random")
    ffn(torch.randn(2, 6)).sum().backward()
    assert ffn.activation.calls == 1
    torch.testing.assert_close(ffn.up.weight.grad.sum(1).nonzero(), ffn.activation.kept)
