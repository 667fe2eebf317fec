"""CETT, thresholds and PPL-p % sparsity on hidden layers with known answers."""

import math

import pytest
import torch
from torch import nn

from polyvision.analysis.health.ffn_neurons import Neurons, neuron_parts, watch_neurons
from polyvision.analysis.health.sparsity import cett, ppl_sparsity, silence, threshold_for
from polyvision.models.language.moe import MoE
from polyvision.models.language.shape import MoEShape

# Four neurons, each with an output direction of its own and column norms 1, 2, 1, 1.
DOWN = torch.diag(torch.tensor([1.0, 2.0, 1.0, 1.0]))
HIDDEN = torch.tensor([[3.0, 0.5, -0.25, 0.0], [0.0, 0.0, 2.0, 0.5]])


def test_neuron_outputs():
    expected = torch.tensor([[3.0, 1.0, 0.25, 0.0], [0.0, 0.0, 2.0, 0.5]])
    assert torch.equal(Neurons(HIDDEN, DOWN).sizes(), expected)


@pytest.mark.parametrize(
    ("threshold", "lost"),
    [
        (0.0, (0.0, 0.0)),
        (0.25, (0.25, 0.0)),
        (0.9, (0.25, 0.5)),
        (1.0, (math.hypot(1, 0.25), 0.5)),
        (9.0, (math.hypot(3, 1, 0.25), math.hypot(2, 0.5))),
    ],
)
def test_cett_by_hand(threshold, lost):
    whole = (math.hypot(3, 1, 0.25), math.hypot(2, 0.5))
    expected = (lost[0] / whole[0] + lost[1] / whole[1]) / 2
    assert cett(Neurons(HIDDEN, DOWN), threshold) == pytest.approx(expected, abs=1e-6)


def test_cett_divides_by_the_output_with_its_bias_and_survives_zeros():
    hidden = torch.tensor([[3.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    bias = torch.tensor([0.0, 4.0, 0.0, 0.0])
    assert cett(Neurons(hidden, DOWN, bias), 9.0) == pytest.approx((3 / 5 + 0) / 2)
    assert cett(Neurons(hidden, DOWN), 9.0) == pytest.approx(0.5)


def test_threshold_for_a_target():
    at = {t: cett(Neurons(HIDDEN, DOWN), t) for t in (0.0, 0.25, 0.5, 1.0, 2.0, 3.0)}
    for threshold, value in at.items():
        assert threshold_for(Neurons(HIDDEN, DOWN), value + 1e-6) == threshold
    assert threshold_for(Neurons(HIDDEN, DOWN), 0.0) == 0.0
    assert threshold_for(Neurons(HIDDEN + 1, DOWN), 0.0) < 0  # no neuron adds nothing


class Net(nn.Module):
    """A hidden layer that is given; the loss grows with what is lost of it."""

    def __init__(self, convolution=False):
        super().__init__()
        self.up = nn.Linear(4, 4, bias=False)
        self.down = nn.Conv2d(4, 4, 1, bias=False) if convolution else nn.Linear(4, 4, bias=False)
        with torch.no_grad():
            self.down.weight.copy_(DOWN.view_as(self.down.weight))

    def forward(self, hidden):
        return self.down(hidden)


@pytest.mark.parametrize("convolution", [False, True])
def test_silenced_neurons_are_zero_and_counted(convolution):
    model = Net(convolution)
    hidden = HIDDEN[:, :, None, None] if convolution else HIDDEN
    with torch.no_grad(), silence(neuron_parts(model), {"": 0.6}) as shares:
        output = model(hidden).flatten(1)
    expected = torch.tensor([[3.0, 1.0, 0.0, 0.0], [0.0, 0.0, 2.0, 0.0]])
    assert torch.equal(output, expected)
    assert shares == {"": [pytest.approx(5 / 8)]}
    assert torch.equal(model(hidden).flatten(1), HIDDEN @ DOWN)  # the hooks are gone


def test_ppl_sparsity_finds_the_border():
    model = Net()
    whole = HIDDEN @ DOWN

    def evaluate():
        return 2.0 + float((model(HIDDEN) - whole).square().sum()) * 0.1

    # Costs: 0.00625 for the smallest neuron, below ln 1.01 = 0.00995; 0.03125 with the next.
    found = ppl_sparsity(model, neuron_parts(model), evaluate, percent=1)
    assert found["sparsity"] == pytest.approx(4 / 8)  # three zeros and the smallest
    assert found["loss_dense"] == pytest.approx(2)
    assert found["loss_sparse"] == pytest.approx(2.00625)
    assert found["layers"] == {"": pytest.approx(4 / 8)}
    more = ppl_sparsity(model, neuron_parts(model), evaluate, percent=5)
    assert more["sparsity"] == pytest.approx(5 / 8)
    assert math.exp(more["loss_sparse"] - 2) <= 1.05


@pytest.fixture
def mixture():
    """Three experts, two for each token, and tokens that meet them."""
    torch.manual_seed(0)
    moe = MoE(4, 6, MoEShape(experts=3, top_k=2), "polynorm").double()
    moe.init_matrices(lambda each, _: nn.init.normal_(each))
    return moe, torch.randn(7, 4, dtype=torch.float64)


@torch.no_grad()
def experts_by_hand(moe, token):
    """What each neuron of the token's experts adds to its output: (2 x neurons, width)."""
    p = (moe.router.weight @ token).softmax(0)
    weights, chosen = p.topk(2)
    parts = [
        weight * moe.activation(moe.up[e] @ token)[:, None] * moe.down[e].T
        for weight, e in zip(weights, chosen, strict=True)
    ]
    return torch.cat(parts)


def test_cett_of_a_mixture_by_hand(mixture):
    moe, tokens = mixture
    seen = {}
    with torch.no_grad(), watch_neurons(neuron_parts(moe), lambda n, x: seen.update({n: x})):
        output, _ = moe(tokens)
    added = [experts_by_hand(moe, token) for token in tokens]
    torch.testing.assert_close(torch.stack([a.sum(0) for a in added]), output)
    neurons = seen[""]
    sizes = torch.stack([a.norm(dim=1) for a in added])
    threshold = float(sizes.median())
    torch.testing.assert_close(neurons.sizes().flatten().sort().values, sizes.flatten().sort()[0])
    lost = [a[a.norm(dim=1) <= threshold].sum(0).norm() / a.sum(0).norm() for a in added]
    assert cett(neurons, threshold) == pytest.approx(float(torch.stack(lost).mean()))
    few = neurons.few(4)  # tokens 0, 2, 4, 6
    assert few.tokens == 4
    assert cett(few, threshold) == pytest.approx(float(torch.stack(lost[::2]).mean()), rel=1e-5)


def test_silenced_neurons_of_a_mixture_add_nothing(mixture):
    moe, tokens = mixture
    with torch.no_grad():
        added = [experts_by_hand(moe, token) for token in tokens]
        threshold = float(torch.stack([a.norm(dim=1) for a in added]).median())
        before, _ = moe(tokens)
        with silence(neuron_parts(moe), {"": threshold}) as shares:
            output, _ = moe(tokens)
        after, _ = moe(tokens)
    kept = torch.stack([a[a.norm(dim=1) > threshold].sum(0) for a in added])
    torch.testing.assert_close(output, kept)
    assert shares == {"": [pytest.approx(0.5)]}
    assert torch.equal(before, after)
