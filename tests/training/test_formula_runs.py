"""``act=formula`` on the command line: composed, refused, trained, exported, read again."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from polyvision import PolyvisionError, load_model
from polyvision.activations import activation_modules
from polyvision.cli import main
from polyvision.training import restore
from polyvision.training.app import main as train_main
from polyvision.training.config.compose import compose
from polyvision.training.config.overrides import combinations

MISH = "x * tanh(softplus(b * x))"
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("task", ["vision", "language"])
def test_a_formula_needs_no_quotes_but_those_of_the_shell(task):
    for given in (MISH, f'"{MISH}"', f"'{MISH}'"):
        (config,) = compose(task, ["act=formula", f"act.f={given}", "act.init.b=1"])
        assert config.act.options == {"f": MISH, "init": {"b": 1.0}, "num_parameters": 1}
    (config,) = compose(task, ["act=formula", "act.f=max(x, 0)"])
    assert config.act.options == {"f": "max(x, 0)", "init": None, "num_parameters": 1}


def test_several_formulas_make_several_runs_in_folders_of_their_own():
    given = ["act=formula", "act.f='x * b','x / (1 + abs(b * x))'", "act.init.b=1,2"]
    labels = [config.act.label for config in compose("vision", given)]
    assert len(set(labels)) == 4
    assert labels[0] == "formula-f_x_b_c3c74b-initb1.0"
    assert not any(set(label) & set(" /*()'") for label in labels)
    assert combinations(given)[1][1:] == ["act.f='x * b'", "act.init.b=2"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["act.f=x * tahn(x)"], "act=formula: formula 'x * tahn(x)', column 5: unknown function"),
        (["act.f=x * b"], "column 5: unknown name 'b'"),
        (["act.f=x * b", "act.init.b=q"], "act.init.b must be a number, got 'q'"),
        (["act.f="], "column 1: it is empty"),
        (["act.f=x\\"], "column 2: '\\\\' has no meaning"),
        (['act.f=x"'], "column 2: '\"' has no meaning"),
    ],
)
def test_a_mistake_is_one_line(given, said):
    with pytest.raises(PolyvisionError) as error:
        compose("language", ["act=formula", *given])
    assert said in str(error.value)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("given", "column"), [("__import__('os').system('touch broken')", 12), ("x * (b", 5)]
)
def test_the_trainer_ends_with_2(given, column, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train_lm.py", "act=formula", f"act.f={given}"])
    with pytest.raises(SystemExit) as stop:
        train_main("language")
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("error: act=formula: formula ")
    assert f", column {column}: " in said
    assert not list(tmp_path.iterdir())


def test_the_script_ends_with_2(tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "train_vision.py"), "act=formula", "act.f=x.real"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "column 1: 'x.real' is an attribute" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("task", ["vision", "language"])
def test_a_run_keeps_its_formula(task, train, tmp_path):
    text = "b * x / rms(x) + relu(x)"
    train(task, "act=formula", f"act.f={text}", "act.init.b=0.5", "trainer.max_steps=2")
    (run,) = tmp_path.glob(f"runs/{task}/*/*/formula*/seed0")
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["act"]["options"] == {"f": text, "init": {"b": 0.5}, "num_parameters": 1}
    assert main(["export", str(run), "--output", str(tmp_path / "e"), "--weights", "last"]) == 0
    model, exported = load_model(run, weights="last"), load_model(tmp_path / "e")
    again = restore.load_model(run / "checkpoints" / "last.ckpt").module.model
    sites = activation_modules(model)
    assert sites
    for name, module in sites.items():
        assert module.f == text
        assert module.b.item() != 0.5
        for other in (exported, again):
            assert torch.equal(activation_modules(other)[name].b, module.b)
