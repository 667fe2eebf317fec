"""A training loader whose batches depend on (seed, epoch, position) alone, so that resume is exact.

Lightning saves and restores ``state_dict`` with every checkpoint, also in the middle of an epoch.
Each sample is drawn with its own seed: augmentation does not depend on the number of workers. The
place is kept as a number of samples of all ranks, so that their number may change on resume.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any, Protocol, cast, runtime_checkable

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, Subset

from polyvision.errors import PolyvisionError
from polyvision.training.seeding import derive_seed, seed_all

__all__ = ["MapDataset", "OrderedSamples", "TrainLoader", "val_loader"]

Collate = Callable[[list[Any]], Any]


class MapDataset(Sized, Protocol):
    """A data set with a length and items by index."""

    def __getitem__(self, index: int) -> Any:
        """Return one sample."""


@runtime_checkable
class OrderedSamples(Sized, Protocol):
    """Samples without randomness of their own, in an order that each epoch shuffles itself.

    What is too large for a permutation in memory is read in this way.
    """

    def sample(self, epoch: int, index: int) -> Any:
        """Return one sample of an epoch."""

    def fingerprint(self) -> str:
        """Return what tells the samples and their order from others."""


class _SeededSamples(Dataset[Any]):
    """Items by (epoch, index), each read under a seed of its own."""

    def __init__(self, samples: MapDataset, seed: int) -> None:
        self.samples = samples
        self.seed = seed

    def __getitem__(self, key: tuple[int, int]) -> Any:
        epoch, index = key
        seed_all(self.seed, "sample", epoch, index)
        return self.samples[index]


class _OrderedItems(Dataset[Any]):
    """Items by (epoch, index) of samples that have their own order."""

    def __init__(self, samples: OrderedSamples) -> None:
        self.samples = samples

    def __getitem__(self, key: tuple[int, int]) -> Any:
        return self.samples.sample(*key)


class TrainLoader:
    """Shuffled batches of a map-style data set, sharded over ranks, resumable at any batch.

    Args:
        samples: the data set, which is shuffled here, or one with an order of its own.
        batch_size: samples per batch and rank; an incomplete last batch is left out.
        seed: seed of the order and of each sample's randomness.
        workers: loader processes.
        collate: joins samples to a batch; None for torch's default.
        world_size: number of ranks that share each epoch.

    Raises:
        ValueError: the data set is smaller than one batch of all ranks.
    """

    def __init__(
        self,
        samples: MapDataset | OrderedSamples,
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
        self._epoch = -1
        self._position = 0
        self._resumed = False
        if len(self) == 0:
            raise PolyvisionError(
                f"{len(samples)} training samples do not fill one batch of "
                f"{batch_size * world_size}: lower recipe.batch_size or give more data"
            )

    def __len__(self) -> int:
        """Batches of this rank in an epoch."""
        return len(self.samples) // (self.batch_size * self.world_size)

    def __iter__(self) -> Iterator[Any]:
        """Yield the rest of a resumed epoch, else the whole next one."""
        # The position is reset here: code after the last yield of a generator may never run.
        if self._resumed:
            self._resumed = False
        else:
            self._epoch += 1
            self._position = 0
        loader = DataLoader(
            self._items(),
            batch_sampler=self._batches(),
            num_workers=self.workers,
            collate_fn=self.collate,
            pin_memory=torch.cuda.is_available(),
        )
        for batch in loader:
            self._position += 1
            yield batch

    def _items(self) -> Dataset[Any]:
        if isinstance(self.samples, OrderedSamples):
            return _OrderedItems(self.samples)
        return _SeededSamples(self.samples, self.seed)

    def _batches(self) -> Iterator[list[tuple[int, int]]]:
        rank = dist.get_rank() if dist.is_initialized() else 0
        size = self.batch_size * self.world_size
        order = self._order()
        first = self._position * size + rank * self.batch_size
        for start in range(first, len(self) * size, size):
            yield [(self._epoch, i) for i in order[start : start + self.batch_size]]

    def _order(self) -> Sequence[int]:
        if isinstance(self.samples, OrderedSamples):
            return range(len(self.samples))
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "order", self._epoch))
        return cast(list[int], torch.randperm(len(self.samples), generator=generator).tolist())

    def _layout(self) -> dict[str, int | str]:
        layout: dict[str, int | str] = {
            "samples": len(self.samples),
            "batch": self.batch_size * self.world_size,
            "seed": self.seed,
        }
        if isinstance(self.samples, OrderedSamples):
            layout["data"] = self.samples.fingerprint()
        return layout

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the data as plain values."""
        done = self._position * self.batch_size * self.world_size
        return {"epoch": self._epoch, "done": done, "layout": self._layout()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the place that ``state`` names.

        Raises:
            ValueError: the state is of other data, another seed or another batch of all ranks.
        """
        then, now = state["layout"], self._layout()
        other = [k for k in {**then, **now} if then.get(k) != now.get(k)]
        if other:
            changes = ", ".join(f"{k} {then.get(k)} -> {now.get(k)}" for k in other)
            raise PolyvisionError(
                f"cannot resume: the data changed since the checkpoint ({changes})"
            )
        self._epoch = state["epoch"]
        self._position = state["done"] // (self.batch_size * self.world_size)
        # A finished epoch has no rest: the next iteration starts a new one.
        self._resumed = self._position < len(self)


def val_loader(
    samples: MapDataset,
    batch_size: int,
    *,
    workers: int = 0,
    collate: Collate | None = None,
    rank: int = 0,
    world_size: int = 1,
) -> DataLoader[Any]:
    """Return this rank's share of the samples, in order, each exactly once."""
    shard: Subset[Any] = Subset(cast(Dataset[Any], samples), range(rank, len(samples), world_size))
    return DataLoader(
        shard,
        batch_size=batch_size,
        num_workers=workers,
        collate_fn=collate,
        pin_memory=torch.cuda.is_available(),
    )
