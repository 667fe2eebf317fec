"""Runs ``interpreter_cases.py`` in Triton's interpreter: the kernels' numerics without a GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

CASES = Path(__file__).with_name("interpreter_cases.py")


@pytest.mark.parametrize("part", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_in_the_interpreter(part, root):
    # `-o addopts=` drops the quiet mode of the project: the count at the end is read below.
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [*command, "-x", "-m", part, str(CASES)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=root,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    assert " passed" in run.stdout
