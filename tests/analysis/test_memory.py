"""Analyses of large networks: float64 by blocks, no logits, states of one sample at a time."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from polyvision.analysis import similarity
from polyvision.analysis.health import measure
from polyvision.analysis.health.measure import (
    excess_kurtosis,
    gradient_norms,
    measure_health,
    zero_share,
)
from polyvision.analysis.similarity import analyse_similarity, cosine_matrix
from polyvision.models.language.shape import TransformerShape
from polyvision.models.language.transformer import Transformer

SHAPE = TransformerShape(vocab_size=32, context=16, width=8, layers=3, heads=2, ffn_hidden=24)


class Largest(TorchDispatchMode):
    """The largest number of elements in float64 that an operation gives out."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for tensor in tree_iter(output):
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float64:
                self.elements = max(self.elements, tensor.numel())
        return output


@pytest.mark.parametrize("block", [7, 1000])
def test_sums_by_blocks_are_those_of_the_whole(block, monkeypatch):
    monkeypatch.setattr(measure, "_ELEMENTS", block)
    x = torch.randn(3, 5, 8).transpose(0, 2)
    exact = x.double()
    assert float(measure.total(x)) == pytest.approx(float(exact.sum()), abs=1e-12)
    assert float(measure.mean(x, torch.square)) == pytest.approx(float(exact.square().mean()))
    centred = exact - exact.mean()
    kurtosis = float(centred.pow(4).mean() / centred.square().mean().square() - 3)
    assert excess_kurtosis(x) == pytest.approx(kurtosis, rel=1e-12)


@pytest.mark.parametrize("elements", [8, 50, 1 << 23])
def test_cosines_by_blocks_are_those_of_the_whole(elements, monkeypatch):
    monkeypatch.setattr(similarity, "_ELEMENTS", elements)
    states = [torch.randn(11, 4), torch.randn(11, 3), torch.randn(11, 4), torch.randn(11, 4)]
    cosines = cosine_matrix(states)
    for i, a in enumerate(states):
        for j, b in enumerate(states):
            if a.shape == b.shape:
                expected = F.cosine_similarity(a.double(), b.double()).mean()
                torch.testing.assert_close(cosines[i, j], expected, rtol=1e-12, atol=1e-12)
    assert cosines[0, 1].isnan()


def test_float64_comes_in_blocks(monkeypatch):
    monkeypatch.setattr(measure, "_ELEMENTS", 64)
    x = torch.randn(40, 50)
    layer = nn.Linear(50, 40)
    layer(x).sum().backward()
    with Largest() as seen:
        excess_kurtosis(x)
        zero_share(x)
        gradient_norms(layer)
    assert 0 < seen.elements <= 64


def test_states_are_compared_one_sample_at_a_time():
    model, tokens = Transformer(SHAPE), torch.randint(32, (6, 16))
    with Largest() as seen:
        result = analyse_similarity(model, tokens)
    assert seen.elements == 3 * 16 * 8  # layers x tokens of a sample x width
    assert result.data["tokens"] == dict.fromkeys(result.data["layers"], 6 * 16)
    whole = cosine_matrix(list(similarity.hidden_states(model, tokens).values()))
    torch.testing.assert_close(torch.tensor(result.data["cosine"]).double(), whole)


def test_logits_of_a_language_model_are_never_made():
    model, tokens = Transformer(SHAPE), torch.randint(32, (2, 16))
    made = []
    model.head.register_forward_hook(lambda *_: made.append(1))
    analyse_similarity(model, tokens)
    measure_health(model, tokens, lambda: float(model(tokens, tokens).nats))
    assert made == []
