"""Relative paths of a run that Hydra starts in a folder of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

from polyvision.data.images.augment import Augment
from polyvision.data.images.registry import load_image_data
from polyvision.errors import PolyvisionError, looked_for
from polyvision.training.config.compose import compose
from polyvision.training.config.paths import from_folder

ROOT = Path(__file__).parents[3]


def composed(task, *overrides):
    (config,) = compose(task, list(overrides))
    return config


def test_paths_are_taken_from_the_folder_of_the_command(tmp_path, monkeypatch):
    (tmp_path / "made").mkdir()
    (tmp_path / "tokens.json").touch()
    monkeypatch.chdir(tmp_path / "made")

    def moved(task, *overrides):
        return from_folder(composed(task, *overrides), tmp_path)

    for key in ("finetune", "validate", "resume", "validate_output"):
        assert getattr(moved("vision", f"{key}=a/b"), key) == str(tmp_path / "a" / "b")
        assert getattr(moved("vision"), key) is None
    assert moved("vision", "resume=auto").resume == "auto"
    assert moved("vision", "data=folder", "data.root=images").data.root == f"{tmp_path}/images"
    assert moved("vision", "data=folder", "data.root=/images").data.root == "/images"
    home = moved("vision", "data=folder", "data.root='~/images'").data.root
    assert home == str(Path("~/images").expanduser())
    hub = ["data=hfds", "data.options.dataset=made"]
    assert moved("vision", *hub).data.options["dataset"] == f"{tmp_path}/made"
    hub[1] = "data.options.dataset=mnist"
    assert moved("vision", *hub).data.options["dataset"] == "mnist"

    text = ["data=text", "data.path=a.txt", "data.val.b=made"]
    data = moved("language", *text, "data.tokenizer=tokens.json").data
    assert (data.path, data.tokenizer) == (f"{tmp_path}/a.txt", f"{tmp_path}/tokens.json")
    assert data.val == {"b": f"{tmp_path}/made"}
    assert moved("language", *text, "data.tokenizer=bytes").data.tokenizer == "bytes"
    mix = moved("language", "data=shards", "data.mix.one=1", "data.mix.two=2").data
    assert mix.path == str(tmp_path)


def test_elsewhere_nothing_changes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = composed("vision", "data=folder", "data.root=images", "resume=runs/a")
    assert from_folder(config, tmp_path) == config


def test_a_missing_path_is_shown_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert looked_for("a/b") == f" (looked for {tmp_path}/a/b)"
    assert looked_for(f"{tmp_path}/a") == ""
    plain = {"image_size": 8, "mean": (0, 0, 0), "std": (1, 1, 1), "augment": Augment()}
    plain["val_fraction"] = None
    for name, given, missing in (
        ("folder", "pictures", rf"does not exist \(looked for {tmp_path}/pictures\); data.root"),
        ("cifar10", "sets", rf"data.root=sets \(looked for {tmp_path}/sets\) holds no whole"),
        ("wds", ".", rf"no shard in {tmp_path} matches"),
        ("tar", ".", rf"no image in train.tar or train/\*.tar of {tmp_path}: "),
    ):
        with pytest.raises(PolyvisionError, match=missing):
            load_image_data(name, root=given, **plain)


@pytest.mark.slow
@pytest.mark.parametrize("sweep", [False, True])
def test_hydra_in_a_folder_of_its_own(small_text, tmp_path, sweep):
    (tmp_path / small_text.name).write_text(small_text.read_text())
    command = [sys.executable, str(ROOT / "train_lm.py"), "data=text", "hydra.job.chdir=true"]
    command += [f"data.path={small_text.name}", "model.context=32", "dry_run=true"]
    command += ["-m", "seed=0,1"] if sweep else ["hydra.run.dir=own"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Plan\n") == 1 + sweep
