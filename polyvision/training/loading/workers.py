"""Batches from worker processes, whose mistakes arrive as the one line they are."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Callable, Sized
from typing import Any, Literal, cast

import torch
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from polyvision.errors import PolyvisionError
from polyvision.training.signals import ENDING

__all__ = ["Collate", "data_loader", "reraise_worker_error", "worker_count"]

Collate = Callable[[list[Any]], Any]


@dataclasses.dataclass(frozen=True)
class _Mistake:
    """The text of an error on its way out of a worker, where torch would wrap it in a traceback."""

    text: str


def _carry(error: PolyvisionError) -> _Mistake:
    if get_worker_info() is None:
        raise error
    return _Mistake(str(error))


@dataclasses.dataclass(frozen=True)
class _Samples(Dataset[Any]):
    samples: Dataset[Any]

    def __getitem__(self, key: Any) -> Any:
        try:
            return self.samples[key]
        except PolyvisionError as error:
            return _carry(error)

    def __len__(self) -> int:
        return len(cast(Sized, self.samples))


@dataclasses.dataclass(frozen=True)
class _Collate:
    join: Collate

    def __call__(self, batch: list[Any]) -> Any:
        mistake = next((sample for sample in batch if isinstance(sample, _Mistake)), None)
        if mistake is not None:
            return mistake
        try:
            return self.join(batch)
        except PolyvisionError as error:
            return _carry(error)


def _leave_signals(_: int) -> None:
    """Let a signal to the whole group of processes be the business of the one that trains.

    It ends its workers when it has saved; were they gone before, it could not come to that.
    """
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)


def data_loader(
    samples: Dataset[Any], workers: int, collate: Collate | None, **how: Any
) -> DataLoader[Any]:
    """Return torch's loader of ``samples``; pass each batch through ``reraise_worker_error``."""
    return DataLoader(
        _Samples(samples),
        num_workers=workers,
        worker_init_fn=_leave_signals,
        collate_fn=_Collate(collate or default_collate),
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator(),  # or each iteration would draw from the global one
        **how,
    )


def reraise_worker_error(batch: Any) -> Any:
    """Return the batch.

    Raises:
        PolyvisionError: what a worker raised in its place.
    """
    if isinstance(batch, _Mistake):
        raise PolyvisionError(batch.text)
    return batch


def worker_count(setting: int | Literal["auto"], devices: int) -> int:
    """Return the loader processes of each device: for ``auto`` its share of the cores but one.

    More than eight serve a device only where decoding is slow: then give the number.
    """
    if setting != "auto":
        return setting
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(0, min((cores or 1) // devices - 1, 8))
