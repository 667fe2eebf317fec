"""What every test relies on: this checkout is what gets imported, and seeds are fixed."""

from __future__ import annotations

from pathlib import Path

import pytest
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
