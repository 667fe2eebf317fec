"""Randomness as a function of its place in the run, so that a resumed run needs no saved state."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch

__all__ = ["derive_seed", "seed_all"]


def derive_seed(*parts: int | str) -> int:
    """Hash the parts (run seed, purpose, epoch, index ...) to a 63-bit seed."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_all(*parts: int | str, cuda: bool = False) -> None:
    """Seed Python, NumPy and torch from the parts; the GPU's generators too with ``cuda``.

    torch.manual_seed is avoided: in a process without a GPU context it queues a call each time.
    """
    seed = derive_seed(*parts)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    if cuda:
        torch.cuda.manual_seed_all(seed)
