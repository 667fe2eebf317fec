"""Whole files, locked folders, and the folder of caches: what more than one package writes."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from polyvision.errors import PolyvisionError

if sys.platform != "win32":
    import fcntl

__all__ = ["LOCK", "cache_folder", "only_writer", "partial_of", "whole_file", "write_whole"]

# The file that is locked; it holds the number of the process and goes with it.
LOCK = ".lock"


def cache_folder() -> Path:
    """Return ``$POLYVISION_CACHE``, else ``polyvision`` in ``$XDG_CACHE_HOME`` or ``~/.cache``.

    A leading ``~`` in a variable is the home folder: a shell expands it in ``X=~/c command``, but
    not inside quotes, nor do files of environment variables.
    """
    own = os.environ.get("POLYVISION_CACHE")
    if own:
        return Path(os.path.expanduser(own))
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expanduser(base)) / "polyvision"


def partial_of(path: Path) -> Path:
    """Return the name under which a file is written before it is whole."""
    return path.with_name(f".{path.name}.partial")


@contextlib.contextmanager
def whole_file(path: Path, *, shared: bool = False) -> Iterator[Path]:
    """Let the block write the file it is given, flush that to the disk, and give it its name.

    The file is whole then, or still what it was.

    Args:
        path: the file.
        shared: several processes may write it at a time; each does under a name of its own.
    """
    partial = partial_of(path)
    if shared:
        partial = partial.with_name(f"{partial.stem}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        yield partial
        with partial.open("r+b") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_whole(path: Path, text: str) -> None:
    """Write ``text`` as UTF-8, so that the file is whole, or still what it was."""
    with whole_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


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
