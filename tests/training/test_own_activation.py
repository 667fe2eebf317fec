"""An activation that a user's own module or file registers: trained, then read elsewhere."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from polyvision import PolyvisionError, activation_names, load_model
from polyvision.activations import load_plugins, registry
from polyvision.cli import main
from polyvision.training import restore
from polyvision.training.run.folder import Run

ROOT = Path(__file__).parents[2]
MODULE = """
from torch import Tensor, nn
from polyvision import register_activation

@register_activation("mine", kind="pointwise", source="a user", formula="alpha x")
class Mine(nn.Module):
    def __init__(self, inplace: bool = False, *, alpha: float = 2.0) -> None:
        super().__init__()
        self.alpha = alpha

    def forward(self, x: Tensor) -> Tensor:
        return self.alpha * x
"""


@pytest.fixture
def forget(monkeypatch):
    """Return what makes this process like one in which no plugin was loaded."""
    activation_names()
    known, modules = dict(registry._REGISTRY), set(sys.modules)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def undo():
        monkeypatch.setattr(registry, "_REGISTRY", dict(known))
        for name in set(sys.modules) - modules:
            if name == "own_acts" or name.startswith(registry.FILE_PLUGIN):
                del sys.modules[name]

    undo()
    yield undo
    undo()


@pytest.fixture(params=["own_acts", "own_acts.py"])
def own(request, tmp_path, monkeypatch, train, forget):
    """Train with an activation of the plugin ``own_acts``, export, and forget it again."""
    (tmp_path / "own_acts.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    given = ["act=mine", "act.alpha=0.5", "trainer.max_steps=1", f"plugins=[{request.param}]"]
    train("language", *given)
    assert "mine" in activation_names()
    (run,) = tmp_path.glob("runs/*/*/*/mine*/seed0")
    assert main(["export", str(run), "--output", str(tmp_path / "export")]) == 0
    forget()
    assert "mine" not in activation_names()
    return run


def test_what_reads_it_says_which_plugin_it_needs(own, tmp_path, capsys, train):
    (plugin,) = yaml.safe_load((own / "config.yaml").read_text())["plugins"]
    named = plugin if plugin == "own_acts" else str(tmp_path / "own_acts.py")
    for read, place in (
        (load_model, own),
        (load_model, tmp_path / "export"),
        (restore.load_model, own),
        (restore.load_model, Run(own).last),
        (lambda folder: train("language", "act=relu", f"resume={folder}"), own),
    ):
        with pytest.raises(PolyvisionError, match="'mine' is not registered in this proc"):
            read(place)
    for command in (["analyse", "rank"], ["export"], ["generate"], ["evaluate"]):
        assert main([*command, str(own), *(["--data", "x"] if "evaluate" in command else [])]) == 2
        said = capsys.readouterr().err
        assert f"Add plugins=[{named}] to the command" in said
        assert "does not fit this version" not in said
    assert main(["compare", str(own)]) == 0  # it needs only what the run recorded
    # A file that is no longer there, and a run of an earlier version, which has no record.
    path = own / "environment.json"
    record = json.loads(path.read_text())
    assert record["activation_registered_by"] == named
    path.write_text(json.dumps(record | {"activation_registered_by": "/home/me/train.py"}))
    with pytest.raises(
        PolyvisionError, match=r"/home/me/train.py did that.*or the place where that file lies now"
    ):
        load_model(own)
    path.unlink()
    with pytest.raises(PolyvisionError, match=r"unknown activation 'mine'.* One of your own needs"):
        load_model(own)


def test_with_the_plugin_everything_reads_it(own, tmp_path, capsys, forget, train):
    plugin = f"plugins=[{tmp_path / 'own_acts.py'}]"  # also where the run named the module
    assert main(["export", str(own), "--output", str(tmp_path / "again"), plugin]) == 0
    forget()
    assert main([plugin, "analyse", "rank", str(own)]) == 0
    forget()
    train("language", "act=mine", "act.alpha=0.5", "trainer.max_steps=1", plugin, f"resume={own}")
    forget()
    with pytest.raises(PolyvisionError, match="'mine' is not registered in this process"):
        load_model(own)
    load_plugins([tmp_path / "own_acts.py"])
    for place in (own, tmp_path / "export", tmp_path / "again"):
        assert load_model(place).blocks[0].ffn.activation.alpha == 0.5


def test_a_study_hands_the_plugins_to_its_runs(tmp_path, monkeypatch, forget, capsys):
    (tmp_path / "own_acts.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    seen = []
    monkeypatch.setattr(
        "polyvision.training.ablate.command._train",
        lambda task, planned, *_: seen.extend(each.overrides for each in planned) or ["stopped"],
    )
    monkeypatch.setattr("polyvision.training.ablate.command.report", lambda *_, **__: "")
    with pytest.raises(SystemExit):
        main(["ablate", "order", "plugins=[own_acts.py]", "--seeds", "1", "--steps", "1"])
    assert seen
    assert all("plugins=[own_acts.py]" in overrides for overrides in seen)
    assert "mine" in activation_names()


def test_a_missing_plugin_is_one_line(tmp_path, monkeypatch, capsys, train):
    monkeypatch.chdir(tmp_path)
    assert main(["env", "plugins=[nothere.py]"]) == 2
    assert capsys.readouterr().err.startswith("polyvision: plugins: there is no file nothere.py")
    with pytest.raises(PolyvisionError, match="there is no module 'nothere'"):
        train("vision", "act=relu", "plugins=[nothere]")


@pytest.mark.slow
def test_the_scripts_take_a_plugin_in_every_process(tmp_path, overrides):
    (tmp_path / "own_acts.py").write_text(MODULE)
    done = subprocess.run(
        [
            *(sys.executable, str(ROOT / "train_vision.py"), *overrides["vision"]),
            *("-m", "act=relu,mine", "trainer.max_steps=1", "plugins=[own_acts.py]"),
            "trainer.devices=2",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("runs/vision/*/*/*/seed0/summary.json"))) == 2
