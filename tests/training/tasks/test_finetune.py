"""Which coefficients ``finetune=`` takes over: those of the same function, all or none."""

import json

import pytest
import torch
from safetensors.torch import save_file

from polyvision import PolyvisionError
from polyvision.models.language.transformer import TransformerShape
from polyvision.models.trained.network import LanguageNetwork, network_to_plain
from polyvision.training.tasks.finetune import start_from


def network(activation="polynorm", **options):
    return LanguageNetwork(
        TransformerShape(
            vocab_size=17,
            context=8,
            width=8,
            layers=2,
            heads=2,
            ffn_hidden=24,
            activation=activation,
            activation_options=options,
        )
    )


def trained(folder, described):
    """Write the run folder of a network whose coefficients are not the initial ones."""
    model = described.build()
    for name, parameter in model.named_parameters():
        if ".activation." in name:
            torch.nn.init.normal_(parameter)
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.yaml").write_text("task: language\n")
    (folder / "network.json").write_text(json.dumps(network_to_plain(described)))
    state = {f"model.{name}": value for name, value in model.state_dict().items()}
    torch.save({"state_dict": state, "global_step": 3}, folder / "checkpoints" / "last.ckpt")
    return model


def coefficients(model):
    return {n: v.clone() for n, v in model.state_dict().items() if ".activation." in n}


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ({}, {"order": 4}, "trained with polynorm of order=3; 4 tensors of it dropped"),
        ({}, {"bias": False}, "trained with polynorm of bias=True; 4 tensors of it dropped"),
        (
            {"activation": "polycom", "kind": "II"},
            {"activation": "polycom"},
            "trained with polycom of kind=II; 4 tensors of it dropped",
        ),
        ({}, {"activation": "polyrelu"}, "trained with polynorm; 4 tensors of it dropped"),
        ({}, {"activation": "relu"}, "trained with polynorm; 4 tensors of it dropped"),
    ],
)
def test_coefficients_of_another_function_are_dropped_whole(old, new, said, tmp_path):
    source = trained(tmp_path / "run", network(**old))
    model = network(**new).build()
    before = coefficients(model)
    text = start_from(str(tmp_path / "run"), model, network(**new))
    assert said in text
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    matrix = "blocks.1.ffn.up.weight"
    assert torch.equal(after[matrix], source.state_dict()[matrix])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"eps": 1e-6}, {"eps": 1e-5}),
        ({"activation": "polyprelu", "slope": 0.1}, {"activation": "polyprelu"}),
        ({"activation": "polyrelu", "init": "base"}, {"activation": "polyrelu"}),
        ({"order": 3}, {}),
    ],
)
def test_those_of_the_same_function_are_taken_over(old, new, tmp_path):
    source = trained(tmp_path / "run", network(**old))
    model = network(**new).build()
    text = start_from(str(tmp_path / "run"), model, network(**new))
    assert text.endswith("tensors loaded, 0 new")
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in coefficients(source).items())


def test_a_plain_file_is_taken_for_the_activation_and_that_is_said(tmp_path):
    source = trained(tmp_path / "run", network())
    save_file(source.state_dict(), tmp_path / "weights.safetensors")
    model = network("polyrelu").build()
    text = start_from(str(tmp_path / "weights.safetensors"), model, network("polyrelu"))
    assert "do not say which activation their 4 coefficients were trained with" in text
    torch.save(source.state_dict(), tmp_path / "weights.pth")
    with pytest.raises(PolyvisionError, match=r"finetune=.*was trained as PolyNorm and is PolyR"):
        start_from(str(tmp_path / "weights.pth"), model, network("polyrelu"))


def test_a_checkpoint_of_another_lightning_program_is_a_file_like_any_other(tmp_path):
    source = trained(tmp_path / "run", network())
    folder = tmp_path / "elsewhere" / "checkpoints"
    folder.mkdir(parents=True)
    file = (tmp_path / "run" / "checkpoints" / "last.ckpt").rename(folder / "epoch3.ckpt")
    state = torch.load(file, weights_only=True)
    state["state_dict"] = {f"net.{n}": v for n, v in source.state_dict().items()}
    torch.save(state, file)
    model = network().build()
    text = start_from(str(file), model, network())
    assert "tensors loaded, 0 new, without the prefix 'net.' of all names" in text
    tokens = torch.arange(6)[None]
    assert torch.equal(model(tokens), source(tokens))
