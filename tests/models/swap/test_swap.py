"""swap_activations on networks of every kind: what is replaced, kept, refused and left intact."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.layers import BatchNormAct2d, EvoNorm2dS0, GluMlp, SwiGLU
from torch import Tensor, nn
from torchvision import models
from torchvision.models.googlenet import BasicConv2d

from polyvision import PolyNorm, swap_activations
from polyvision.activations import activation_modules
from polyvision.errors import PolyvisionError
from polyvision.models.trace.inputs import image_inputs

IMAGE = torch.zeros(2, 3, 16, 16)


class Functional(nn.Module):
    """Every way to spell a call that changes what the code around it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.inplace = True
        self.function = F.gelu

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        y = x
        F.relu(x, inplace=True)  # the result is dropped; y keeps the value from before
        state = {"x": x + y}
        state["x"].relu_()
        z = torch.relu(input=self.function(state["x"] - 1))
        if self.training:
            z = F.silu(z * 2)
        return self.helper(z.sigmoid() * state["x"].mean(1, keepdim=True))

    def helper(self, z: Tensor) -> Tensor:
        pieces = [F.leaky_relu(piece, 0.1) for piece in z.split(2, dim=1)]
        return F.relu(input=torch.cat(pieces, 1), inplace=self.inplace)


def test_every_call_of_a_function_gets_a_module() -> None:
    model = Functional()
    report = swap_activations(model, "polynorm", inputs=IMAGE)
    assert [(s.name, s.was, s.calls) for s in report.sites] == [
        ("relu", "relu()", 1),
        ("relu_2", "relu()", 1),
        ("gelu", "gelu()", 1),
        ("relu_3", "relu()", 1),
        ("leaky_relu", "leaky_relu()", 2),  # one call expression, in a loop
        ("relu_4", "relu()", 1),
        ("silu", "silu()", 1),  # only when training
    ]
    assert {s.how for s in report.sites} == {"function"}
    assert [gate.was for gate in report.gates] == ["sigmoid()"]
    assert isinstance(model, Functional)
    assert type(model).__name__ == "Functional"
    x = torch.randn(2, 3, 16, 16)
    for training in (False, True):
        out = model.train(training)(x)
        by_hand = model.conv(x)
        state = model.relu_2(model.relu(by_hand) + by_hand)
        by_hand = model.relu_3(model.gelu(state - 1))
        by_hand = model.silu(by_hand * 2) if training else by_hand
        by_hand = by_hand.sigmoid() * state.mean(1, keepdim=True)
        pieces = [model.leaky_relu(piece) for piece in by_hand.split(2, dim=1)]
        torch.testing.assert_close(out, model.relu_4(torch.cat(pieces, 1)))


def test_a_dropped_result_of_an_inplace_call_is_kept() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.conv(x)
            F.relu_(x)
            return x

    model = Model()
    x = torch.randn(2, 3, 16, 16)
    before = model(x)
    swap_activations(model, "relu", inputs=IMAGE)
    assert torch.equal(model(x), before)
    swap_activations(model, "relu2", inputs=IMAGE)
    assert torch.equal(model(x), before.square())


def small(name: str) -> nn.Module:
    builders: dict[str, Callable[[], nn.Module]] = {
        "resnet50": lambda: models.resnet50(num_classes=5),
        "googlenet": lambda: models.googlenet(num_classes=5, init_weights=False),
        "densenet121": lambda: models.densenet121(num_classes=5),
        "shufflenet": lambda: models.shufflenet_v2_x0_5(num_classes=5),
        "legacy_seresnet18": lambda: timm.create_model("legacy_seresnet18", num_classes=5),
    }
    return builders[name]()


@pytest.mark.parametrize(
    ("name", "sites", "unshared", "functions"),
    [
        ("resnet50", 49, 32, 0),
        ("googlenet", 61, 0, 61),
        pytest.param("densenet121", 121, 0, 1, marks=pytest.mark.slow),
        ("shufflenet", 37, 0, 0),
        ("legacy_seresnet18", 33, 16, 0),
    ],
)
def test_a_swap_to_the_same_function_changes_no_bit(
    name: str, sites: int, unshared: int, functions: int
) -> None:
    model = small(name)
    plain = copy.deepcopy(model)
    report = swap_activations(model, "relu", inputs=image_inputs(model, 96))
    assert len(report.sites) == sites
    assert [s.how for s in report.sites].count("unshared") == unshared
    assert [s.how for s in report.sites].count("function") == functions
    assert report.leftovers == ()
    assert model.state_dict().keys() == plain.state_dict().keys()
    x = torch.randn(2, 3, 96, 96)
    assert torch.equal(model.eval()(x), plain.eval()(x))


def test_unshared_sites_have_gradients_of_their_own() -> None:
    model = models.resnet18(num_classes=5)
    report = swap_activations(model, "polynorm")
    assert report.parameters_added == 17 * 4
    model(torch.randn(2, 3, 64, 64)).square().sum().backward()
    gradients = [model.get_submodule(s.name).weight.grad for s in report.sites]
    assert len({tuple(g.tolist()) for g in gradients}) == 17


@pytest.mark.parametrize("name", ["tf_efficientnet_lite0", "googlenet", "convnext_atto"])
def test_a_step_trains_every_coefficient(name: str) -> None:
    model = small(name) if name == "googlenet" else timm.create_model(name, num_classes=5)
    report = swap_activations(model, "polynorm", inputs=image_inputs(model, 64))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    out = model.train()(torch.randn(4, 3, 64, 64))
    logits = torch.stack(tuple(out)) if isinstance(out, tuple) else out[None]
    F.cross_entropy(logits.flatten(0, 1), torch.arange(4).repeat(len(logits))).backward()
    assert {"googlenet": 61}.get(name, len(report.sites)) == len(report.sites) > 10
    for site in report.sites:
        for parameter in model.get_submodule(site.name).parameters():
            assert parameter.grad is not None, site.name
            assert torch.isfinite(parameter.grad).all(), site.name
    optimizer.step()
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_only_the_activation_of_a_norm_is_replaced() -> None:
    model = nn.Sequential(nn.Conv2d(3, 32, 1), BatchNormAct2d(32), EvoNorm2dS0(32), nn.ReLU())
    report = swap_activations(model, "polynorm", inputs=IMAGE)
    assert [s.name for s in report.sites] == ["1.act", "3"]
    assert [(k.name, k.reason) for k in report.kept] == [
        ("2", "a norm with its nonlinearity inside")
    ]
    assert type(model[1]) is BatchNormAct2d
    assert type(model[2]) is EvoNorm2dS0
    converted = timm.layers.convert_sync_batchnorm(copy.deepcopy(model))
    assert len(activation_modules(converted)) == 2


def test_the_activated_half_of_a_gated_network_is_replaced() -> None:
    mlps = nn.Sequential(SwiGLU(6, 8), GluMlp(6, 8, act_layer=nn.SiLU), GluMlp(6, 8))
    report = swap_activations(mlps, "polynorm", inputs=torch.zeros(2, 5, 6))
    assert [(s.was, s.role, s.dim) for s in report.sites] == [("SiLU", "mlp", -1)] * 2
    assert [(g.name, g.was) for g in report.gates] == [("2.act", "Sigmoid")]


class HardSigmoidGate(nn.Module):
    """Gates the mean of an image, with a hard-sigmoid as many copies of MobileNetV3 spell it."""

    def __init__(self) -> None:
        super().__init__()
        self.relu6 = nn.ReLU6(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean((2, 3), keepdim=True)
        return mean * self.relu6(x + 3) / 6 + F.relu6(3.0 + x)


def test_a_hard_sigmoid_that_is_spelled_out_is_a_gate() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), HardSigmoidGate(), nn.ReLU6())
    report = swap_activations(model, "polynorm", inputs=IMAGE)
    assert [s.name for s in report.sites] == ["2"]
    assert [g.was for g in report.gates] == ["ReLU6", "relu6()"]


def network() -> nn.Module:
    return timm.create_model("test_efficientnet", num_classes=4)


@pytest.mark.parametrize(
    ("keywords", "expected"),
    [
        ({}, lambda s: s.role != "gate"),
        ({"include": "gate"}, lambda s: s.role == "gate"),
        ({"include": ["stem", "head"]}, lambda s: s.role in ("stem", "head")),
        ({"include": "blocks.1.*"}, lambda s: s.name.startswith("blocks.1.") and s.role != "gate"),
        ({"exclude": "*.se.*"}, lambda s: ".se." not in s.name),
        ({"include": nn.Sigmoid}, lambda s: s.role == "gate"),
        ({"exclude": nn.SiLU, "include": ["*", nn.Sigmoid]}, lambda s: s.was == "Sigmoid"),
    ],
)
def test_selection(keywords: dict[str, Any], expected: Callable[[Any], bool]) -> None:
    every = swap_activations(network(), "relu2", include=["*", "gate"]).sites
    report = swap_activations(network(), "relu2", **keywords)
    assert {s.name for s in report.sites} == {s.name for s in every if expected(s)}
    assert {k.name for k in report.kept} == {s.name for s in every if not expected(s)}


@pytest.mark.parametrize("name", ["layer1.0.relu", "layer1.0.relu_2"])
def test_one_of_two_sites_that_share_a_module(name: str) -> None:
    model = models.resnet18()
    x = torch.randn(1, 3, 32, 32)
    block = model.layer1[0]
    report = swap_activations(model, "relu2", include=name)
    assert [s.name for s in report.sites] == [name]
    h = block.bn1(block.conv1(x.new_ones(1, 64, 8, 8)))
    h = h.relu().square() if name.endswith("relu") else h.relu()
    h = block.bn2(block.conv2(h)) + 1
    h = h.relu() if name.endswith("relu") else h.relu().square()
    torch.testing.assert_close(block(x.new_ones(1, 64, 8, 8)), h)


def test_from_one_activation_to_another_and_back() -> None:
    pieces = (BasicConv2d(3, 4, kernel_size=3), BasicConv2d(4, 4, kernel_size=3))
    model = nn.Sequential(*pieces, nn.ReLU()).eval()
    x = torch.randn(1, 3, 16, 16)
    before, keys = model(x), set(model.state_dict())
    for act in ("polynorm", "silu", "polyrelu", "relu"):
        report = swap_activations(model, act)
        assert [s.name for s in report.sites] == ["0.relu", "1.relu", "2"]
    assert set(model.state_dict()) == keys
    assert torch.equal(model(x), before)


def test_a_second_swap_reaches_what_the_first_left() -> None:
    model = Functional()
    swap_activations(model, "polynorm", inputs=IMAGE)
    report = swap_activations(model, "relu2", inputs=IMAGE, include="gate")
    assert [s.name for s in report.sites] == ["sigmoid"]
    assert isinstance(model.relu, PolyNorm)
    assert len(activation_modules(model)) == 8
    model(torch.randn(2, 3, 16, 16)).sum().backward()
    assert model.relu.weight.grad is not None


def test_copies_pickles_and_compiles() -> None:
    model = Functional().eval()
    swap_activations(model, "polynorm", inputs=IMAGE)
    nn.init.normal_(model.relu.weight)
    x = torch.randn(2, 3, 16, 16)
    expected = model(x)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert isinstance(copied, Functional)
        assert torch.equal(copied(x), expected)
        copied.load_state_dict(model.state_dict())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected)


def test_the_place_decides_device_dtype_and_mode() -> None:
    model = models.resnet18().to(torch.bfloat16).to("meta").eval()
    model.layer1.train()
    report = swap_activations(model, "polynorm")
    for site in report.sites:
        module = model.get_submodule(site.name)
        assert module.weight.is_meta
        assert module.weight.dtype == torch.bfloat16
        assert module.training == site.name.startswith("layer1")


def test_the_encoder_layer_of_torch_does_not_take_its_fast_path() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    report = swap_activations(model, "polynorm", inputs=torch.zeros(2, 5, 8))
    assert [(s.role, s.dim) for s in report.sites] == [("mlp", -1)]
    x = torch.randn(2, 5, 8)
    attended = model.norm1(x + model.self_attn(x, x, x, need_weights=False)[0])
    expected = model.norm2(attended + model.linear2(model.relu(model.linear1(attended))))
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected)


def helper(x: Tensor) -> Tensor:
    return F.relu(x)


class Outside(nn.Module):
    """A function outside of any module applies the second activation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return helper(self.act(self.conv(x)) - 1)


def test_what_cannot_be_replaced_is_an_error_and_the_model_stays() -> None:
    model = Outside()
    before = repr(model)
    text = "Outside: 1 activations cannot be replaced by polynorm: helper (relu) (relu()): called"
    with pytest.raises(PolyvisionError, match=re.escape(text)):
        swap_activations(model, "polynorm", inputs=IMAGE)
    assert repr(model) == before
    assert type(model) is Outside
    with pytest.warns(UserWarning, match=r"cannot be replaced"):
        swap_activations(model, "polynorm", inputs=IMAGE, on_leftover="warn")
    assert isinstance(model.act, PolyNorm)
    report = swap_activations(model, "relu2", inputs=IMAGE, on_leftover="ignore")
    assert [left.name for left in report.leftovers] == ["helper (relu)"]
    assert "LEFT: called in helper" in str(report)


def test_a_module_that_is_called_for_its_change_in_place_is_refused() -> None:
    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)
            self.act = nn.ReLU(inplace=True)

        def forward(self, x: Tensor) -> Tensor:
            x = self.conv(x)
            self.act(x)
            return x

    with pytest.raises(PolyvisionError, match=r"drops its result: it relies on a change in place"):
        swap_activations(Drops(), "polynorm", inputs=IMAGE)


def test_a_module_that_hides_from_its_network_is_found_by_the_audit() -> None:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)
            self.act = nn.ReLU()
            self.calls = [self.act]

        def forward(self, x: Tensor) -> Tensor:
            return self.calls[0](self.conv(x))

    model = Hidden()
    with pytest.raises(PolyvisionError, match=r"act \(ReLU\): the new module gets 0 of 1 calls"):
        swap_activations(model, "polynorm", inputs=IMAGE)
    assert type(model.act) is nn.ReLU


@pytest.mark.parametrize(
    ("keywords", "text"),
    [
        ({"act": "polynrom"}, "unknown activation 'polynrom'. Did you mean 'polynorm'?"),
        ({"act": "swiglu"}, "swiglu is gated: it needs two inputs"),
        ({"ordr": 2}, "unknown option of activation 'polynorm' 'ordr'. Did you mean 'order'?"),
        ({"order": 9}, "order must be an integer from 1 to 8, got 9"),
        ({"on_leftover": "raise"}, "unknown on_leftover 'raise'. Valid: error, ignore, warn."),
        ({"include": "stme"}, "include: no activation of EfficientNet matches 'stme'. Did you me"),
        ({"exclude": nn.GELU}, "exclude: EfficientNet has no activation that is GELU; it has SiLU"),
        (
            {"include": 3},
            "include: 3 is no role (stem, block, head, gate, mlp, kernel, positive), n",
        ),
        ({"exclude": ["*"]}, "no activation to replace: it has 13, and all of them stay"),
        ({"inputs": torch.zeros(1, 5, 8, 8)}, "cannot be traced on inputs of shape (1, 5, 8, 8)"),
        ({"model": nn.Sequential(nn.Linear(3, 3))}, "Sequential does not tell what it takes; pass"),
        ({"model": nn.ReLU(), "inputs": IMAGE}, "the model is itself an activation, ReLU"),
        ({"model": "resnet50"}, "swap_activations needs an nn.Module, got str"),
    ],
)
def test_a_mistake_is_one_clear_line(keywords: dict[str, Any], text: str) -> None:
    model = network()
    before = repr(model)
    with pytest.raises(ValueError, match=re.escape(text)) as caught:
        swap_activations(**{"model": model, "act": "polynorm"} | keywords)
    assert "\n" not in str(caught.value)
    assert repr(model) == before


class Several(nn.Module):
    """Calls several functions at one place in the source."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(self.act(self.linear(x)))
        for function in (F.relu, F.gelu, torch.tanh):
            x = function(x)
        return x


def test_functions_that_share_a_place_in_the_source_are_left_over() -> None:
    model = Several()
    x = torch.randn(3, 4)
    report = swap_activations(model, "relu", inputs=x, on_leftover="ignore")
    assert [site.name for site in report.sites] == ["act"]
    reason = "one place in Several.forward calls several functions"
    assert {(k.name, k.reason) for k in report.leftovers} == {("relu", reason), ("gelu", reason)}
    assert [gate.name for gate in report.gates] == ["tanh"]
    expected = F.gelu(model.linear(model.linear(x).relu()).relu()).tanh()
    torch.testing.assert_close(model(x), expected)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")
def test_a_scripted_child_is_refused_by_name() -> None:
    child = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Sequential(child))
    with pytest.raises(PolyvisionError, match=r"cannot be searched for activations \(2\.0\); swap"):
        swap_activations(model, "polynorm", inputs=torch.empty(2, 4))


def test_a_child_compiled_by_itself_is_left_over_and_what_is_inside_of_one_is_replaced() -> None:
    inner = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), backend="eager")
    model = nn.Sequential(nn.Linear(4, 4), torch.compile(nn.GELU(), backend="eager"), inner)
    report = swap_activations(
        model, "polynorm", inputs=torch.empty(2, 4), on_leftover="ignore", order=2
    )
    assert [site.name for site in report.sites] == ["2._orig_mod.1"]
    assert [k.name for k in report.leftovers] == ["1._orig_mod"]
    assert "swap the activations first, then compile" in report.leftovers[0].reason
    x = torch.randn(2, 4)
    hidden = model[2]._orig_mod[0](F.gelu(model[0](x)))
    torch.testing.assert_close(model(x), model.get_submodule(report.sites[0].name)(hidden))


def test_a_recurrent_layer_with_its_relu_inside_is_listed() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.RNN(4, 4, nonlinearity="relu")
            self.act = nn.GELU()

        def forward(self, x: Tensor) -> Tensor:
            hidden: Tensor = self.layer(x)[0]
            return self.act(hidden)

    report = swap_activations(Recurrent(), "polynorm", inputs=torch.empty(2, 3, 4))
    assert [(k.name, k.was) for k in report.kept] == [("layer", "RNN")]


def test_both_kinds_of_transformer_layer_have_a_feed_forward_network() -> None:
    model = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)
    tokens = torch.empty(2, 4, 8)
    report = swap_activations(model, "polynorm", inputs=(tokens, tokens), include="mlp")
    assert [site.name for site in report.sites] == [
        "encoder.layers.0.relu",
        "decoder.layers.0.relu",
    ]


@pytest.mark.parametrize("activation", ["gelu", nn.GELU()])
def test_a_copy_of_a_decoder_layer_keeps_its_activation(activation: Any) -> None:
    layer = nn.TransformerDecoderLayer(8, 2, 16, 0.0, activation, batch_first=True)
    tokens = torch.randn(2, 4, 8)
    swap_activations(layer, "polynorm", inputs=(tokens, tokens))
    swap_activations(layer, "relu2", inputs=(tokens, tokens))
    expected = layer(tokens, tokens)
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert isinstance(copied, nn.TransformerDecoderLayer)
        assert torch.equal(copied(tokens, tokens), expected)


def test_a_call_beside_the_children_of_a_sequential_is_left_over_with_the_reason() -> None:
    class Activated(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return F.gelu(super().forward(x))

    text = r"the new module gets 2 of 1 calls: .*Activated\.forward runs all children of the Sequen"
    with pytest.raises(PolyvisionError, match=text):
        swap_activations(Activated(nn.Conv2d(3, 4, 1)), "polynorm", inputs=IMAGE)
