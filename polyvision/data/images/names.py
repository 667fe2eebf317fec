"""Many strings in two arrays, which processes share without ever copying them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

__all__ = ["Names"]


class Names:
    """File names by index.

    A million Python strings weigh 90 MB, and reading one writes its reference count: worker
    processes would copy them page by page. Here they are the bytes of all names and where each
    ends.
    """

    def __init__(self, names: Iterable[str]) -> None:
        encoded = [os.fsencode(name) for name in names]
        self._bytes: NDArray[np.uint8] = np.frombuffer(b"".join(encoded), np.uint8)
        lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
        self._ends = np.concatenate([[0], lengths.cumsum()])

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> str:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return os.fsdecode(self._bytes[self._ends[index] : self._ends[index + 1]].tobytes())

    def digest(self) -> str:
        """Return a hash of all names in order."""
        whole = hashlib.blake2b(self._bytes.data, digest_size=8)
        whole.update(self._ends.data)
        return whole.hexdigest()
