"""polyvision swap-report, and the names that polyvision.timm.register adds to timm."""

from __future__ import annotations

import importlib.util

import pytest
import timm

import polyvision.timm
from polyvision import PolyNorm, PolyNorm2d
from polyvision.activations import activation_modules
from polyvision.cli import main
from polyvision.errors import PolyvisionError


def test_the_table_of_a_torchvision_model(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["swap-report", "torchvision:resnet18", "--include", "stem", "layer1.*"]
    assert main([*arguments, "--exclude", "layer1.1.relu", "--act", "polyrelu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["site", "was", "how", "role", "dim", "calls"]
    assert lines[1].split() == ["relu", "ReLU", "module", "stem", "-", "1"]
    assert lines[3].split() == ["layer1.0.relu_2", "ReLU", "unshared", "block", "-", "1"]
    assert "layer1.1.relu    ReLU  kept: excluded" in lines
    assert lines[-1] == (
        "polyrelu at 4 sites (2 unshared); 13 kept, of them 0 gates; 0 left over; "
        "16 parameters added"
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("resnet5O", "unknown timm model 'resnet5O'. Did you mean 'resnet50'?"),
        ("torchvision:resnet5O", "unknown torchvision model 'resnet5O'. Did you mean 'resnet50'?"),
        ("torchvison:resnet50", "unknown library 'torchvison' in 'torchvison:resnet50'. Did you"),
    ],
)
def test_unknown_names(name: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["swap-report", name]) == 2
    assert text in capsys.readouterr().err


def test_a_library_that_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["swap-report", "transformers:bert"]) == 2
    assert "transformers is not installed; pip install transformers" in capsys.readouterr().err


@pytest.mark.parametrize(("kind", "sites"), [("bert", 12), ("llama", 32)])
def test_transformers(kind: str, sites: int, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    assert main(["swap-report", f"transformers:{kind}"]) == 0
    assert f"polynorm at {sites} sites ({sites} over dim -1)" in capsys.readouterr().out


@pytest.fixture
def _table(monkeypatch: pytest.MonkeyPatch) -> None:
    create_act = timm.layers.create_act
    table = dict(create_act._ACT_LAYER_DEFAULT)
    monkeypatch.setattr(create_act, "_ACT_LAYER_DEFAULT", table)


@pytest.mark.usefixtures("_table")
def test_timm_learns_the_names() -> None:
    relu = timm.layers.get_act_layer("relu")
    assert polyvision.timm.register() == polyvision.timm.register()
    vit = timm.create_model("test_vit", act_layer="polynorm", num_classes=2)
    resnet = timm.create_model("test_resnet", act_layer="polynorm2d", num_classes=2)
    assert {type(m) for m in activation_modules(vit).values()} == {PolyNorm}
    assert {type(m) for m in activation_modules(resnet).values()} == {PolyNorm2d}
    assert timm.layers.get_act_layer("relu") is relu


def test_a_timm_with_another_table_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(timm.layers.create_act, "_ACT_LAYER_ME")
    with pytest.raises(PolyvisionError, match=r"keeps its activations in another place"):
        polyvision.timm.register()
