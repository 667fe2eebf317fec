"""The command line itself: what every verb shares."""

import os
import runpy
import subprocess
import sys
import types

import pytest

import polyvision
from polyvision import cli


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["comprae"], "unknown command 'comprae'. Did you mean 'compare'?"),
        (["env", "--jsn"], "unknown option of polyvision env '--jsn'."),
        (["compare", "runs", "--allwo=seed"], "'--allwo'. Did you mean '--allow'?"),
        (["analyse", "cost", "a", "b"], "polyvision analyse does not take b: see polyvision"),
    ],
)
def test_mistakes_are_one_line(arguments, text, capsys):
    assert cli.main(arguments) == 2
    errors = capsys.readouterr().err
    assert text in errors
    assert errors.count("\n") == 1


def test_a_reader_that_ends_early_is_no_error():
    read, write = os.pipe()
    os.close(read)
    code = "import sys; from polyvision.cli import main; sys.exit(main(['env']))"
    result = subprocess.run(
        [sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, text=True
    )
    os.close(write)
    assert (result.returncode, result.stderr) == (141, "")


def test_ctrl_c_is_one_line(monkeypatch, capsys):
    def stopped(arguments):
        raise KeyboardInterrupt

    verb = types.SimpleNamespace(add_arguments=lambda parser: None, run=stopped)
    monkeypatch.setattr(cli.importlib, "import_module", lambda place: verb)
    assert cli.main(["env"]) == 130
    assert capsys.readouterr().err == "polyvision env: interrupted\n"


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"polyvision {polyvision.__version__}\n"


@pytest.mark.parametrize("module", ["polyvision", "polyvision.cli"])
@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_python_dash_m_runs_the_command(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["polyvision", "env"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(module, run_name="__main__")
    assert ended.value.code == 0
    assert "devices" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["polyvision", "no-such-verb"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(module, run_name="__main__")
    assert ended.value.code == 2
