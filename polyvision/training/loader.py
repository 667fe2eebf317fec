"""A training loader whose batches depend on (seed, epoch, position) alone, so that resume is exact.

Lightning saves and restores ``state_dict`` with every checkpoint, also in the middle of an epoch.
Each sample is drawn with its own seed: augmentation does not depend on the number of workers.
Worker processes live as long as the run, and begin the next epoch while this one is validated.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sized
from typing import Any, Literal, Protocol, cast

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, Subset, default_collate, get_worker_info

from polyvision.errors import PolyvisionError
from polyvision.training.seeding import derive_seed, seed_all

__all__ = ["MapDataset", "TrainLoader", "ValLoader", "val_loader", "worker_count"]

Collate = Callable[[list[Any]], Any]


class MapDataset(Sized, Protocol):
    """A data set with a length and items by index."""

    def __getitem__(self, index: int) -> Any:
        """Return one sample."""


class _SeededSamples(Dataset[Any]):
    """Items by (epoch, index), each read under a seed of its own."""

    def __init__(self, samples: MapDataset, seed: int) -> None:
        self.samples = samples
        self.seed = seed

    def __getitem__(self, key: tuple[int, int]) -> Any:
        epoch, index = key
        seed_all(self.seed, "sample", epoch, index)
        return self.samples[index]


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
    samples: MapDataset | Dataset[Any]

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


def _data_loader(
    samples: MapDataset | Dataset[Any], workers: int, collate: Collate | None, **how: Any
) -> DataLoader[Any]:
    return DataLoader(
        _Samples(samples),
        num_workers=workers,
        collate_fn=_Collate(collate or default_collate),
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator(),  # or each iteration would draw from the global one
        **how,
    )


def _whole(batch: Any) -> Any:
    if isinstance(batch, _Mistake):
        raise PolyvisionError(batch.text)
    return batch


@dataclasses.dataclass(frozen=True)
class _Order:
    """Which samples make each batch of this rank, as (epoch, index)."""

    samples: int
    batch_size: int
    world_size: int
    seed: int

    def __len__(self) -> int:
        """Batches of this rank in an epoch."""
        return self.samples // (self.batch_size * self.world_size)

    def epoch(self, epoch: int) -> Iterator[list[tuple[int, int]]]:
        """Yield the batches of one epoch."""
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "order", epoch))
        order = torch.randperm(self.samples, generator=generator)
        rank = dist.get_rank() if dist.is_initialized() else 0
        size = self.batch_size * self.world_size
        for start in range(rank * self.batch_size, len(self) * size, size):
            yield [(epoch, i) for i in order[start : start + self.batch_size].tolist()]

    def after(self, epoch: int, position: int) -> Iterator[list[tuple[int, int]]]:
        """Yield the batches from this place on, without an end."""
        yield from itertools.islice(self.epoch(epoch), position, None)
        for later in itertools.count(epoch + 1):
            yield from self.epoch(later)


class TrainLoader:
    """Shuffled batches of a map-style data set, sharded over ranks, resumable at any batch.

    Args:
        samples: the data set.
        batch_size: samples per batch and rank; an incomplete last batch is left out.
        seed: seed of the order and of each sample's randomness.
        workers: loader processes.
        collate: joins samples to a batch; None for torch's default.
        world_size: number of ranks that share each epoch.

    Attributes:
        waited: seconds spent so far on waiting for batches, or on making them without workers.

    Raises:
        ValueError: the data set is smaller than one batch of all ranks.
    """

    def __init__(
        self,
        samples: MapDataset,
        batch_size: int,
        *,
        seed: int,
        workers: int = 0,
        collate: Collate | None = None,
        world_size: int = 1,
    ) -> None:
        self.samples = samples
        self.batch_size = batch_size
        self.seed = seed
        self.workers = workers
        self.collate = collate
        self.world_size = world_size
        self.waited = 0.0
        self._order = _Order(len(samples), batch_size, world_size, seed)
        self._epoch = -1
        self._position = 0
        self._resumed = False
        self._stream: Iterator[Any] | None = None
        self._next = (0, 0)  # epoch and position of what the stream yields next
        if len(self) == 0:
            raise PolyvisionError(
                f"{len(samples)} training samples do not fill one batch of "
                f"{batch_size * world_size}: lower recipe.batch_size or give more data"
            )

    def __len__(self) -> int:
        """Batches of this rank in an epoch."""
        return len(self._order)

    def __iter__(self) -> Iterator[Any]:
        """Yield the rest of a resumed epoch, else the whole next one."""
        # The position is reset here: code after the last yield of a generator may never run.
        if self._resumed:
            self._resumed = False
        else:
            self._epoch += 1
            self._position = 0
        self._seek(self._epoch, self._position)
        while self._position < len(self):
            batch = self._advance()
            self._position += 1
            self._next = self._place(self._epoch, self._position)
            yield batch

    def close(self) -> None:
        """End the worker processes."""
        self._stream = None

    def _place(self, epoch: int, position: int) -> tuple[int, int]:
        return (epoch + 1, 0) if position == len(self) else (epoch, position)

    def _seek(self, epoch: int, position: int) -> None:
        """Let the stream go on from this place, epoch after epoch without an end."""
        place = self._place(epoch, position)
        if self._stream is None or self._next != place:
            self._next = place
            samples = _SeededSamples(self.samples, self.seed)
            order = self._order.after(*place)
            self._stream = iter(
                _data_loader(samples, self.workers, self.collate, batch_sampler=order)
            )

    def _advance(self) -> Any:
        # No other name refers to the stream: workers end as soon as it is dropped.
        assert self._stream is not None, "closed"
        start = time.perf_counter()
        batch = next(self._stream)
        self.waited += time.perf_counter() - start
        return _whole(batch)

    def _layout(self) -> dict[str, int]:
        return {
            "samples": len(self.samples),
            "batch_size": self.batch_size,
            "world_size": self.world_size,
            "seed": self.seed,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the data as plain numbers."""
        return {"epoch": self._epoch, "position": self._position, "layout": self._layout()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the place that ``state`` names.

        Raises:
            ValueError: the state is of other data, another batch size, seed or number of ranks.
        """
        other = {k: v for k, v in state["layout"].items() if v != self._layout()[k]}
        if other:
            now = ", ".join(f"{k} {v} -> {self._layout()[k]}" for k, v in other.items())
            raise PolyvisionError(f"cannot resume: the data changed since the checkpoint ({now})")
        self._epoch = state["epoch"]
        self._position = state["position"]
        # A finished epoch has no rest: the next iteration starts a new one.
        self._resumed = self._position < len(self)


class ValLoader:
    """Batches of validation, in order, from processes that live until ``close``."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader: DataLoader[Any] | None = loader
        self._length = len(loader)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        assert self._loader is not None, "closed"
        yield from map(_whole, self._loader)

    def close(self) -> None:
        """End the worker processes."""
        self._loader = None


def val_loader(
    samples: MapDataset,
    batch_size: int,
    *,
    workers: int = 0,
    collate: Collate | None = None,
    rank: int = 0,
    world_size: int = 1,
) -> ValLoader:
    """Return this rank's share of the samples, in order, each exactly once."""
    shard: Subset[Any] = Subset(cast(Dataset[Any], samples), range(rank, len(samples), world_size))
    keep = workers > 0
    return ValLoader(
        _data_loader(shard, workers, collate, batch_size=batch_size, persistent_workers=keep)
    )


def worker_count(setting: int | Literal["auto"], devices: int) -> int:
    """Return the loader processes of each device: for ``auto`` its share of the cores but one.

    More than eight serve a device only where decoding is slow: then give the number.
    """
    if setting != "auto":
        return setting
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(0, min((cores or 1) // devices - 1, 8))
