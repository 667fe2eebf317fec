"""Weights of a plain network in a swapped one: all loaded, the new named, the rest refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from polyvision import load_pretrained, swap_activations
from polyvision.errors import PolyvisionError


def plain() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 1), nn.PReLU(4), nn.Conv2d(4, 2, 1), nn.ReLU())


def swapped() -> nn.Module:
    model = plain()
    swap_activations(model, "polynorm")
    return model


@pytest.mark.parametrize("form", ["mapping", "pth", "nested.pth", "safetensors"])
def test_everything_but_the_coefficients_is_loaded(form: str, tmp_path: Path) -> None:
    state = plain().state_dict()
    weights: dict[str, Tensor] | Path = state
    if form != "mapping":
        weights = tmp_path / f"weights.{form}"
        if form == "safetensors":
            save_file(state, weights)
        else:
            torch.save({"state_dict": state} if form == "nested.pth" else state, weights)
    model = swapped()
    loaded = load_pretrained(model, weights)
    assert loaded.loaded == 4
    assert loaded.new == ("1.weight", "1.bias", "3.weight", "3.bias")
    assert loaded.dropped == ("1.weight",)  # of PReLU
    assert str(loaded) == (
        "4 tensors loaded, 4 new (of activations: 1.weight, 1.bias, 3.weight, 3.bias), "
        "1 of old activations dropped (1.weight)"
    )
    for name in ("0.weight", "0.bias", "2.weight", "2.bias"):
        assert torch.equal(model.state_dict()[name], state[name])


def test_weights_of_the_swapped_network_load_whole() -> None:
    source, model = swapped(), swapped()
    nn.init.normal_(source[1].weight)
    assert load_pretrained(model, source.state_dict()).new == ()
    assert torch.equal(model[1].weight, source[1].weight)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"0.weight": None}, "the weights do not fit Sequential: missing: 0.weight. Nothing was"),
        ({"head.weight": torch.ones(2)}, "left over: head.weight"),
        ({"2.bias": torch.ones(3)}, "2.bias: the network has (2,), the weights (3,)"),
    ],
)
def test_anything_else_is_refused(change: dict[str, Tensor | None], text: str) -> None:
    state = {k: v for k, v in (plain().state_dict() | change).items() if v is not None}
    model = swapped()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(PolyvisionError, match=re.escape(text)):
        load_pretrained(model, state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_files_that_hold_no_tensors(tmp_path: Path) -> None:
    with pytest.raises(
        PolyvisionError, match=r"absent\.pth cannot be read as weights: there is no such"
    ):
        load_pretrained(swapped(), tmp_path / "absent.pth")
    torch.save([1, 2], tmp_path / "list.pth")
    with pytest.raises(PolyvisionError, match=r"holds no mapping of names to tensors"):
        load_pretrained(swapped(), tmp_path / "list.pth")
