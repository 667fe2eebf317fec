"""An activation that a user's own module registers: trained, then read where it is not known."""

import json
import subprocess
import sys

import pytest

from polyvision import PolyvisionError, activation_names, load_model
from polyvision.activations import registry
from polyvision.cli import main
from polyvision.training import restore

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
def own(tmp_path, monkeypatch, train):
    """Train with an activation of the module ``own_acts``, export, and forget it again."""
    (tmp_path / "own_acts.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    known = dict(registry._REGISTRY)
    monkeypatch.setattr(registry, "_REGISTRY", dict(known))
    __import__("own_acts")
    assert "mine" in activation_names()
    train("language", "act=mine", "act.alpha=0.5", "trainer.max_steps=1")
    (run,) = tmp_path.glob("runs/*/*/*/mine*/seed0")
    assert main(["export", str(run), "--output", str(tmp_path / "export")]) == 0
    monkeypatch.setattr(registry, "_REGISTRY", known)
    yield run
    sys.modules.pop("own_acts")


def test_what_reads_it_says_what_to_import(own, tmp_path, capsys, train):
    for read, place in (
        (load_model, own),
        (load_model, tmp_path / "export"),
        (restore.load_model, own),
        (lambda folder: train("language", "act=relu", f"resume={folder}"), own),
    ):
        with pytest.raises(PolyvisionError, match="'mine' is not registered in this proc"):
            read(place)
    for command in (["analyse", "rank"], ["export"], ["generate"], ["evaluate"]):
        assert main([*command, str(own), *(["--data", "x"] if "evaluate" in command else [])]) == 2
        said = capsys.readouterr().err
        assert "In Python import own_acts first; a command is then" in said
        assert "does not fit this version" not in said
    assert main(["compare", str(own)]) == 0  # it needs only what the run recorded
    # A script has no name to import, and a run of an earlier version has no record.
    path = own / "environment.json"
    record = json.loads(path.read_text())
    assert record["activation_registered_by"] == "own_acts"
    path.write_text(json.dumps(record | {"activation_registered_by": "/home/me/train.py"}))
    with pytest.raises(PolyvisionError, match=r"/home/me/train.py did that.*Move it to a module"):
        load_model(own)
    path.unlink()
    with pytest.raises(PolyvisionError, match=r"unknown activation 'mine'.* One of your own is kn"):
        load_model(own)


@pytest.mark.slow
def test_the_command_of_the_message_works(own, tmp_path, capsys):
    assert main(["export", str(own)]) == 2
    code = capsys.readouterr().err.split('-c "')[1].split('"')[0]
    done = subprocess.run(
        [sys.executable, "-c", code, "export", str(own), "--output", str(tmp_path / "again")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "again" / "model.safetensors").is_file()
