"""What a file that cannot be written or read says: one line that tells how to go on."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

from polyvision.errors import PolyvisionError

__all__ = ["explained"]

# A failed write tells no file name, since only the descriptor was at hand.
_STORAGE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG}


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
