"""Networks with ``save_pretrained``: the way back to a swapped one, and the warning beside it."""

from __future__ import annotations

import copy
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from polyvision import PolyvisionError, load_pretrained, swap_activations
from polyvision.activations import activation_modules


class Pretrained(nn.Module):
    """As in transformers: tied tensors are written once, and some names are others in the file."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.act = nn.GELU()
        self.lm_head = nn.Linear(4, 7, bias=False)
        self.norm = nn.LayerNorm(4)
        self.lm_head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.norm(self.act(self.embed(tokens))))
        return logits

    def save_pretrained(self, folder: Path, renamed: bool = False) -> str:
        state = self.state_dict()
        del state["lm_head.weight"]
        if renamed:
            state["old_norm.weight"] = state.pop("norm.weight")
        save_file(state, Path(folder) / "model.safetensors")
        return "saved"

    @classmethod
    def from_pretrained(cls, folder: Path) -> Pretrained:
        raise NotImplementedError


TOKENS = torch.arange(7)[None]


def swapped(act: str = "polynorm") -> tuple[Pretrained, Any]:
    model = Pretrained()
    report = swap_activations(model, act, inputs=TOKENS)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model, report


@pytest.mark.parametrize("act", ["polynorm", "relu"])
def test_saving_warns_that_from_pretrained_builds_the_plain_network(
    act: str, tmp_path: Path
) -> None:
    model, report = swapped(act)
    with pytest.warns(UserWarning, match="Pretrained has swapped activations, and from_pre") as w:
        assert model.save_pretrained(tmp_path) == "saved"
    assert w[0].filename == __file__
    with pytest.warns(UserWarning, match="swapped activations"):
        copy.deepcopy(model).save_pretrained(folder=tmp_path)
    assert "from_pretrained builds the plain network" in str(report)
    assert ("decays the coefficients" in str(report)) == (act == "polynorm")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Pretrained().save_pretrained(tmp_path)


def test_a_copy_saves_itself(tmp_path: Path) -> None:
    model, _ = swapped()
    twin = copy.deepcopy(model)
    nn.init.zeros_(twin.norm.bias)
    with pytest.warns(UserWarning, match="swapped"):
        twin.save_pretrained(tmp_path)
    again, _ = swapped()
    load_pretrained(again, tmp_path / "model.safetensors")
    assert torch.equal(again(TOKENS), twin(TOKENS))


def test_a_failed_swap_leaves_no_warning(tmp_path: Path) -> None:
    model = Pretrained()
    with pytest.raises(PolyvisionError):
        swap_activations(model, "polynorm", inputs=TOKENS, exclude="nothing")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.save_pretrained(tmp_path)


def test_the_way_back_of_the_docs(tmp_path: Path) -> None:
    model, _ = swapped()
    torch.save(model.state_dict(), tmp_path / "weights.pth")
    again, _ = swapped()
    assert load_pretrained(again, tmp_path / "weights.pth").new == ()
    assert torch.equal(again(TOKENS), model(TOKENS))


@pytest.mark.filterwarnings("ignore:Pretrained has swapped")
def test_files_with_other_names_are_refused_with_the_way_back(tmp_path: Path) -> None:
    model, _ = swapped()
    model.save_pretrained(tmp_path, renamed=True)
    text = "missing: norm.weight; left over: old_norm.weight. Nothing was loaded. A file of save_pr"
    with pytest.raises(PolyvisionError, match=re.escape(text)):
        load_pretrained(model, tmp_path / "model.safetensors")


TRANSFORMERS = {
    "GPT2": ("GPT2LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 16}),
    "Bert": ("BertForMaskedLM", {}),
    "ViT": ("ViTForImageClassification", {"image_size": 32, "patch_size": 8}),
    "GPTNeoX": ("GPTNeoXForCausalLM", {"max_position_embeddings": 16}),
    "Llama": ("LlamaForCausalLM", {"max_position_embeddings": 16}),
}
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL |= {"intermediate_size": 64}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_networks_of_transformers_come_back(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    cls, options = TRANSFORMERS[name]
    sizes = {} if name == "GPT2" else SMALL
    words = {} if name == "ViT" else {"vocab_size": 50}
    config = getattr(transformers, f"{name}Config")(**sizes, **words, **options)
    x = torch.randn(1, 3, 32, 32) if name == "ViT" else torch.arange(8)[None]
    model = getattr(transformers, cls)(config).eval()
    swap_activations(model, "polynorm")
    for module in activation_modules(model).values():
        nn.init.normal_(module.weight)
    want = model(x).logits
    torch.save(model.state_dict(), tmp_path / "weights.pth")
    model.save_pretrained(tmp_path)
    plain = getattr(transformers, cls).from_pretrained(tmp_path).eval()
    assert not torch.equal(plain(x).logits, want)  # why there is a warning
    for again in (plain, type(model)._from_config(config).eval()):
        swap_activations(again, "polynorm")
        assert load_pretrained(again, tmp_path / "weights.pth").new == ()
        assert torch.equal(again(x).logits, want)
    if name in ("ViT", "GPTNeoX"):  # other names in the file
        with pytest.raises(PolyvisionError, match="A file of save_pretrained can have other"):
            load_pretrained(again, tmp_path / "model.safetensors")
    else:
        assert load_pretrained(again, tmp_path / "model.safetensors").new == ()
        assert torch.equal(again(x).logits, want)


@pytest.mark.filterwarnings("ignore")
def test_the_trainer_of_the_docs_spares_coefficients(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    class Trainer(transformers.Trainer):
        def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
            places = tuple(f"{name}." for name in activation_modules(model))
            names = super().get_decay_parameter_names(model)
            return [name for name in names if not name.startswith(places)]

    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=50)
    model = transformers.GPT2LMHeadModel(config)
    swap_activations(model, "polynorm")
    settings = transformers.TrainingArguments(
        output_dir=str(tmp_path), weight_decay=0.1, report_to=[], use_cpu=True
    )
    found = {}
    for cls in (transformers.Trainer, Trainer):
        groups = cls(model=model, args=settings).create_optimizer().param_groups
        decayed = {id(p) for g in groups if g["weight_decay"] for p in g["params"]}
        found[cls] = {n for n, p in model.named_parameters() if id(p) in decayed}
    names = {f"transformer.h.{i}.mlp.act.weight" for i in range(2)}
    assert found[transformers.Trainer] - found[Trainer] == names
