"""Methods that are compiled again: only from the source that runs, and with all that belongs."""

from __future__ import annotations

import copy
import importlib
import linecache
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyvision import swap_activations
from polyvision.errors import PolyvisionError
from polyvision.models.swap.rewrite import rewritten_class

IMAGE = torch.zeros(2, 3, 16, 16)
SOURCE = """
from torch import nn
import torch.nn.functional as F

class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, x):
        x = self.conv(x)
        return F.relu(x) * 2
"""
CHANGES = [
    ("* 2", "* 3"),  # a constant
    ("* 2", "+ 2"),  # an operation
    ("F.relu", "F.gelu"),  # a name
    ("x = self.conv(x)\n", "x = self.conv(x)\n\n"),  # a place
    ("class Network", "\n\nclass Network"),
    ("def forward(self, x)", "def forward(self, x, y=1)"),
    ("def forward", "def forwards"),
    ("F.relu(x) * 2", "F.relu(x"),  # no Python any more
]


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, ModuleType]]:
    file = tmp_path / "written_network.py"
    file.write_text(SOURCE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield file, importlib.import_module("written_network")
    del sys.modules["written_network"]


@pytest.mark.parametrize(("old", "new"), CHANGES)
def test_source_that_is_not_the_running_code_is_refused(
    written: tuple[Path, ModuleType], old: str, new: str
) -> None:
    file, module = written
    swap_activations(module.Network(), "relu2", inputs=IMAGE)  # what was read before is no excuse
    linecache.getlines(str(file))
    model = module.Network()
    file.write_text(SOURCE.replace(old, new), encoding="utf-8")
    text = "Network.forward does not run what" if new != "F.relu(x" else "is no Python any more"
    with pytest.raises(PolyvisionError, match=text) as caught:
        swap_activations(model, "relu2", inputs=IMAGE)
    assert "\n" not in str(caught.value)
    assert type(model) is module.Network


def test_a_reloaded_module_is_compiled_from_its_new_source(
    written: tuple[Path, ModuleType],
) -> None:
    file, module = written
    old = module.Network()
    swap_activations(module.Network(), "relu2", inputs=IMAGE)
    file.write_text(SOURCE.replace("* 2", "* 3"), encoding="utf-8")  # of the same size
    importlib.reload(module)
    model = module.Network()
    swap_activations(model, "relu2", inputs=IMAGE)
    x = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(model(x), model.conv(x).relu().square() * 3)
    with pytest.raises(PolyvisionError, match=r"restart Python, or reload the module and build"):
        swap_activations(old, "relu2", inputs=IMAGE)


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.act = nn.ReLU()


class OfTheClass(Base):
    """What the header of the method says is known in the class only."""

    SHIFT = 2.0
    Image = Tensor
    FACTORS: list[float] = [3.0]

    def forward(self, x: Image, shift: float = SHIFT, *, factors: list[float] = FACTORS) -> Image:
        assert x.ndim == 4  # pytest compiles this statement in its own way
        return F.relu(self.conv(x) - shift) * factors[-1]


def test_defaults_and_annotations_are_those_of_the_old_method() -> None:
    model = OfTheClass()
    swap_activations(model, "relu2", inputs=IMAGE)
    x = torch.randn(2, 3, 16, 16)
    expected = (model.conv(x) - 2).relu().square()
    torch.testing.assert_close(model(x), expected * 3)
    OfTheClass.FACTORS.append(5.0)
    torch.testing.assert_close(model(x), expected * 5)
    OfTheClass.FACTORS.pop()
    assert type(model).forward.__annotations__ == OfTheClass.forward.__annotations__
    assert type(model).forward.__kwdefaults__["factors"] is OfTheClass.FACTORS
    torch.testing.assert_close(copy.deepcopy(model)(x, 0.0), model(x, 0.0))


class Otherwise(Base):
    """Calls itself otherwise than self, also in functions inside of its method."""

    def forward(this, x: Tensor) -> Tensor:
        def inner(y: Tensor) -> Tensor:
            return F.gelu(y)

        x = this.act(this.act(inner(this.conv(x))) - 0.1)
        return torch.cat([F.silu(piece) for piece in x.split(1)])


def test_the_first_argument_may_have_any_name() -> None:
    model = Otherwise()
    report = swap_activations(model, "relu2", inputs=IMAGE)
    assert [site.name for site in report.sites] == ["gelu", "act", "act_2", "silu"]
    x = torch.randn(2, 3, 16, 16)
    expected = model.conv(x)
    for shift in (0, 0, 0.1, 0):
        expected = (expected - shift).relu().square()
    torch.testing.assert_close(model(x), expected)


def in_the_class_only(function: Any) -> Any:
    return function


class Decorated(Base):
    decorate = in_the_class_only

    @decorate
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.conv(x))


class Lambda(Base):
    forward = lambda self, x: F.relu(self.conv(x))  # noqa: E731


def with_an_empty_cell() -> nn.Module:
    class Model(Base):
        def forward(self, x: Tensor) -> Tensor:
            return later if x is None else F.relu(self.conv(x))

    model = Model()
    return model
    later = IMAGE


def with_a_lambda() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 8, activation=lambda x: F.relu(x), batch_first=True)
    return nn.Sequential(nn.Conv2d(3, 3, 1), nn.Flatten(1, 2), layer)


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (Decorated, "Decorated.forward cannot be compiled outside of its class: name 'decorate'"),
        (Lambda, "Lambda.<lambda> is not written as a def"),
        (with_an_empty_cell, "Model.forward cannot be compiled outside of its class: "),
        (with_a_lambda, "called in with_a_lambda.<locals>.<lambda>, which is no method of a mod"),
    ],
)
def test_what_cannot_be_compiled_is_refused_in_one_line(
    build: Callable[[], nn.Module], text: str
) -> None:
    model = build()
    with pytest.raises(PolyvisionError, match=re.escape(text)) as caught:
        swap_activations(model, "relu2", inputs=IMAGE)
    assert "\n" not in str(caught.value)
    assert set(model.state_dict()) == set(build().state_dict())


def test_a_method_compiled_twice_keeps_its_first_change() -> None:
    model = OfTheClass()
    for act in ("relu2", "silu"):
        swap_activations(model, act, inputs=IMAGE)
    assert rewritten_class(model, {}) is type(model)
    x = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(model(x), F.silu(model.conv(x) - 2) * 3)
