"""Effective rank against matrices whose singular values are known."""

import math

import pytest
import torch
from torch import nn

from polyvision.analysis.layers import weight_matrices
from polyvision.analysis.rank import analyse_rank, effective_rank
from polyvision.models.language.shape import MoEShape, TransformerShape
from polyvision.models.language.transformer import Transformer
from polyvision.models.vision.create import create_vision_model


def with_singular_values(values, rows, columns):
    """A dense matrix with these singular values, between random orthogonal ones."""
    left = torch.linalg.qr(torch.randn(rows, rows, dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(columns, columns, dtype=torch.float64)).Q
    middle = torch.zeros(rows, columns, dtype=torch.float64)
    for i, value in enumerate(values):
        middle[i, i] = value
    return left @ middle @ right


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_identity_has_its_size_whatever_its_scale(dtype):
    assert effective_rank(torch.eye(7, dtype=dtype)) == pytest.approx(7, rel=1e-12)
    assert effective_rank(64 * torch.eye(7, dtype=dtype)) == pytest.approx(7, rel=1e-12)


def test_rank_one_has_one():
    matrix = torch.outer(torch.tensor([1.0, -2.0, 3.0]), torch.tensor([0.5, 4.0])).double()
    assert effective_rank(matrix) == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("values", [(3.0, 1.0), (5.0, 2.0, 1.0), (1.0, 1e-3, 0.0, 0.0)])
@pytest.mark.parametrize("shape", [(6, 6), (6, 9), (9, 6)])
def test_known_singular_values(values, shape):
    shares = [value / sum(values) for value in values]
    entropy = -sum(p * math.log(p) for p in shares if p > 0)
    matrix = with_singular_values(values, *shape)
    assert effective_rank(matrix) == pytest.approx(math.exp(entropy), rel=1e-9)


def test_the_singular_values_count_not_their_squares():
    # p = (3/4, 1/4) gives exp(0.5623) = 1.7548; squares, p = (9/10, 1/10), would give 1.3842.
    assert effective_rank(torch.diag(torch.tensor([3.0, 1.0]))) == pytest.approx(1.7548, abs=1e-4)


def test_zeros_and_broken_weights():
    assert effective_rank(torch.zeros(3, 4)) == 0
    assert math.isnan(effective_rank(torch.tensor([[1.0, math.inf], [0.0, 1.0]])))


@pytest.mark.parametrize(
    ("activation", "roles"), [("polynorm", ["up", "down"]), ("swiglu", ["up", "gate", "down"])]
)
def test_roles_of_a_language_model(activation, roles):
    shape = TransformerShape(
        vocab_size=16, context=8, width=8, layers=2, heads=2, ffn_hidden=24, activation=activation
    )
    model = Transformer(shape)
    with torch.no_grad():
        for block in model.blocks:
            nn.init.eye_(block.ffn.up.weight)
    result = analyse_rank(model)
    assert list(weight_matrices(model)["blocks.1.ffn"]) == roles
    assert result.scalars["blocks.1.ffn/up"] == pytest.approx(8)
    assert result.scalars["mean/up"] == pytest.approx(8)
    assert 1 < result.scalars["blocks.0.ffn/down"] < 8


def test_each_expert_of_a_mixture_has_its_matrices():
    moe = MoEShape(experts=3, top_k=2)
    shape = TransformerShape(
        vocab_size=16, context=8, width=8, layers=2, heads=2, ffn_hidden=24, moe=moe
    )
    model = Transformer(shape)
    with torch.no_grad():
        nn.init.eye_(model.blocks[1].ffn.up[2])
    result = analyse_rank(model)
    names = [f"blocks.{layer}.ffn.{expert}" for layer in range(2) for expert in range(3)]
    assert list(weight_matrices(model)) == names
    assert result.scalars["blocks.1.ffn.2/up"] == pytest.approx(8)
    assert result.scalars["blocks.1.ffn.1/up"] < 8
    assert result.data["largest_possible"]["blocks.0.ffn.0/down"] == 8


def test_history_becomes_curves_over_training():
    shape = TransformerShape(vocab_size=16, context=8, width=8, layers=1, heads=2, ffn_hidden=24)
    result = analyse_rank(Transformer(shape), {0: {"blocks.0.ffn/up": 5.5}}, step=30)
    assert result.data["history"]["0"] == {"blocks.0.ffn/up": 5.5}
    assert list(result.data["history"]) == ["0", "30"]
    lines = result.figure.axes[0].get_lines()
    assert [list(line.get_xdata()) for line in lines] == [[0, 30]]
    assert lines[0].get_ydata()[0] == 5.5


def test_a_network_without_feed_forward_networks_gives_all_its_matrices():
    model = create_vision_model("test_resnet", "relu", num_classes=4, image_size=32).model
    matrices = weight_matrices(model)
    assert matrices["layer1.0.conv1"]["weight"].shape == (32, 32 * 9)
    assert matrices["fc"]["weight"].shape[0] == 4


def test_mlps_of_timm_are_feed_forward_networks():
    model = create_vision_model("test_vit", "gelu", num_classes=4, image_size=160).model
    assert weight_matrices(model)["blocks.0.mlp"]["up"].shape == (192, 64)
