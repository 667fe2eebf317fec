"""Which module is blamed for a value that is not finite, and what is advised."""

from __future__ import annotations

import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyvision.activations import create_activation
from polyvision.data.images.registry import collate
from polyvision.models.vision.create import create_vision_model
from polyvision.training.config.compose import compose
from polyvision.training.loop.module import TaskModule
from polyvision.training.loop.non_finite import NonFiniteError, advice, find_non_finite
from polyvision.training.session import run_task
from polyvision.training.tasks import vision


class Poison(torch.autograd.Function):
    """The identity, whose gradient is nan."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * math.nan


class Block(nn.Module):
    """A residual block that can be broken in its parts, or between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.act = nn.ReLU(inplace=True)
        self.broken = ""

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.first(x))
        y = Poison.apply(y) if self.broken else y
        return x + self.second(y)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def forward(net):
    x, labels = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    return lambda: F.cross_entropy(net(x), labels)


PLACES = ["blocks.0.first", "blocks.1.second", "head"]


def test_a_sound_pass_has_no_finding(net, forward):
    gradients = [torch.full_like(p, 7.0) for p in net.parameters()]
    for parameter, gradient in zip(net.parameters(), gradients, strict=True):
        parameter.grad = gradient
    assert find_non_finite(net, forward) is None
    assert all(p.grad is g for p, g in zip(net.parameters(), gradients, strict=True))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


@pytest.mark.parametrize("place", PLACES)
def test_forward_names_the_first_module(place, net, forward):
    net.get_submodule(place).bias.data[1] = math.nan
    assert find_non_finite(net, forward).place == f"first non-finite output: {place}"


@pytest.mark.parametrize("place", ["blocks.0.second", "blocks.1.first", "head"])
def test_backward_names_the_module_that_breaks_gradients(place, net, forward):
    module = net.get_submodule(place)
    module.forward = lambda x: F.linear(Poison.apply(x), module.weight, module.bias)
    found = find_non_finite(net, forward).place
    assert found == f"all outputs are finite; first non-finite gradients: {place}, backward"


@pytest.mark.parametrize("place", PLACES)
def test_a_gradient_of_a_parameter_alone_is_found(place, net, forward):
    module = net.get_submodule(place)
    module.forward = lambda x: F.linear(x, Poison.apply(module.weight), module.bias)
    assert f"first non-finite gradients: {place}, backward" in find_non_finite(net, forward).place


@pytest.mark.parametrize("number", [0, 1, 2])
def test_what_a_module_does_between_its_parts_is_its_own(number, net, forward):
    net.blocks[number].broken = "yes"
    found = find_non_finite(net, forward).place
    assert f"first non-finite gradients: blocks.{number}, backward" in found


def test_the_loss_itself(net, forward):
    assert "the loss is not" in find_non_finite(net, lambda: forward() * math.nan).place
    found = find_non_finite(net, lambda: Poison.apply(forward()))
    assert "the gradient of the loss itself is not" in found.place


def test_modules_of_checkpointed_blocks_are_named(net):
    from torch.utils.checkpoint import checkpoint

    inner = net.blocks[1].first
    inner.forward = lambda x: F.linear(Poison.apply(x), inner.weight, inner.bias)
    x = torch.randn(5, 4, requires_grad=True)

    def forward():
        y = x
        for block in net.blocks:
            y = checkpoint(block, y, use_reentrant=False)
        return net.head(y).square().mean()

    assert "blocks.1.first, backward" in find_non_finite(net, forward).place


class Trunk(nn.Module):
    """Activations on a residual path without a norm."""

    def __init__(self, **options) -> None:
        super().__init__()
        self.acts = nn.ModuleList(create_activation(**options) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for act in self.acts:
            x = act(x + 1)
        return x


@pytest.mark.parametrize("name", ["polyrelu", "polyprelu", "polycom"])
def test_powers_of_powers_are_explained(name):
    x = torch.full((2, 3), 3.0)
    trunk = Trunk(name=name)
    finding = find_non_finite(trunk, lambda: trunk(x).mean())
    assert finding.place.startswith("first non-finite output: acts.")
    text = advice(finding, trunk, step=0, narrow=False)
    assert "grow from site to site, at most 28 at acts.0" in text or name != "polyrelu"
    assert "Try act.init=base" in text
    assert "recipe.lr" not in text
    assert "recipe.lr" in advice(finding, trunk, step=9, narrow=False)
    calm = Trunk(name=name, init="base")
    assert find_non_finite(calm, lambda: calm(x).mean()) is None
    assert "act.init" not in advice(finding, calm, step=9, narrow=False)


def test_advice_without_growth(net):
    assert advice(None, net, step=0, narrow=True).endswith("Try other data or precision=32")
    assert advice(None, net, step=3, narrow=False).startswith("Try a lower recipe.lr")


@pytest.fixture(scope="module")
def images():
    return torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def test_resnet50_with_polyrelu_is_told_what_helps_and_it_does(images):
    """The network of README.md: its first step is not finite with 1/3 x + 1/3 x^2 + 1/3 x^3."""
    labels = torch.arange(8)
    for options, sound in (({}, False), ({"init": "base"}, True)):
        torch.manual_seed(0)
        built = create_vision_model("resnet50", "polyrelu", options, num_classes=10, image_size=32)
        model = built.model.train()
        finding = find_non_finite(model, lambda m=model: F.cross_entropy(m(images), labels))
        assert (finding is None) == sound
        if finding is not None:
            assert finding.place.startswith("first non-finite output: layer")
            assert "act.init=base" in advice(finding, model, step=0, narrow=False)


@pytest.mark.slow
def test_the_command_that_the_error_names_trains(tmp_path):
    words = ["act=polyrelu", "trainer.max_steps=20", "trainer.log_every_n_steps=1"]
    words += [f"run_root={tmp_path}", "trainer.accelerator=cpu"]
    for more, sound in (([], False), (["act.init=base"], True)):
        (config,) = compose("vision", [*words, *more])
        if sound:
            run_task(config, vision.build_task)
        else:
            with pytest.raises(NonFiniteError, match=r"step 0: .*Try act\.init=base"):
                run_task(config, vision.build_task)
    (metrics,) = tmp_path.glob("vision/*/*/polyrelu-initbase/seed0/metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    losses = [row["train/loss"] for row in rows if "train/loss" in row]
    assert len(losses) == 20
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


@pytest.mark.parametrize("place", ["blocks.0.ffn.up", "blocks.1.attention.out", "head"])
def test_a_run_names_the_module_before_clipping_spreads_the_nan(place, train, monkeypatch):
    original = TaskModule.training_step

    def spoil(self, batch, batch_idx):
        if self.global_step == 1 and batch_idx % 2 == 0:  # the first of two passes
            self.model.get_submodule(place).weight.register_hook(lambda g: g * math.nan)
        return original(self, batch, batch_idx)

    monkeypatch.setattr(TaskModule, "training_step", spoil)
    with pytest.raises(NonFiniteError, match=rf"step 1: .*gradients: {place}, backward"):
        train("language", "model.layers=2", "recipe.accumulate=2", "recipe.clip_grad=1.0")


def test_pixels_of_an_earlier_pass_are_named(train, monkeypatch):
    """A batch that is no longer there is made again."""
    spoiled = []

    def spoil(samples):
        images, labels = collate(samples)
        sums = images.sum((1, 2, 3))
        spoiled.extend(sums[2:3].tolist() if not spoiled else [])  # one of the first pass
        return images.masked_fill((sums == spoiled[0])[:, None, None, None], math.inf), labels

    monkeypatch.setattr(vision, "collate", spoil)
    with pytest.raises(NonFiniteError, match="step 0: the data is not finite: samples 2 of the"):
        train("vision", "recipe.accumulate=4")
