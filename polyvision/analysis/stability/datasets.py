"""The real data of the training contrast, whole in memory: digits, and the bytes of a book."""

from __future__ import annotations

import numpy as np
import torch

from polyvision.analysis.stability.training import Batches
from polyvision.data.images.augment import Augment
from polyvision.data.images.registry import collate, load_image_data
from polyvision.data.text.file import TokenWindows, load_book

__all__ = ["book", "digits"]

_CONTEXT = 32


def digits(device: str, *, image_size: int = 8) -> Batches:
    """Return the 1,437 training digits as (N, 1, size, size), normalised to mean 0 and variance 1.

    Args:
        device: where they are put.
        image_size: height and width; the originals have 8.
    """
    data = load_image_data(
        "digits",
        image_size=image_size,
        augment=Augment(crop_scale=(1.0, 1.0), hflip=0.0, crop_pct=1.0),
        mean=(0.0,) * 3,
        std=(1.0,) * 3,
    )
    size = len(data.train)  # type: ignore[arg-type]
    images, labels = collate([data.train[i] for i in range(size)])
    gray = images[:, :1].double()  # the sums are then the same with any number of threads
    gray = ((gray - gray.mean()) / gray.std()).float()
    return Batches(gray.to(device), labels.to(device), len(data.classes))


def book(device: str, *, windows: int = 4096) -> Batches:
    """Return the first bytes of the built-in book as windows of 32, a vocabulary of 256.

    Args:
        device: where they are put.
        windows: how many.
    """
    text = load_book().encode()[: windows * _CONTEXT + 1]
    data = TokenWindows(np.frombuffer(text, np.uint8), _CONTEXT)
    inputs, targets = zip(*(data[i] for i in range(len(data))), strict=True)
    return Batches(torch.stack(inputs).to(device), torch.stack(targets).to(device), 256)
