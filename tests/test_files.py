"""A folder has one writer, until that process is gone."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyvision import files as module
from polyvision.errors import PolyvisionError
from polyvision.files import only_writer


def test_one_writer_at_a_time(tmp_path: Path, hold) -> None:  # type: ignore[no-untyped-def]
    process = hold(tmp_path)
    with pytest.raises(PolyvisionError, match=r"another process \(4711\): wait .* or go away"):
        only_writer(tmp_path, "go away").__enter__()
    process.kill()
    process.wait()
    assert (tmp_path / ".lock").read_text() == "4711"  # a killed process leaves it
    for _ in range(2):
        with only_writer(tmp_path, "go away"):
            assert (tmp_path / ".lock").read_text().strip().isdigit()
        assert not list(tmp_path.iterdir())


def test_a_file_that_its_owner_deleted_meanwhile_locks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / ".lock"
    lockf = module.fcntl.lockf
    owners = 0

    def late(*arguments: object) -> None:
        nonlocal owners
        owners += 1
        if owners < 3:  # another process ends between the opening and the locking
            path.unlink()
        lockf(*arguments)

    monkeypatch.setattr(module.fcntl, "lockf", late)
    with only_writer(tmp_path, "go away"):
        assert path.exists()
    assert owners == 3


def test_without_locks_of_the_file_system_the_block_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(module.fcntl, "lockf", none)
    with only_writer(tmp_path, "go away"):
        assert (tmp_path / ".lock").exists()
