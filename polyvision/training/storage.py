"""Files of a run folder: whole or absent, of one writer, and errors that say what to do."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from polyvision.errors import PolyvisionError

if sys.platform != "win32":
    import fcntl

__all__ = ["explained", "only_writer", "write_whole"]

_LOCK_FILE = ".lock"
# A failed write tells no file name, since only the descriptor was at hand.
_STORAGE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG}


def write_whole(path: Path, text: str) -> None:
    """Write ``text`` so that the file is whole, or still what it was; never half."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Keep other processes from writing to a run folder while the block runs.

    The system drops the lock when the process ends, however it ends. Where the file system has no
    locks, there is no protection.

    Raises:
        PolyvisionError: another process holds the folder.
    """
    if sys.platform == "win32":  # no such locks
        yield
        return
    with (folder / _LOCK_FILE).open("a+") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            file.seek(0)
            raise PolyvisionError(
                f"{folder} is in use by another process ({file.read().strip() or 'unknown'}): wait "
                f"until it ends, or leave resume= out to start a run beside it"
            ) from error
        except OSError:
            pass
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


@contextlib.contextmanager
def explained(folder: Path, checkpoint: Path) -> Iterator[None]:
    """Turn a file that cannot be written or read into one line that says how to go on.

    Args:
        folder: the run folder.
        checkpoint: the run's last checkpoint, which may not be there yet.

    Raises:
        PolyvisionError: instead of an ``OSError`` about a file or a full or broken disk.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno not in _STORAGE_ERRORS:
            raise
        place = error.filename or f"cannot write in {folder}"
        rest = (
            f"What was saved before is whole: once that is mended, go on with resume={folder}"
            if checkpoint.exists()
            else "The run has no checkpoint yet"
        )
        raise PolyvisionError(f"{place}: {error.strerror}. {rest}") from error
