"""One writer of a folder at a time, among all processes."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from polyvision.errors import PolyvisionError

if sys.platform != "win32":
    import fcntl

__all__ = ["LOCK", "only_writer"]

# The file that is locked; it holds the number of the process and goes with it.
LOCK = ".lock"


@contextlib.contextmanager
def only_writer(folder: Path, otherwise: str) -> Iterator[None]:
    """Keep other processes from writing to a folder while the block runs.

    The system drops the lock when the process ends, however it ends; a file that is left then
    locks nothing. Where the file system has no locks, there is no protection.

    Args:
        folder: the folder, which exists.
        otherwise: what to do instead of waiting, for the error.

    Raises:
        PolyvisionError: another process holds the folder.
        OSError: the folder cannot be written.
    """
    if sys.platform == "win32":  # no such locks
        yield
        return
    path = folder / LOCK
    with _locked(path, otherwise) as file:
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                path.unlink()


def _locked(path: Path, otherwise: str) -> IO[str]:
    """Open and lock the file."""
    while True:
        file = path.open("a+", encoding="utf-8")
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            file.close()
            raise PolyvisionError(
                f"{path.parent} is in use by another process ({holder}): wait until it ends, or "
                f"{otherwise}"
            ) from error
        except OSError:
            return file
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        file.close()  # its owner ended, and deleted it, since it was opened
