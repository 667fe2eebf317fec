"""What a user has put on a network: hooks stay his, and children keep a sensible order."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torchvision import models
from torchvision.models.densenet import DenseNet

from polyvision import PolyNorm, swap_activations
from polyvision.errors import PolyvisionError

IMAGE = torch.zeros(2, 3, 16, 16)


def block() -> nn.Module:
    return models.resnet.BasicBlock(3, 3)


class Recorder:
    """Writes down which modules ran; it holds what cannot be copied."""

    def __init__(self) -> None:
        self.seen: list[nn.Module] = []
        self.lock = threading.Lock()

    def forward(self, module: nn.Module, args: Any, output: Tensor) -> None:
        output.detach().numpy()
        self.seen.append(module)

    def before(self, module: nn.Module, *_: Any) -> None:
        self.seen.append(module)


def test_no_hook_runs_while_activations_are_looked_for() -> None:
    model, recorder = block(), Recorder()
    for module in model.modules():
        module.register_forward_hook(recorder.forward)
        module.register_forward_pre_hook(recorder.before)
        module.register_full_backward_pre_hook(recorder.before)
    everywhere = register_module_forward_hook(recorder.forward)
    try:
        report = swap_activations(model, "polynorm", inputs=IMAGE)
        assert recorder.seen == []
        nn.Identity()(IMAGE)
        assert len(recorder.seen) == 1  # the hook on all modules is back
    finally:
        everywhere.remove()
    assert report.notes[0] == (
        "hooks are not run while activations are looked for: bn1, bn2, conv1, conv2, relu and "
        "1 more"
    )


def test_hooks_of_a_replaced_activation_go_along() -> None:
    model, recorder = block(), Recorder()
    handles = [
        model.relu.register_forward_hook(recorder.forward),
        model.relu.register_forward_pre_hook(lambda m, args: recorder.before(m)),
        model.relu.register_full_backward_hook(recorder.before),
    ]
    report = swap_activations(model, "polynorm", inputs=IMAGE)
    assert report.notes[1:] == (
        "the hooks of relu are on the new module",
        "relu_2 is called in place of relu, but has none of its hooks",
    )
    x = torch.randn(2, 3, 16, 16)
    model(x).sum().backward()
    assert recorder.seen == [model.relu] * 3
    assert isinstance(model.relu, PolyNorm)
    for handle in handles:
        handle.remove()
    model(x).sum().backward()
    assert len(recorder.seen) == 3


def test_a_swap_that_fails_leaves_the_hooks_where_they_were() -> None:
    model, recorder = block(), Recorder()
    model.relu.register_forward_hook(recorder.forward)
    old, names = model.relu, list(model._modules)
    with pytest.raises(PolyvisionError, match=r"does not run with GLU"):
        swap_activations(model, nn.GLU, inputs=IMAGE)
    assert model.relu is old
    assert list(model._modules) == names
    model(torch.randn(2, 3, 16, 16))
    assert recorder.seen == [old, old]


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_layers_that_pytorch_builds_from_hooks_are_traced(norm: Any) -> None:
    model = nn.Sequential(norm(nn.Conv2d(3, 4, 1)), nn.ReLU(), nn.Conv2d(4, 3, 1))
    swap_activations(model, "polynorm", inputs=IMAGE)
    model(torch.randn(2, 3, 16, 16)).sum().backward()
    assert model[0].weight_g.grad is not None if norm is nn.utils.weight_norm else True
    assert model[1].weight.grad is not None


def test_layers_without_a_shape_yet_are_refused() -> None:
    model = nn.Sequential(nn.LazyConv2d(4, 1), nn.ReLU())
    with pytest.raises(PolyvisionError, match=r"0\.bias, 0\.weight get their shapes in the first"):
        swap_activations(model, "polynorm", inputs=IMAGE)


def test_what_cannot_be_copied_is_one_clear_error() -> None:
    model = block()
    model.lock = threading.Lock()
    with pytest.raises(PolyvisionError, match=r"^BasicBlock cannot be copied to be traced: "):
        swap_activations(model, "polynorm", inputs=IMAGE)


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(3)
        self.layers = nn.ModuleList([nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)])
        self.last = nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(F.relu(x))
        for layer in self.layers:
            x = layer(x)
        return self.last(F.gelu(F.silu(x)))


def children(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_children()]


def test_new_children_stand_where_they_run() -> None:
    model = Several()
    swap_activations(model, "polynorm", inputs=IMAGE)
    assert children(model) == ["relu", "bn", "layers", "silu", "gelu", "last"]
    basic = models.resnet.BasicBlock(3, 3, downsample=nn.Conv2d(3, 3, 1))
    swap_activations(basic, "polynorm", inputs=IMAGE)
    assert children(basic) == ["conv1", "bn1", "relu", "conv2", "bn2", "downsample", "relu_2"]


def test_a_network_can_still_be_cut_before_its_classifier() -> None:
    model = DenseNet(4, (1, 1), 8, num_classes=5)
    swap_activations(model, "relu", inputs=torch.empty(2, 3, 64, 64))
    assert children(model) == ["features", "relu", "classifier"]
    x = torch.randn(2, 3, 64, 64)
    trunk = nn.Sequential(*list(model.eval().children())[:-1])
    features = F.adaptive_avg_pool2d(trunk(x), 1).flatten(1)
    torch.testing.assert_close(model.classifier(features), model(x))


def test_the_indices_of_a_sequence_stay() -> None:
    class Counted(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[1](F.relu(self[0](x)))

    model = Counted(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1))
    swap_activations(model, "polynorm", inputs=IMAGE)
    assert children(model) == ["0", "1", "relu"]
    model(torch.randn(2, 3, 16, 16))
