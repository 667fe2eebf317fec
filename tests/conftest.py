"""What every test relies on: this checkout is what gets imported, and seeds are fixed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    # Tests side by side share the cores; torch and the scripts that tests start read this.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // int(workers))))

# OpenMP threads of GCC's runtime spin for milliseconds after each parallel loop, and take the cores
# from the tests beside them. The runtime reads this once, when torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

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


HOLDER = """
import fcntl, sys, time
with open(sys.argv[1], "a+") as file:
    fcntl.lockf(file, fcntl.LOCK_EX)
    file.truncate(0)
    file.write("4711"), file.flush()
    print("ready", flush=True)
    time.sleep(60)
"""
Hold = Callable[[Path], "subprocess.Popen[bytes]"]


@pytest.fixture
def hold() -> Iterator[Hold]:
    """Lock a folder from another process, which is returned."""
    holders: list[subprocess.Popen[bytes]] = []

    def start(folder: Path) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-S", "-c", HOLDER, str(folder / ".lock")]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        holders.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        return process

    yield start
    for process in holders:
        process.kill()
        process.communicate()


@pytest.fixture(scope="session")
def root() -> Path:
    """The top of the repository."""
    return ROOT
