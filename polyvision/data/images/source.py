"""Where encoded images come from: files, archives, libraries."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["Source"]


class Source(Protocol):
    """Encoded images by index.

    Whatever grows with the number of images is held in arrays, which worker processes share.
    """

    def __len__(self) -> int:
        """Number of images."""

    def read(self, index: int) -> tuple[Path | BinaryIO, int]:
        """Return a file to decode, or its content, and the label."""

    def name(self, index: int) -> str:
        """Name an image so that a person finds it."""

    def labels(self) -> NDArray[np.int64] | None:
        """Return all labels, or None where that would mean to read the images."""

    def identity(self) -> str:
        """Return a hash of names and labels that does not depend on where the images lie."""
