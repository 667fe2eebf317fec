"""The feed-forward network: both forms, equal parameters, any activation."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from polyvision.activations import activation_names, register_activation, registry
from polyvision.errors import PolyvisionError
from polyvision.models.ffn import FeedForward, gated_hidden


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
    counts = [sum(p.numel() for p in FeedForward(64, 171, a).parameters()) for a in (name, "relu")]
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
    """Three activations of a user; removed again afterwards."""
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
