"""Exports: the same function, read by polyvision, by plain timm and without either."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

import polyvision
import polyvision.timm
from polyvision import PolyvisionError, load_model
from polyvision.models.language.transformer import TransformerShape
from polyvision.models.trained import export as export_command
from polyvision.models.trained.export import export_saved
from polyvision.models.trained.network import LanguageNetwork, VisionNetwork, network_to_plain
from polyvision.models.trained.saved import open_saved


def vision(activation="polynorm", name="test_resnet", **changes):
    values = {
        "activation_options": {},
        "options": {},
        "on_leftover": "error",
        "classes": ["ant", "bee", "cat"],
        "in_chans": 3,
        "image_size": 32,
        "mean": [0.1, 0.2, 0.3],
        "std": [0.5, 0.6, 0.7],
        "crop_pct": 0.9,
        "interpolation": "bilinear",
    }
    return VisionNetwork(name=name, activation=activation, **(values | changes))


def language():
    return LanguageNetwork(
        TransformerShape(
            vocab_size=256, context=16, width=16, layers=1, heads=2, ffn_hidden=48, kv_heads=1
        )
    )


def make_run(folder: Path, network, **checkpoints: int) -> Path:
    """Write the run folder of a network with random weights: checkpoint name -> step."""
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.yaml").write_text(f"task: {network.task}\n")
    (folder / "network.json").write_text(json.dumps(network_to_plain(network)))
    rows = [{"step": s, "val/loss": s / 100, "train/loss": 9} for s in checkpoints.values()]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + '\n{"step": 1, "va')
    if network.task == "language":
        (folder / "tokenizer.json").write_text('{"type": "bytes"}')
    for name, step in checkpoints.items():
        torch.manual_seed(step)
        state = network.build().state_dict()
        for value in state.values():
            if value.is_floating_point():
                value.copy_(torch.rand_like(value) + 0.1 if value.ndim < 2 else value)
        torch.save(
            {"state_dict": {f"model.{k}": v for k, v in state.items()}, "global_step": step},
            folder / "checkpoints" / f"{name}.ckpt",
        )
    return folder


def export(run, *arguments):
    parser = argparse.ArgumentParser()
    export_command.add_arguments(parser)
    return export_command.run(parser.parse_args([str(run), *map(str, arguments)]))


@pytest.fixture(scope="module")
def polynorm_run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "seed0", vision(), best=7, last=9)


@pytest.fixture(scope="module")
def polynorm_export(polynorm_run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exports") / "polynorm"
    export(polynorm_run, "--output", folder)
    return folder


@torch.no_grad()
def outputs(model, size=32):
    images = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))
    layout = torch.channels_last  # sums run in the order of the layout
    return model.eval().to(memory_format=layout)(images.to(memory_format=layout))


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_plain_timm_reads_an_export_strictly(activation, tmp_path):
    run = make_run(tmp_path / "run", vision(activation), best=7)
    text = export(run, "--output", tmp_path / "out")
    assert f'timm.create_model("local-dir:{tmp_path}/out", pretrained=True)' in text
    assert "register" not in text
    model = timm.create_model(f"local-dir:{tmp_path}/out", pretrained=True)
    expected = outputs(load_model(run))
    assert torch.equal(outputs(model), expected)
    if activation == "relu":  # the file alone, for the architecture as timm has it
        overlay = {"file": str(tmp_path / "out" / "model.safetensors"), "num_classes": 3}
        bare = timm.create_model(
            "test_resnet", num_classes=3, pretrained=True, pretrained_cfg_overlay=overlay
        )
        assert torch.equal(outputs(bare), expected)
    config = timm.data.resolve_data_config({}, model=model)
    assert list(config["mean"]) == [0.1, 0.2, 0.3]
    assert list(config["std"]) == [0.5, 0.6, 0.7]
    assert (config["crop_pct"], config["interpolation"]) == (0.9, "bilinear")
    assert list(config["input_size"]) == [3, 32, 32]
    assert model.pretrained_cfg["label_names"] == ["ant", "bee", "cat"]


def test_timm_reads_coefficients_after_register(polynorm_run, polynorm_export):
    polyvision.timm.register()
    model = timm.create_model(f"local-dir:{polynorm_export}", pretrained=True)
    expected = outputs(load_model(polynorm_run))
    assert torch.equal(outputs(model), expected)
    plain = timm.create_model("test_resnet", num_classes=3)
    polyvision.swap_activations(plain, "polynorm")
    loaded = polyvision.load_pretrained(plain, polynorm_export / "model.safetensors")
    assert not loaded.new
    assert torch.equal(outputs(plain), expected)


@pytest.mark.slow
def test_where_timm_cannot_build_the_network_the_export_says_so(tmp_path):
    run = make_run(tmp_path / "run", vision(activation_options={"order": 4}), best=7)
    text = export(run, "--output", tmp_path / "out")
    assert "local-dir" not in text
    assert "polyvision.load_model" in text
    with pytest.raises(RuntimeError, match="Unexpected key"):
        timm.create_model(f"local-dir:{tmp_path}/out", pretrained=True)
    assert torch.equal(outputs(load_model(tmp_path / "out")), outputs(load_model(run)))


@pytest.mark.slow
def test_a_network_of_one_image_size_keeps_it(tmp_path):
    run = make_run(tmp_path / "run", vision("gelu", "test_vit", image_size=64), best=7)
    export(run, "--output", tmp_path / "out")
    model = timm.create_model(f"local-dir:{tmp_path}/out", pretrained=True)
    assert torch.equal(outputs(model, 64), outputs(load_model(run), 64))


def test_config_says_what_the_weights_are(polynorm_export):
    ours = json.loads((polynorm_export / "config.json").read_text())["polyvision"]
    assert ours["activation"]["name"] == "polynorm"
    assert ours["activation"]["coefficients"].startswith("ascending")
    assert set(ours["activation"]["sites"].values()) == {1}
    assert ours["weights"] == "best"
    assert ours["step"] == 7
    assert ours["metrics"] == {"val/loss": 0.07}
    tensors = load_file(polynorm_export / "model.safetensors")
    assert all(f"{site}.weight" in tensors for site in ours["activation"]["sites"])


def test_load_model_reads_run_checkpoint_and_export_alike(polynorm_run, polynorm_export):
    best, last = (polynorm_run / "checkpoints" / f"{name}.ckpt" for name in ("best", "last"))
    state = torch.get_rng_state()
    expected = outputs(load_model(best))
    assert torch.equal(torch.get_rng_state(), state)
    assert not load_model(str(polynorm_run)).training
    assert torch.equal(outputs(load_model(polynorm_export)), expected)
    tensors = open_saved(best).tensors
    for place in (polynorm_run, polynorm_export / "model.safetensors"):
        found = open_saved(place).tensors
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert open_saved(polynorm_run, weights="last").source == last
    assert open_saved(last).step == 9


def test_language_models_export_with_their_tokenizer(tmp_path):
    run = make_run(tmp_path / "run", language(), last=3)
    text = export(run, "--output", tmp_path / "out", "--format", "safetensors", "torch-export")
    assert "timm" not in text
    assert "max error" in text
    tokens = torch.arange(22).view(2, 11)
    model, again = load_model(run), load_model(tmp_path / "out")
    assert torch.equal(model(tokens), again(tokens))
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"type": "bytes"}'
    program = torch.export.load(tmp_path / "out" / "model.pt2").module()
    torch.testing.assert_close(program(tokens), model(tokens), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_programs_compute_the_same_for_any_batch(tmp_path):
    pytest.importorskip("onnxscript", reason="needs the packages onnx and onnxscript")
    run = make_run(tmp_path / "run", vision("polyrelu", "test_convnext"), best=7)
    text = export(run, "--output", tmp_path / "out", "--format", "onnx", "torch-export")
    assert text.count("max error") == 2
    program = torch.export.load(tmp_path / "out" / "model.pt2")
    assert "polyvision" not in program.graph_module.code
    images = torch.randn(5, 3, 32, 32)
    torch.testing.assert_close(
        program.module()(images), load_model(run)(images), rtol=1e-4, atol=1e-5
    )
    with pytest.raises(PolyvisionError, match=r"no model\.safetensors"):
        load_model(tmp_path / "out")


def test_a_program_that_computes_something_else_is_refused(tmp_path, monkeypatch):
    run = make_run(tmp_path / "run", language(), last=3)
    real = torch.export.load
    monkeypatch.setattr(torch.export, "load", lambda path: Wrong(real(path)))
    with pytest.raises(PolyvisionError, match="computes something else than the network"):
        export(run, "--output", tmp_path / "out", "--format", "torch-export")
    assert {p.name for p in tmp_path.iterdir()} == {"run"}


class Wrong:
    def __init__(self, program):
        self.program = program

    def module(self):
        inner = self.program.module()
        return lambda x: 1.01 * inner(x)


def test_mistakes_are_named(polynorm_run, polynorm_export, tmp_path, monkeypatch):
    def refused(match, path, *arguments):
        with pytest.raises(PolyvisionError, match=match):
            export(path, "--output", tmp_path / "never", *arguments)
        assert not (tmp_path / "never").exists()

    refused("does not exist", tmp_path / "nothing")
    refused("neither a run folder", tmp_path)
    refused("no averaged weights", polynorm_run, "--weights", "ema")
    refused("one checkpoint", polynorm_run / "checkpoints" / "best.ckpt", "--weights", "last")
    refused("holds the best weights, not last", polynorm_export, "--weights", "last")
    refused("no checkpoint yet", make_run(tmp_path / "young", vision()))
    late = make_run(tmp_path / "late", vision(), last=3)
    refused("no checkpoint yet.*it has last.ckpt", late, "--weights", "best")
    loose = tmp_path / "loose.ckpt"
    loose.write_bytes((polynorm_run / "checkpoints" / "best.ckpt").read_bytes())
    refused("nothing says which network", loose)
    monkeypatch.setitem(__import__("sys").modules, "onnxscript", None)
    refused(
        r"needs the package onnxscript: pip install 'polyvision\[onnx\]'",
        polynorm_run,
        "--format",
        "onnx",
    )


def test_damaged_files_are_named(polynorm_run, polynorm_export, tmp_path):
    def broken(source, file, content):
        folder = tmp_path / f"{source.name}-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(source, folder)
        (folder / file).write_bytes(content)
        return folder

    for source, file, content, match in (
        (polynorm_run, "network.json", b"{", "network.json is damaged"),
        (polynorm_run, "network.json", b"{}", "does not describe a network"),
        (polynorm_run, "network.json", b'{"task": "vision", "nam": 1}', "does not describe"),
        (polynorm_run, "checkpoints/best.ckpt", b"", "cannot be read as weights"),
        (polynorm_export, "config.json", b'{"architecture": "x"}', "not written by polyvision"),
        (polynorm_export, "config.json", b"[]", "holds no keys"),
        (polynorm_export, "model.safetensors", b"zz", "cannot be read as weights"),
    ):
        with pytest.raises(PolyvisionError, match=match):
            load_model(broken(source, file, content))
    short = broken(polynorm_export, "new", b"")
    tensors = load_file(short / "model.safetensors")
    tensors.pop(next(iter(tensors)))
    save_file(tensors, short / "model.safetensors")
    with pytest.raises(PolyvisionError, match=r"its content is not what was written \(SHA-256"):
        load_model(short)
    config = json.loads((short / "config.json").read_text())
    del config["polyvision"]["sha256"]  # as in an export of an earlier version
    (short / "config.json").write_text(json.dumps(config))
    with pytest.raises(PolyvisionError, match="1 entries are missing, new or of another shape"):
        load_model(short)


def test_one_changed_bit_in_an_export_is_seen(polynorm_export, tmp_path):
    folder = Path(shutil.copytree(polynorm_export, tmp_path / "export"))
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-9] ^= 1  # of a tensor: the file has no checksums of its own
    weights.write_bytes(content)
    assert load_file(weights)
    for path in (folder, weights):
        with pytest.raises(PolyvisionError, match=r"model\.safetensors cannot be read as weights"):
            load_model(path)


def zero_head(run):
    """Set the weights of the head to zero, as before a linear probe."""
    path = run / "checkpoints" / "best.ckpt"
    state = torch.load(path)
    for name, value in state["state_dict"].items():
        if name.startswith("model.fc."):
            value.zero_()
    torch.save(state, path)


def test_a_network_whose_output_is_zero_can_be_exported(tmp_path):
    run = make_run(tmp_path / "run", vision("silu"), best=7)
    zero_head(run)
    text = export(run, "--output", tmp_path / "out", "--format", "safetensors", "torch-export")
    assert "max error 0 (0 of the largest output)" in text
    program = torch.export.load(tmp_path / "out" / "model.pt2").module()
    assert not program(torch.randn(3, 3, 32, 32)).any()
    # All activations give the same output then; the file must still name the right one.
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_args"]["act_layer"] == "silu"


def test_nothing_is_overwritten(polynorm_run, tmp_path):
    folder = tmp_path / "there"
    folder.mkdir()
    (tmp_path / "file").touch()
    for place in (folder, tmp_path / "file"):
        with pytest.raises(PolyvisionError, match="exists already: remove it or give another"):
            export(polynorm_run, "--output", place)
    assert not list(folder.iterdir())
    with pytest.raises(PolyvisionError, match="cannot write"):
        export(polynorm_run, "--output", tmp_path / "file" / "below")
    with pytest.raises(PolyvisionError, match=r"unknown format .safetensor.\..*Did you mean"):
        export_saved(open_saved(polynorm_run), tmp_path / "new", ["safetensor"])
