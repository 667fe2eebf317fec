"""Cosines of states that were built to have them."""

import math

import pytest
import torch
from torch import nn

from polyvision.analysis.similarity import analyse_similarity, cosine_matrix, hidden_states
from polyvision.errors import PolyvisionError
from polyvision.models.language.shape import MoEShape, TransformerShape
from polyvision.models.language.transformer import Transformer
from polyvision.models.vision.create import create_vision_model


def test_cosines_of_known_angles():
    angles = [0.0, math.pi / 6, math.pi / 2, math.pi]
    states = [torch.tensor([[math.cos(a), math.sin(a)]], dtype=torch.float64) for a in angles]
    expected = [[math.cos(a - b) for a in angles] for b in angles]
    torch.testing.assert_close(
        cosine_matrix(states), torch.tensor(expected, dtype=torch.float64), atol=1e-12, rtol=0
    )


def test_length_does_not_count_and_tokens_are_averaged():
    first = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 3.0], [0.0, 1.0]])
    second = torch.tensor([[5.0, 0.0], [-1.0, 0.0], [4.0, 0.0], [0.0, 7.0]])  # 1, -1, 0, 1
    assert cosine_matrix([first, second])[0, 1] == pytest.approx(0.25)


def test_what_cannot_be_compared_is_nan_and_zeros_have_no_direction():
    cosines = cosine_matrix([torch.ones(2, 3), torch.ones(2, 4), torch.zeros(2, 3)])
    assert math.isnan(cosines[0, 1])
    assert cosines[0, 2] == 0
    assert cosines[0, 0] == pytest.approx(1)


class Turn(nn.Module):
    """Rotate the first two features by an angle."""

    def __init__(self, angle):
        super().__init__()
        self.angle = angle
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        c, s = math.cos(self.angle), math.sin(self.angle)
        return self.scale * x @ torch.tensor([[c, s], [-s, c]])


class Turns(nn.Module):
    def __init__(self, angles):
        super().__init__()
        self.blocks = nn.ModuleList(map(Turn, angles))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        for block in self.blocks:
            x = block(self.dropout(x))
        return x


def test_states_that_are_not_finite_are_named():
    model = Turns([1.0, 0.3, 0.2])
    model.blocks[1].scale.data.fill_(torch.nan)
    result = analyse_similarity(model, torch.randn(2, 3, 2))
    assert result.scalars == {}
    assert result.text.endswith(": the state after blocks.1 is not finite")
    assert len(result.png) > 1000


def test_states_are_those_after_each_layer():
    model = Turns([1.0, 0.3, 0.2]).train()
    inputs = torch.randn(4, 5, 2)
    states = hidden_states(model, inputs)
    assert list(states) == ["blocks.0", "blocks.1", "blocks.2"]
    assert states["blocks.0"].shape == (20, 2)
    result = analyse_similarity(model, inputs)
    cosines = result.data["cosine"]
    assert cosines[0][1] == pytest.approx(math.cos(0.3), abs=1e-6)
    assert cosines[2][0] == pytest.approx(math.cos(0.5), abs=1e-6)
    assert result.scalars["neighbours"] == pytest.approx((math.cos(0.3) + math.cos(0.2)) / 2)
    mean = (math.cos(0.3) + math.cos(0.2) + math.cos(0.5)) / 3
    assert result.scalars["mean"] == pytest.approx(mean)
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks for module in model.modules())


def test_language_model_whose_layers_do_nothing():
    shape = TransformerShape(vocab_size=16, context=8, width=8, layers=3, heads=2, ffn_hidden=24)
    model = Transformer(shape)
    with torch.no_grad():
        for block in model.blocks[1:]:
            block.ffn.down.weight.zero_()
            block.attention.out.weight.zero_()
    result = analyse_similarity(model, torch.randint(16, (2, 8)))
    assert result.data["cosine"] == [[pytest.approx(1)] * 3] * 3


def test_a_mixture_of_experts_whose_second_layer_does_nothing():
    moe = MoEShape(experts=3, top_k=2)
    shape = TransformerShape(
        vocab_size=16, context=8, width=8, layers=2, heads=2, ffn_hidden=24, moe=moe
    )
    model = Transformer(shape)
    with torch.no_grad():
        model.blocks[1].ffn.down.zero_()
        model.blocks[1].attention.out.weight.zero_()
    result = analyse_similarity(model, torch.randint(16, (2, 8)))
    assert result.data["cosine"] == [[pytest.approx(1)] * 2] * 2


@pytest.mark.parametrize(
    ("name", "size", "shape"),
    [
        ("test_vit", 160, (2 * 101, 64)),
        ("test_convnext", 64, (2 * 8 * 8, 32)),  # NCHW between blocks, NHWC inside
        ("resnet18", 32, (2 * 4 * 4, 128)),
    ],
)
def test_layers_of_vision_models(name, size, shape):
    model = create_vision_model(name, "relu", num_classes=4, image_size=size).model
    states = hidden_states(model, torch.randn(2, 3, size, size))
    assert list(states.values())[2].shape == shape


class Flattens(nn.Module):
    def forward(self, x):
        return x.flatten().view(x.shape)


class FixedSize(nn.Module):
    """Blocks on maps whose layout cannot be followed, of one size only."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Flattens() for _ in range(2))

    def forward(self, x):
        if x.shape[-1] != 8:
            raise RuntimeError(f"expected 8 pixels\nnot {x.shape[-1]}")
        for block in self.blocks:
            x = block(x)
        return x


def test_a_network_that_fails_at_another_size_says_so():
    with pytest.warns(UserWarning, match="feature dimension") as caught:
        states = hidden_states(FixedSize(), torch.randn(2, 3, 8, 8))
    assert str(caught[0].message) == (
        "FixedSize does not run on images of (2, 3, 16, 16) (RuntimeError: expected 8 pixels), so "
        "the feature dimension of blocks.0, blocks.1 is not known: their maps are taken as NCHW"
    )
    assert states["blocks.0"].shape == (2 * 8 * 8, 3)


def test_a_compiled_model_is_seen_too():
    model = Turns([1.0, 0.3])

    def refuse(*_):
        raise AssertionError("compiled code passes by the hooks")

    model._compiled_call_impl = refuse
    assert len(hidden_states(model, torch.randn(1, 1, 2))) == 2
    assert model._compiled_call_impl is refuse


def test_a_model_without_layers_is_refused():
    with pytest.raises(PolyvisionError, match="Linear has no repeated layers"):
        hidden_states(nn.Linear(2, 2), torch.randn(1, 2))
