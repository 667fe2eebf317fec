"""Networks with our activations in ``torch.fx`` and the tools that are built on it."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import timm
import torch
from activation_oracles import UNGATED, build
from torch import Tensor, fx, nn
from torchvision.models.feature_extraction import create_feature_extractor

from polyvision import PolyNorm2d, PolyvisionError, create_activation, functional
from polyvision.activations import PolyCom, activation_names
from polyvision.models.language.ffn import FeedForward


def traced(model: nn.Module, *inputs: Tensor) -> fx.GraphModule:
    """Trace ``model`` and check that the graph computes the same, gradients included."""
    graph = fx.symbolic_trace(model)
    want, found = model(*inputs), graph(*inputs)
    torch.testing.assert_close(found, want)
    parameters = list(model.parameters())
    upstream = torch.randn_like(want)
    for ours, theirs in zip(
        torch.autograd.grad(found, parameters, upstream),
        torch.autograd.grad(want, parameters, upstream),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)
    return graph


@pytest.mark.parametrize("name", UNGATED)
def test_every_activation_in_a_network_can_be_traced(name: str) -> None:
    model = nn.Sequential(nn.Linear(8, 6), build(name), nn.Linear(6, 2))
    x = torch.randn(4, 8)
    graph = traced(model, x)
    assert set(graph.state_dict()) == set(model.state_dict())
    again = pickle.loads(pickle.dumps(graph))
    assert torch.equal(again(x), graph(x))
    again = copy.deepcopy(graph)
    with torch.no_grad():
        again.get_parameter("0.bias").add_(1)
    assert not torch.equal(again(x), graph(x))


@pytest.mark.parametrize("name", [n for n in UNGATED if n not in ("polycom", "poly")])
def test_an_activation_by_itself_can_be_traced(name: str) -> None:
    module = build(name)
    x = torch.randn(4, 8)
    assert torch.equal(fx.symbolic_trace(module)(x), module(x))


def test_polycom_is_one_step_of_a_network() -> None:
    model = nn.Sequential(nn.Linear(4, 4), PolyCom(rho=torch.tanh, kind="II"))
    steps = [(node.op, node.target) for node in traced(model, torch.randn(2, 4)).graph.nodes]
    assert ("call_module", "1") in steps
    with pytest.raises(PolyvisionError, match="trace the network that holds it"):
        fx.symbolic_trace(PolyCom())


@pytest.mark.parametrize("name", [*activation_names("gated"), "polynorm", "relu"])
def test_a_feed_forward_network_can_be_traced(name: str) -> None:
    traced(FeedForward(8, 24, name), torch.randn(3, 8))


def test_the_functions_can_be_traced_and_still_check_when_the_graph_runs() -> None:
    def halves(x: Tensor, weight: Tensor) -> Tensor:
        stats = functional.poly_norm_stats(x, 3)
        return functional.poly_norm_apply(x, stats, weight, n=6)

    graph = fx.symbolic_trace(halves)
    x, weight = torch.randn(4, 6), torch.tensor([0.5, 0.3, -0.2])
    torch.testing.assert_close(graph(x, weight), functional.poly_norm(x, weight))
    with pytest.raises(PolyvisionError, match="stats must have shape"):
        graph(x, weight[:2])


class Residual(nn.Module):
    def __init__(self, act: str) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        keywords: dict[str, Any] = {"dim": 1} if act == "polynorm" else {}
        self.act = create_activation(act, **keywords)
        self.head = nn.Conv2d(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.act(self.conv(x)) + x)
        return out


def test_torchvision_extracts_features_at_an_activation() -> None:
    model = Residual("polynorm").eval()
    x = torch.randn(2, 3, 8, 8)
    features = create_feature_extractor(model, {"act": "a"})(x)["a"]
    assert torch.equal(features, model.act(model.conv(x)))


def test_timm_extracts_features_by_fx() -> None:
    torch.manual_seed(0)
    model = timm.create_model(
        "test_resnet",
        features_only=True,
        feature_cls="fx",
        act_layer=PolyNorm2d,
        out_indices=(1, 2),
    ).eval()
    torch.manual_seed(0)
    plain = timm.create_model(
        "test_resnet", features_only=True, act_layer=PolyNorm2d, out_indices=(1, 2)
    ).eval()
    x = torch.randn(1, 3, 32, 32)
    for ours, theirs in zip(model(x), plain(x), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.filterwarnings("ignore")  # torch.ao is deprecated, and says so
@pytest.mark.parametrize("act", ["polynorm", "polyrelu", "polycom", "relu"])
def test_quantization_by_fx_leaves_the_activation_in_float(act: str) -> None:
    quantize_fx = pytest.importorskip("torch.ao.quantization.quantize_fx")
    settings = pytest.importorskip("torch.ao.quantization").get_default_qconfig_mapping()
    model = Residual(act).eval()
    x = torch.randn(2, 3, 8, 8)
    prepared = quantize_fx.prepare_fx(copy.deepcopy(model), settings, (x,))
    torch.testing.assert_close(prepared(x), model(x))  # observed, not yet quantized
    quantized = quantize_fx.convert_fx(prepared)(x)
    want = model(x)
    assert 0 < (quantized - want).abs().max() < 0.1 * want.abs().max()
