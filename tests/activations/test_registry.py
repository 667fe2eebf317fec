"""The registry: what one decorator gives, and what it refuses."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from polyvision import PolyNorm, activation_names, create_activation, register_activation
from polyvision.activations import activation_info, activation_modules, registry
from polyvision.errors import PolyvisionError

SOURCE: dict[str, Any] = {"source": "test", "formula": "alpha x"}


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))


def test_names_are_sorted_and_selected_by_kind() -> None:
    names = activation_names()
    assert names == sorted(names)
    kinds = ("pointwise", "normalising", "gated", "stochastic", "mixture")
    assert sorted(n for kind in kinds for n in activation_names(kind)) == names
    assert {"geglu", "glu", "reglu", "swiglu"} <= set(activation_names("gated"))
    assert "polynorm" in activation_names("normalising", "gated")
    assert "polynorm" not in activation_names("pointwise")


def test_every_record_is_complete() -> None:
    for name in activation_names():
        info = activation_info(name)
        assert info.name == name
        assert "https://" in info.source
        assert info.formula
        assert info.factory.__doc__


def test_options_are_the_keywords_that_describe_the_function() -> None:
    fields = dataclasses.fields(activation_info("polynorm").options)
    assert [(f.name, f.type, f.default) for f in fields] == [
        ("order", int, 3),
        ("eps", float, 1e-6),
        ("bias", bool, True),
        ("norm", Literal["rms", "l2"], "rms"),
    ]
    assert dataclasses.fields(activation_info("swiglu").options) == ()


def test_a_registered_class_appears_everywhere() -> None:
    @register_activation("scaled", kind="pointwise", **SOURCE)
    class Scaled(nn.Module):
        def __init__(self, inplace: bool = False, alpha: float = 2.0) -> None:
            super().__init__()
            self.alpha = alpha

        def forward(self, x: Tensor) -> Tensor:
            return self.alpha * x

    assert "scaled" in activation_names("pointwise")
    assert create_activation("scaled", alpha=3.0)(torch.ones(1)).item() == 3.0
    options = activation_info("scaled").options()
    assert dataclasses.asdict(options) == {"alpha": 2.0}


def test_a_function_can_be_registered_too() -> None:
    @register_activation("wide_polynorm", kind="normalising", **SOURCE)
    def wide(inplace: bool = False, *, dim: int = -1, order: int = 5) -> nn.Module:
        return PolyNorm(order=order, dim=dim)

    assert repr(create_activation("wide_polynorm", dim=1)) == "PolyNorm(order=5, eps=1e-06, dim=1)"


@pytest.mark.parametrize(("name", "cls"), [("relu", nn.ReLU), ("gelu", nn.GELU), ("silu", nn.SiLU)])
def test_what_torch_has_is_torchs_own_class(name: str, cls: type[nn.Module]) -> None:
    module = create_activation(name)
    assert type(module) is cls  # as captum's DeepLift and torch.ao look for it
    assert repr(module) == repr(cls())


def test_a_networks_own_modules_of_torch_do_not_count_as_put_in() -> None:
    model = nn.Sequential(nn.ReLU(), create_activation("relu"), nn.GELU(), PolyNorm())
    assert list(activation_modules(model)) == ["1", "3"]
    assert list(activation_modules(copy.deepcopy(model))) == ["1", "3"]
    assert list(activation_modules(pickle.loads(pickle.dumps(model)))) == ["1", "3"]

    @register_activation("mine", kind="pointwise", **SOURCE)
    def made(inplace: bool = False) -> nn.Module:
        return nn.Tanh()

    model = nn.Sequential(nn.Tanh(), create_activation("mine"))
    assert list(activation_modules(model)) == ["1"]


def test_the_base_of_an_activation_is_part_of_it() -> None:
    model = nn.Sequential(create_activation("polycom", rho="polyprelu"))
    assert list(activation_modules(model)) == ["0"]
    assert list(activation_modules(model[0])) == [""]


def test_a_taken_name_is_refused_and_the_first_one_stays() -> None:
    with pytest.raises(PolyvisionError, match="'relu' is registered already"):
        register_activation("relu", kind="pointwise", **SOURCE)(nn.Hardswish)
    assert activation_info("relu").factory is not nn.Hardswish


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(PolyvisionError, match=r"'pointwize'.* Did you mean 'pointwise'"):
        register_activation("x", kind="pointwize", **SOURCE)


@pytest.mark.parametrize("declaration", ["alpha: float", "alpha=1.0"])
def test_a_keyword_without_type_or_default_is_refused(declaration: str) -> None:
    scope: dict[str, Any] = {}
    exec(f"def half_declared({declaration}): ...", scope)
    with pytest.raises(PolyvisionError, match="'half': keyword 'alpha' needs a type"):
        register_activation("half", kind="pointwise", **SOURCE)(scope["half_declared"])
    assert "half" not in activation_names()


@pytest.mark.parametrize("ask", [activation_info, create_activation])
def test_an_unknown_name_gets_the_nearest_and_all_valid_ones(ask: Any) -> None:
    with pytest.raises(PolyvisionError) as error:
        ask("polynrom")
    text = str(error.value)
    assert "'polynrom'. Did you mean 'polynorm'?" in text
    assert all(name in text for name in activation_names())
    assert "\n" not in text


def test_a_far_name_gets_no_guess() -> None:
    with pytest.raises(PolyvisionError, match=r"'xyz'. Valid: "):
        create_activation("xyz")


def test_an_unknown_keyword_gets_the_nearest_and_all_valid_ones() -> None:
    with pytest.raises(PolyvisionError, match=r"'ordr'. Did you mean 'order'.* Valid: .*eps"):
        create_activation("polynorm", ordr=4)
    with pytest.raises(PolyvisionError, match=r"'order'. Valid: none"):
        create_activation("swiglu", order=4)
