"""What every test relies on: this checkout is what gets imported, and seeds are fixed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    # Tests side by side share the cores; torch and the scripts that tests start read this.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // int(workers))))

import torch

import polyvision
from polyvision import kernels

ROOT = Path(__file__).resolve().parent.parent


def pytest_sessionstart() -> None:
    # The two lie in different folders, so an environment of another checkout can mix them up.
    for module in (polyvision, kernels):
        place = Path(str(module.__file__)).resolve()
        if not place.is_relative_to(ROOT):
            pytest.exit(
                f"{module.__name__} is imported from {place.parent}, not from this checkout; "
                f"install it first: pip install -e '.[dev]'",
                returncode=2,
            )


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def root() -> Path:
    """The top of the repository."""
    return ROOT
