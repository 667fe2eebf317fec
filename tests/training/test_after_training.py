"""What comes after training: ``validate=`` and ``finetune=``, on the weights of a small run."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil

import pytest
import torch
from safetensors.torch import save_file

from polyvision import PolyvisionError, load_model
from polyvision.cli import main
from polyvision.models.trained.export import export_saved
from polyvision.models.trained.saved import open_saved
from polyvision.training import restore
from polyvision.training.config.compose import compose
from polyvision.training.config.overrides import check_validation, given_keys
from polyvision.training.session import run_task
from polyvision.training.tasks import language, vision
from polyvision.training.validate import validate

BUILD = {"vision": vision.build_task, "language": language.build_task}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, small_text):
    """Train both tasks for two steps; the overrides are those of ``overrides``."""
    root = tmp_path_factory.mktemp("after")
    common = ["trainer.max_steps=2", "trainer.histograms=false", "trainer.accelerator=cpu"]
    asked = {
        "vision": [
            *common,
            "model=timm",
            "model.name=test_resnet",
            "act=relu",
            "data=fake",
            "data.options.samples=40",
            "data.options.classes=4",
            "data.val_fraction=0.3",
            "data.image_size=32",
            "data.test_size=48",
            "data.workers=0",
            "recipe.batch_size=8",
        ],
        "language": [
            *common,
            "data=text",
            f"data.path={small_text}",
            "data.tokenizer=bytes",
            "model.width=32",
            "model.layers=1",
            "model.heads=2",
            "model.ffn_hidden=96",
            "model.context=32",
        ],
    }
    folders = {}
    for task, given in asked.items():
        (config,) = compose(task, [*given, f"run_root={root}"])
        run_task(config, BUILD[task])
        (folders[task],) = root.glob(f"{task}/*/*/*/seed0")
    return folders, asked


def measure(task, *given):
    check_validation(given)
    (config,) = compose(task, [*given, "trainer.accelerator=cpu", "data.workers=0"])
    return validate(config, BUILD[task], given_keys(given))


@pytest.mark.parametrize("task", ["vision", "language"])
def test_validation_repeats_what_training_measured(task, runs, capsys):
    folder = runs[0][task]
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*")}
    (record,) = measure(task, f"validate={folder}")
    summary = json.loads((folder / "summary.json").read_text())
    assert record["metrics"] == pytest.approx(summary["shown"], rel=1e-6)
    assert record["step"] == 2
    assert "val/loss" in capsys.readouterr().out
    (line,) = (folder / "validation.jsonl").read_text().splitlines()
    assert json.loads(line) == record
    (folder / "validation.jsonl").unlink()
    after = {p: p.stat().st_mtime_ns for p in folder.rglob("*")}
    assert {p for p in after if p != folder} == {p for p in before if p != folder}
    assert all(after[p] == before[p] for p in before if p.is_file())


def test_each_named_set_is_measured_as_in_training(runs, tmp_path, capsys):
    folder = runs[0]["language"]
    for name, text in (("sea", "the sea and the ship "), ("land", "a road, a hill, a town ")):
        (tmp_path / f"{name}.txt").write_text(text * 30)
        prepare = ["prepare-text", f"{tmp_path}/{name}.txt", "--tokenizer", "bytes"]
        assert main([*prepare, "--val-fraction", "0", "--out", f"{tmp_path}/{name}"]) == 0
    sets = [f"data.val.{name}={tmp_path}/{name}" for name in ("sea", "land")]
    (config,) = compose("language", [*runs[1]["language"], *sets, f"run_root={tmp_path}/runs"])
    run_task(config, BUILD["language"])
    (trained,) = (tmp_path / "runs").glob("*/*/*/*/seed0")
    capsys.readouterr()
    (record,) = measure("language", f"validate={trained}")
    summary = json.loads((trained / "summary.json").read_text())["shown"]
    found = record["metrics"]
    assert {name: found[name] for name in summary} == pytest.approx(summary, rel=1e-6)
    more = {f"val/{s}/{m}" for s in ("sea", "land") for m in ("ppl", "bpb")}
    assert set(found) - set(summary) == more
    assert found["val/sea/ppl"] == pytest.approx(math.exp(found["val/sea/loss"]))
    out = " ".join(capsys.readouterr().out.split())
    line = "  ".join(
        f"val/land/{name} {found[f'val/land/{name}']:.4f}" for name in ("loss", "ppl", "bpb")
    )
    assert " ".join([record["kind"], *line.split()]) in out
    # A set of the command line is measured beside those of the run, also for a run without any.
    for run, expected in ((trained, ["sea", "land", "also"]), (folder, ["also"])):
        (record,) = measure("language", f"validate={run}", f"data.val.also={tmp_path}/land")
        assert [k.split("/")[1] for k in record["metrics"] if k.endswith("/bpb")][1:] == expected
        assert record["data"]["val"]["also"] == f"{tmp_path}/land"


def test_preparation_comes_from_the_weights_unless_given(runs, tmp_path):
    folder, output = runs[0]["vision"], f"validate_output={tmp_path}/deep/results.jsonl"
    measure("vision", f"validate={folder}", output, "data.crop_pct=0.5", "data.image_size=64")
    export = tmp_path / "export"
    export_saved(open_saved(folder), export, ["safetensors"])
    fake = ["data=fake", "data.options.classes=4", "data.options.samples=30"]
    measure("vision", f"validate={export}", output, *fake, "data.val_fraction=0.5")
    lines = (tmp_path / "deep" / "results.jsonl").read_text().splitlines()
    first, second = (json.loads(line) for line in lines)
    assert (first["data"]["crop_pct"], first["data"]["image_size"]) == (0.5, 64)
    assert (first["data"]["test_size"], second["data"]["test_size"]) == (None, 48)
    assert first["samples"] == 12
    assert (second["data"]["crop_pct"], second["data"]["image_size"]) == (0.95, 32)
    assert second["data"]["mean"] == first["data"]["mean"]
    assert second["samples"] == 15
    with pytest.raises(PolyvisionError, match="say on what, with data="):
        measure("vision", f"validate={export}")


def test_averaged_weights_are_measured_beside_the_raw_ones(runs, tmp_path, capsys):
    folder = shutil.copytree(runs[0]["vision"], tmp_path / "averaged" / "run")
    last = folder / "checkpoints" / "last.ckpt"
    state = torch.load(last, weights_only=True)
    state["ema"] = {name: 0.5 * value for name, value in state["state_dict"].items()}
    torch.save(state, last)
    raw, averaged = measure("vision", f"validate={last}")
    assert (raw["kind"], averaged["kind"]) == ("last", "ema")
    assert raw["metrics"]["val/loss"] != averaged["metrics"]["val/loss"]
    assert "  ema " in capsys.readouterr().out
    assert len((folder / "validation.jsonl").read_text().splitlines()) == 2
    tensors = open_saved(folder, weights="ema").tensors
    assert torch.equal(tensors["fc.weight"], 0.5 * open_saved(last).tensors["fc.weight"])


def test_other_classes_are_one_error(runs, tmp_path):
    place = f"validate={runs[0]['vision']}"
    with pytest.raises(PolyvisionError, match="trained on 4 classes, the data has 10; only the we"):
        measure("vision", place, "data=digits")
    folder = shutil.copytree(runs[0]["vision"], tmp_path / "other" / "run")
    network = json.loads((folder / "network.json").read_text())
    network["classes"].reverse()
    (folder / "network.json").write_text(json.dumps(network))
    with pytest.raises(PolyvisionError, match="the same names in another order"):
        measure("vision", f"validate={folder}")


def test_validation_refuses_what_it_would_not_use(runs):
    place = f"validate={runs[0]['vision']}"
    for extra in (
        "act=relu",
        "model.name=resnet18",
        "recipe.lr=1",
        "finetune=x",
        "+model.options.a=1",
    ):
        with pytest.raises(PolyvisionError, match="takes network and activation from the weights"):
            measure("vision", place, extra)
    check_validation([place, "recipe.batch_size=4", "precision=bf16", "data=fake"])
    with pytest.raises(PolyvisionError, match=r"is a vision model: run python train_vision\.py"):
        measure("language", place)
    with pytest.raises(PolyvisionError, match="does not exist"):
        measure("vision", "validate=nothing")


def test_damaged_weights_are_seen_by_whatever_reads_them(runs, tmp_path, capsys):
    folders = {}
    for task, folder in runs[0].items():
        folders[task] = shutil.copytree(folder, tmp_path / task / "run")
        for path in (folders[task] / "checkpoints").glob("*.ckpt"):
            tensors = torch.load(path, weights_only=True)["state_dict"]
            content = bytearray(path.read_bytes())
            largest = max(tensors.values(), key=lambda tensor: tensor.nbytes).untyped_storage()
            content[content.index(bytes(largest)) + 2] ^= 1
            path.write_bytes(content)
            torch.load(path, weights_only=True)  # torch sees nothing
    readers = [
        lambda task: load_model(folders[task]),
        lambda task: restore.load_model(folders[task]),
        lambda task: measure(task, f"validate={folders[task]}"),
        lambda task: start(task, runs, tmp_path, f"finetune={folders[task]}"),
    ]
    for task in folders:
        for read in readers:
            with pytest.raises(PolyvisionError, match=r"ckpt cannot be read as .*what was written"):
                read(task)
    for command in (
        ["export", str(folders["vision"])],
        ["analyse", "rank", str(folders["vision"])],
        ["generate", str(folders["language"]), "--prompt", "a"],
        ["evaluate", str(folders["language"]), "--data", "bundled"],
    ):
        assert main(command) == 2
        assert "is not what was written" in capsys.readouterr().err


def start(task, runs, tmp_path, *more):
    (config,) = compose(task, [*runs[1][task], f"run_root={tmp_path}/runs", *more])
    return config, BUILD[task](config)


def weights_line(task):
    return dict(task.plan)["weights"]


def test_finetuning_starts_from_the_same_function(runs, tmp_path):
    folder = runs[0]["vision"]
    _, task = start("vision", runs, tmp_path, f"finetune={folder}")
    images = torch.randn(2, 3, 32, 32).to(memory_format=torch.channels_last)
    assert torch.equal(task.model.eval()(images), load_model(folder)(images))
    assert "92 tensors loaded, 0 new" in weights_line(task)
    path = tmp_path / "plain.safetensors"
    tensors = {k: v.contiguous() for k, v in open_saved(folder).tensors.items()}
    save_file(tensors, path)
    _, task = start("vision", runs, tmp_path, f"finetune={path}")
    assert torch.equal(task.model.eval()(images), load_model(folder)(images))


def test_another_head_and_activation_are_new_and_named(runs, tmp_path):
    source = f"finetune={runs[0]['vision']}"
    config, task = start("vision", runs, tmp_path, source, "act=polynorm", "data.options.classes=5")
    text = weights_line(task)
    assert (
        "90 tensors loaded, 26 new (of the head, for another number of classes: fc.weight" in text
    )
    assert "of activations: " in text
    assert "trained with relu" in text
    run_task(config, vision.build_task)
    (polynorm,) = (tmp_path / "runs").glob("*/*/*/polynorm/seed0")
    state = json.loads((polynorm / "state.json").read_text())
    assert state["settings"]["finetune"] == str(runs[0]["vision"])
    # Coefficients of another activation have the same names and shapes, and are not taken over.
    _, task = start(
        "vision",
        runs,
        tmp_path,
        f"finetune={polynorm}",
        "act=polyrelunorm",
        "data.options.classes=5",
    )
    assert "24 new" in weights_line(task)
    assert "24 tensors of it dropped" in weights_line(task)
    # A resumed run has its weights from the checkpoint: those it started from may be gone.
    gone = dataclasses.replace(config, resume="auto", finetune=config.finetune)
    (polynorm / "summary.json").unlink()
    assert run_task(gone, vision.build_task)["steps"] == 2


def test_language_models_finetune_too(runs, tmp_path):
    source = f"finetune={runs[0]['language']}"
    _, task = start("language", runs, tmp_path, source, "act=relu", "model.context=16")
    assert "trained with polynorm" in weights_line(task)
    with pytest.raises(PolyvisionError, match=r"do not fit .*missing: blocks\.0\.ffn\.gate"):
        start("language", runs, tmp_path, source, "act=swiglu")
    with pytest.raises(PolyvisionError, match="another shape: heads 2 in the weights, 4 here"):
        start("language", runs, tmp_path, source, "model.heads=4")
    with pytest.raises(PolyvisionError, match="vocab_size 256 in the weights"):
        start("language", runs, tmp_path, source, "data.tokenizer=bpe:300")


def test_weights_that_do_not_fit_are_refused(runs, tmp_path):
    source = f"finetune={runs[0]['vision']}"

    def refused(match, *more):
        with pytest.raises(PolyvisionError, match=match):
            start("vision", runs, tmp_path, *more)

    refused("holds a test_resnet, the model is resnet18", source, "model.name=resnet18")
    refused("is a language model, this is vision", f"finetune={runs[0]['language']}")
    refused("choose one source", source, "model.pretrained=true")
    refused("does not exist", "finetune=nothing")
    torch.save({"fc.weight": torch.zeros(4, 96)}, tmp_path / "few.pth")
    refused(r"few\.pth: the weights do not fit.*missing", f"finetune={tmp_path}/few.pth")
    (tmp_path / "text.safetensors").write_text("no")
    refused("cannot be read", f"finetune={tmp_path}/text.safetensors")
