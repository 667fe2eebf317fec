"""Weights of a plain network in a swapped one: all loaded, the new named, the rest refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

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


def polynomial(act: str = "polynorm", **options: Any) -> nn.Module:
    """Two activations whose coefficients all differ, also from the initial ones."""
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2), nn.ReLU())
    swap_activations(model, act, inputs=torch.empty(1, 3), **options)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model


def kept(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def without_metadata(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return dict(state)


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ({"order": 3}, {"order": 4}, "1 has order 3 in the weights and 4 in the network"),
        ({"order": 4}, {"order": 1}, "3 has order 4 in the weights and 1 in the network"),
        ({}, {"bias": False}, "1 has weight (3,), bias (1,) in the weights and weight (3,) in the"),
        ({"act": "polyprelu"}, {}, "1 "),
    ],
)
def test_coefficients_of_another_form_are_refused_whole(
    old: dict[str, Any], new: dict[str, Any], text: str, named: bool
) -> None:
    state = polynomial(**old).state_dict()
    model = polynomial(**new)
    before = kept(model)
    with pytest.raises(PolyvisionError, match=r"not those of the network's .*Nothing was") as error:
        load_pretrained(model, state if named else without_metadata(state))
    assert text in str(error.value)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    # What the message advises.
    plain = {name: value for name, value in state.items() if name[0] in "02"}
    assert load_pretrained(model, plain).loaded == 4
    assert torch.equal(model[1].weight, before["1.weight"])


@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        ("polynorm", "polyrelu", ("PolyNorm", "PolyReLU")),
        ("polyrelu", "polynorm", ("PolyReLU", "PolyNorm")),
        ("polynorm", "polyrelunorm", ("PolyNorm", "PolyReLUNorm")),
    ],
)
@pytest.mark.parametrize("file", [False, True])
def test_coefficients_of_another_activation_are_refused(
    old: str, new: str, names: tuple[str, str], file: bool, tmp_path: Path
) -> None:
    weights: Any = polynomial(old).state_dict()
    model = polynomial(new)
    before = kept(model)
    if file:
        torch.save(weights, tmp_path / "weights.pth")
        weights = tmp_path / "weights.pth"
    with pytest.raises(PolyvisionError, match=f"1 was trained as {names[0]} and is {names[1]}"):
        load_pretrained(model, weights)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    if not file:  # torch's own loading refuses them too
        with pytest.raises(RuntimeError, match=f"1 is {names[1]}, and its coefficients"):
            model.load_state_dict(weights)


def test_the_base_of_polycom_belongs_to_its_function() -> None:
    state = polynomial("polycom", rho="relu").state_dict()
    assert load_pretrained(polynomial("polycom", rho="relu"), state).assumed == 0
    text = r"1 was trained as PolyCom\(rho=ReLU, kind=I\) and is PolyCom\(rho=SiLU, kind=I\)"
    with pytest.raises(PolyvisionError, match=text):
        load_pretrained(polynomial("polycom"), state)


def test_where_nothing_names_the_activation_the_record_says_so(tmp_path: Path) -> None:
    source = polynomial("polynorm")
    save_file(source.state_dict(), tmp_path / "weights.safetensors")
    loaded = load_pretrained(polynomial("polyrelu"), tmp_path / "weights.safetensors")
    assert (loaded.loaded, loaded.assumed, loaded.function) == (8, 4, "PolyReLU")
    assert str(loaded) == (
        "8 tensors loaded, 0 new. The weights do not say which activation their 4 coefficients "
        "were trained with: they were taken for those of PolyReLU"
    )
    # A state_dict says it, so there is nothing to say.
    assert str(load_pretrained(polynomial(), source.state_dict())) == "8 tensors loaded, 0 new"


@pytest.mark.parametrize("place", ["export", "run", "language run"])
def test_the_description_beside_a_file_names_the_activation(place: str, tmp_path: Path) -> None:
    network: dict[str, Any] = {"activation": "polynorm", "activation_options": {"order": 3}}
    if place == "export":
        file = tmp_path / "model.safetensors"
        content = {"polyvision": {"network": network}}
        (tmp_path / "config.json").write_text(json.dumps(content))
        save_file(polynomial().state_dict(), file)
    else:
        file = tmp_path / "checkpoints" / "best.ckpt"
        file.parent.mkdir()
        content = {"shape": network} if place == "language run" else network
        (tmp_path / "network.json").write_text(json.dumps(content))
        state = {f"model.{name}": value for name, value in polynomial().state_dict().items()}
        torch.save({"state_dict": state, "global_step": 1}, file)
    loaded = load_pretrained(polynomial(), file)
    assert (loaded.loaded, loaded.assumed) == (8, 0)
    assert loaded.prefix == ("" if place == "export" else "model.")
    with pytest.raises(PolyvisionError, match="trained as PolyNorm and is PolyReLU"):
        load_pretrained(polynomial("polyrelu"), file)


WRAPPED: dict[str, Callable[[nn.Module], dict[str, Tensor]]] = {
    "module.": lambda m: nn.DataParallel(m).state_dict(),
    "_orig_mod.": lambda m: torch.compile(m).state_dict(),
    "module._orig_mod.": lambda m: nn.DataParallel(torch.compile(m)).state_dict(),
    "module.n_averaged": lambda m: torch.optim.swa_utils.AveragedModel(m).state_dict(),
    "net.": lambda m: nn.ModuleDict({"net": m}).state_dict(),
}


@pytest.mark.parametrize("wrapper", WRAPPED)
@pytest.mark.parametrize("file", [False, True])
def test_names_that_wrappers_add_are_taken_off(wrapper: str, file: bool, tmp_path: Path) -> None:
    source, model = polynomial(), polynomial()
    weights: Any = WRAPPED[wrapper](source)
    assert set(weights).isdisjoint(model.state_dict())
    if file:
        torch.save(weights, tmp_path / "weights.pth")
        weights = tmp_path / "weights.pth"
    loaded = load_pretrained(model, weights)
    assert (loaded.loaded, loaded.new, loaded.assumed) == (8, (), 0)
    assert wrapper.startswith(loaded.prefix)
    assert f"without the prefix {loaded.prefix!r} of all names" in str(loaded)
    x = torch.randn(2, 3)
    assert torch.equal(model(x), source(x))
    with pytest.raises(PolyvisionError, match="1 was trained as PolyNorm and is PolyReLU"):
        load_pretrained(polynomial("polyrelu"), weights)


def test_a_wrapped_network_takes_plain_weights() -> None:
    source, model = polynomial(), polynomial()
    loaded = load_pretrained(torch.compile(model), source.state_dict())
    assert (loaded.loaded, loaded.prefix) == (8, "")
    model[2] = torch.compile(model[2])
    nn.init.zeros_(source[2].weight)
    assert load_pretrained(model, source.state_dict()).loaded == 8
    assert not model.state_dict()["2._orig_mod.weight"].any()


class Tied(nn.Module):
    """As in GPT-2 and BERT: the head is the embedding, and files hold it once."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.act = nn.GELU()
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.act(self.embed(tokens)))
        return logits


def test_of_tied_tensors_one_is_enough(tmp_path: Path) -> None:
    tokens = torch.arange(7)[None]
    source, *models = Tied(), Tied(), Tied(), Tied()
    for model in (source, *models):
        swap_activations(model, "polynorm", inputs=tokens)
    nn.init.normal_(source.act.weight)
    state = source.state_dict()
    assert {"embed.weight", "head.weight"} < set(state)
    for model, left_out in zip(models, ("head.weight", "embed.weight", None), strict=True):
        weights = {name: value for name, value in state.items() if name != left_out}
        load_pretrained(model, weights)
        assert torch.equal(model(tokens), source(tokens))
        assert model.head.weight is model.embed.weight
    with pytest.raises(PolyvisionError, match=r"missing: embed\.weight; missing: head\.weight"):
        load_pretrained(Tied(), {})
    state["head.weight"] = torch.zeros(7, 4)
    text = "embed.weight and head.weight are one tensor in the network, and differ in the weights"
    with pytest.raises(PolyvisionError, match=text):
        load_pretrained(models[0], state)


def test_a_file_without_tensors_at_the_top_names_its_entries(tmp_path: Path) -> None:
    torch.save({"epoch": 3, "weights": plain().state_dict()}, tmp_path / "own.pth")
    with pytest.raises(PolyvisionError, match=r"no mapping of names to tensors: it holds epoch, w"):
        load_pretrained(swapped(), tmp_path / "own.pth")
