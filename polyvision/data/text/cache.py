"""The user's cache folder: results that can be rebuilt at any time, written atomically.

A cache must never be the reason for a failure: what cannot be read is rebuilt, and what cannot be
written is reported once and left.
"""

from __future__ import annotations

import logging
import time
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np

from polyvision.files import cache_folder, whole_file

__all__ = ["Arrays", "cache_folder", "cached_arrays"]

Arrays = dict[str, np.ndarray]

# A write takes seconds: what is older belongs to a process that was killed.
_LEFT_SECONDS = 3600.0

_log = logging.getLogger(__name__)


def cached_arrays(path: Path, build: Callable[[], Arrays]) -> Arrays:
    """Return the arrays stored in ``path``, or build and store them.

    The file is a NumPy zip archive, whose checksums reveal a damaged file. The name must hold a
    hash of everything the result depends on.

    Args:
        path: the archive, ``*.npz``.
        build: makes the arrays; called when the file is missing or unreadable.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            return dict(archive)
    except FileNotFoundError:
        pass
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        _log.warning("rebuilding the unreadable cache file %s (%s)", path, error)
    arrays = build()
    try:
        _write(path, arrays)
    except OSError as error:
        _log.warning("cannot write the cache file %s (%s); set POLYVISION_CACHE", path, error)
    return arrays


def _write(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write to a neighbour first, so that no reader ever sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f".{path.name}.*.tmp"):
        with suppress(FileNotFoundError):
            if time.time() - left.stat().st_mtime > _LEFT_SECONDS:
                left.unlink()
    with whole_file(path, shared=True) as partial, partial.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
