"""The wheel: built from the sdist, inspected, installed away from the checkout, imported."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

# Folder in the repository -> folder in the wheel.
PACKAGES = {
    "polyvision": "polyvision",
    "kernels": "polyvision/kernels",
    "configs": "polyvision/configs",
}

IMPORT = """
import importlib.metadata, json, sys
import polyvision, polyvision.kernels, polyvision.configs, polyvision.data.assets
modules = (polyvision, polyvision.kernels, polyvision.configs, polyvision.data.assets)
for script in importlib.metadata.distribution("polyvision").entry_points:
    assert callable(script.load())
print(json.dumps([m.__file__ for m in modules]))
"""


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command with no trace of the checkout in its environment; return its output."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    # A copy, since setuptools leaves build/ behind and packs what an older build left there.
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for folder in PACKAGES:
        shutil.copytree(root / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / file, copy)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, cwd=copy)
    (built,) = out.glob("*.whl")
    return built


def test_wheel_holds_every_file_of_the_packages_and_nothing_else(root: Path, wheel: Path) -> None:
    expected = {
        f"{place}/{path.relative_to(root / folder).as_posix()}"
        for folder, place in PACKAGES.items()
        for path in (root / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {"polyvision/py.typed", "polyvision/kernels/__init__.py"} <= expected
    names = zipfile.ZipFile(wheel).namelist()
    metadata = {n for n in names if n.split("/")[0].endswith(".dist-info")}
    assert set(names) - metadata == expected
    assert any(n.endswith("/licenses/LICENSE") for n in metadata)


def test_wheel_imports_from_its_own_environment(wheel: Path, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", venv, cwd=tmp_path)
    python = venv / "bin" / "python"
    run(
        *(sys.executable, "-m", "pip", "--python", python),
        *("install", "--quiet", "--no-deps", "--no-index", wheel),
        cwd=tmp_path,
    )
    site = venv / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    # A path added this way lends torch and the rest; the editable install's own hook does not run.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")

    files = json.loads(run(python, "-c", IMPORT, cwd=tmp_path))
    assert all(Path(file).is_relative_to(site) for file in files), files
    assert not (site / "kernels").exists()
    assert not (site / "configs").exists()
