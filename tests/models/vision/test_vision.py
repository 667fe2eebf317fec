"""timm networks with any activation: what is replaced, over which dimension, what is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import timm
import torch
from torch import nn

from polyvision.activations import PolyNorm, activation_names
from polyvision.errors import PolyvisionError
from polyvision.models.vision.create import VisionModel, create_vision_model


def build(name: str, activation: str = "polynorm", size: int = 64, **keywords: Any) -> VisionModel:
    return create_vision_model(name, activation, num_classes=7, image_size=size, **keywords)


# Network, image size, number of sites, and a pattern of the names that are channel-last; the rest
# are NCHW. Reviewed against the source of each family.
VALID = activation_names("pointwise", "normalising", "stochastic")
FAMILIES = [
    ("test_resnet", 160, 12, r"$^"),
    ("test_resnet", 32, 12, r"$^"),
    ("test_convnext", 160, 9, r".*mlp"),
    ("test_vit", 160, 6, r".*mlp"),
    ("test_vit", 32, 6, r".*mlp"),
    ("test_efficientnet", 160, 11, r"$^"),  # two of them on the 1x1 maps of SE
    ("test_efficientnet", 32, 11, r"$^"),
    ("vgg11", 224, 10, r"$^"),
    ("mixer_s32_224", 224, 16, r".*"),
    ("levit_128s", 224, 25, r"stages"),
    ("test_mambaout", 160, 8, r"stages|head"),
]


@pytest.mark.parametrize(("name", "size", "sites", "channel_last"), FAMILIES)
def test_feature_dimensions(name: str, size: int, sites: int, channel_last: str) -> None:
    with torch.device("meta"):
        built = build(name, size=size)
    assert len(built.report.sites) == sites
    expected = {s.name: -1 if re.match(channel_last, s.name) else 1 for s in built.report.sites}
    assert {s.name: s.dim for s in built.report.sites} == expected
    for site in built.report.sites:
        module = built.model.get_submodule(site.name)
        assert isinstance(module, PolyNorm)
        assert module.dim == site.dim
        assert module.weight.is_meta


def test_resnet50_of_imagenet() -> None:
    with torch.device("meta"):
        built = create_vision_model("resnet50", "polynorm", num_classes=1000, image_size=224)
    assert len(built.report.sites) == 49
    assert built.report.parameters_added == 196
    assert built.parameters == 25_557_032 + 196 == sum(p.numel() for p in built.model.parameters())
    assert built.report.leftovers == built.report.kept == ()


def test_every_site_has_its_own_module_and_gradient() -> None:
    # timm starts the last norm of each residual branch at zero: no gradient would pass at first.
    built = build("test_resnet", size=32, model_kwargs={"zero_init_last": False})
    modules = [built.model.get_submodule(site.name) for site in built.report.sites]
    assert len(set(map(id, modules))) == len(built.report.sites)
    built.model(torch.randn(4, 3, 32, 32)).square().sum().backward()
    for module in modules:
        for parameter in module.parameters():
            assert parameter.grad is not None
            assert torch.isfinite(parameter.grad).all()
        # The norm that follows may take a constant out again: the bias may have no gradient.
        assert (module.weight.grad != 0).all()


def test_the_activation_is_what_differs_from_the_plain_network() -> None:
    x = torch.randn(2, 3, 64, 64)
    torch.manual_seed(5)
    plain = timm.create_model("test_resnet", num_classes=7).eval()
    torch.manual_seed(5)
    relu = build("test_resnet", "relu").model.eval()
    torch.manual_seed(5)
    poly = build("test_resnet").model.eval()
    torch.testing.assert_close(relu(x), plain(x))
    assert not torch.allclose(poly(x), plain(x), rtol=0.1)
    state = poly.state_dict()
    assert all(torch.equal(value, state.pop(name)) for name, value in plain.state_dict().items())
    assert len(state) == 24  # weight and bias of 12 sites


def test_channels_last_and_options_reach_the_network() -> None:
    built = build(
        "test_resnet",
        activation_options={"order": 2, "bias": False},
        in_chans=1,
        model_kwargs={"drop_path_rate": 0.5},
    )
    weight = built.model.get_submodule("conv1").get_parameter("0.weight")
    assert weight.shape[1] == 1
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert built.report.parameters_added == 12 * 2
    assert any(getattr(m, "drop_prob", None) == 0.5 for m in built.model.modules())
    assert built.model(torch.randn(2, 1, 64, 64)).shape == (2, 7)


def test_a_pointwise_activation_has_no_dimension() -> None:
    built = build("test_vit", "relu")
    assert {site.dim for site in built.report.sites} == {None}
    assert all(type(built.model.get_submodule(s.name)) is nn.ReLU for s in built.report.sites)
    assert built.report.parameters_added == 0


def test_gates_stay() -> None:
    built = build("test_efficientnet")
    assert len(built.report.gates) == 2
    assert all(k.name.endswith("se.gate") and k.was == "Sigmoid" for k in built.report.gates)
    assert built.report.leftovers == ()


def test_a_family_that_ignores_act_layer_in_places_is_swapped_whole() -> None:
    built = build("test_vit_relpos")  # its position networks have a ReLU of their own
    assert {site.was for site in built.report.sites} == {"GELU", "ReLU"}
    assert built.report.leftovers == ()
    assert not any(isinstance(m, nn.ReLU | nn.GELU) for m in built.model.modules())


def test_a_family_without_act_layer() -> None:
    with torch.device("meta"):
        built = create_vision_model(
            "tf_efficientnet_lite0", "polynorm", num_classes=7, image_size=64
        )
    assert {site.was for site in built.report.sites} == {"ReLU6"}
    assert {site.dim for site in built.report.sites} == {1}


def test_a_module_that_one_block_calls_five_times() -> None:
    with torch.device("meta"):
        built = build("res2next50", "relu")
    block = [site for site in built.report.sites if site.name.startswith("layer1.0.")]
    # After the first convolution, in the loop over the branches, and at the end.
    assert [(s.name, s.calls) for s in block] == [
        ("layer1.0.relu", 1),
        ("layer1.0.relu_2", 3),
        ("layer1.0.relu_3", 1),
    ]


@pytest.mark.parametrize(
    ("keywords", "text"),
    [
        ({"name": "resnet5O"}, "unknown timm model 'resnet5O'. Did you mean 'resnet50',"),
        ({"name": "resnet50.nope"}, "could not build 'resnet50.nope': Invalid pretrained tag"),
        (
            {"activation": "swiglu"},
            "swiglu is gated: it needs two inputs and fits the feed-forward network of a language "
            f"model only. For test_resnet choose one of: {VALID[0]}, {VALID[1]}, ",
        ),
        ({"activation": "polynrom"}, "unknown activation 'polynrom'. Did you mean 'polynorm'?"),
        ({"activation_options": {"ordr": 2}}, "'ordr'. Did you mean 'order'? Valid: bias, eps"),
        ({"activation_options": {"dim": 1}}, "unknown option of activation 'polynorm' 'dim'"),
        ({"activation_options": {"order": 9}}, "order must be an integer from 1 to 8, got 9"),
        ({"model_kwargs": {"depth": 3}}, "unknown option of test_resnet 'depth'. Valid: aa_layer,"),
        ({"model_kwargs": {"in_chans": 1}}, "(model_kwargs) cannot set in_chans: it is the number"),
        (
            {"model_kwargs": {"num_classes": 5}},
            "model.options (model_kwargs) cannot set num_classes: it is the number of classes in",
        ),
        (
            {"name": "inception_v3", "size": 32},
            "cannot be traced on inputs of shape (2, 3, 32",
        ),
    ],
)
def test_a_mistake_is_one_clear_line(keywords: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)) as caught:
        build(**{"name": "test_resnet"} | keywords)
    assert "\n" not in str(caught.value)


def test_weights_that_cannot_be_had_are_not_blamed_on_the_activation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unreachable(*_: Any, **__: Any) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr("timm.models._builder.load_pretrained", unreachable)
    with pytest.raises(PolyvisionError, match="could not build 'test_resnet': no route to host"):
        build("test_resnet", pretrained=True)


def test_pretrained_weights_load_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor of a checkpoint finds its place, and only the coefficients are new."""
    source = timm.create_model("test_resnet", num_classes=7)
    torch.nn.init.normal_(source.get_parameter("fc.weight"))

    def load(model: nn.Module, **_: Any) -> None:
        model.load_state_dict(source.state_dict(), strict=True)
        model.pretrained_cfg = {**model.pretrained_cfg, "num_classes": classes}

    monkeypatch.setattr("timm.models._builder.load_pretrained", load)
    classes = 1000  # of the weights: timm gives the network another head
    head = "90 tensors loaded, 26 new (of the head, for another number of classes: fc.weight, fc.b"
    assert build("test_resnet", pretrained=True).weights.startswith(head)
    classes = 7
    built = build("test_resnet", pretrained=True)
    state = built.model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in source.state_dict().items())
    new = [f"{site.name}.{part}" for site in built.report.sites for part in ("weight", "bias")]
    text = f"{len(source.state_dict())} tensors loaded, 24 new (of activations: "
    assert built.weights.startswith(text)
    assert sorted(built.weights.removeprefix(text).removesuffix(")").split(", ")) == sorted(new)
