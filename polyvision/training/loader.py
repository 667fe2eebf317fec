"""A training loader whose batches depend on (seed, epoch, position) alone, so that resume is exact.

Lightning saves and restores ``state_dict`` with every checkpoint, also in the middle of an epoch.
Each sample is drawn with its own seed: augmentation does not depend on the number of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, Subset

from polyvision.errors import PolyvisionError
from polyvision.training.seeding import derive_seed, seed_all

__all__ = ["MapDataset", "TrainLoader", "val_loader"]

# timm's unit of an epoch with repeated samples.
_ROUND = 256

Collate = Callable[[list[Any]], Any]


def _nothing() -> None:
    pass


class MapDataset(Sized, Protocol):
    """A data set with a length and items by index."""

    def __getitem__(self, index: int) -> Any:
        """Return one sample."""


class _SeededSamples(Dataset[Any]):
    """Items by (epoch, index) or (epoch, index, copy), each read under a seed of its own."""

    def __init__(self, samples: MapDataset, seed: int) -> None:
        self.samples = samples
        self.seed = seed

    def __getitem__(self, key: tuple[int, ...]) -> Any:
        seed_all(self.seed, "sample", *key)
        return self.samples[key[1]]


class TrainLoader:
    """Shuffled batches of a map-style data set, sharded over ranks, resumable at any batch.

    Args:
        samples: the data set.
        batch_size: samples per batch and rank; an incomplete last batch is left out.
        seed: seed of the order and of each sample's randomness.
        workers: loader processes.
        collate: joins samples to a batch; None for torch's default.
        world_size: number of ranks that share each epoch.
        repeats: how often each chosen sample comes in an epoch, differently augmented. As in timm
            and DeiT an epoch stays as long: n samples, rounded down to a multiple of 256 where
            there are as many, of which about n / repeats differ (Hoffer et al. 2020, "Augment your
            batch", https://arxiv.org/abs/1901.09335). The copies go to different ranks.

    Attributes:
        between: called between two batches, when all that concerns the first is done; the end of
            an epoch is not between two.

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
        repeats: int = 1,
    ) -> None:
        self.samples = samples
        self.batch_size = batch_size
        self.seed = seed
        self.workers = workers
        self.collate = collate
        self.world_size = world_size
        self.repeats = repeats
        self.between: Callable[[], None] = _nothing
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
        length = len(self.samples)
        if self.repeats > 1 and length >= _ROUND:
            length -= length % _ROUND
        return length // (self.batch_size * self.world_size)

    def __iter__(self) -> Iterator[Any]:
        """Yield the rest of a resumed epoch, else the whole next one."""
        # The position is reset here: code after the last yield of a generator may never run.
        if self._resumed:
            self._resumed = False
        else:
            self._epoch += 1
            self._position = 0
        batches = self._batches()[self._position :]
        loader = DataLoader(
            _SeededSamples(self.samples, self.seed),
            batch_sampler=batches,
            num_workers=self.workers,
            collate_fn=self.collate,
            pin_memory=torch.cuda.is_available(),
        )
        for batch in loader:
            self._position += 1
            yield batch
            self.between()

    def _batches(self) -> list[list[tuple[int, ...]]]:
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "order", self._epoch))
        order = torch.randperm(len(self.samples), generator=generator).tolist()
        rank = dist.get_rank() if dist.is_initialized() else 0
        size = self.batch_size * self.world_size
        if self.repeats > 1:
            copies: list[tuple[int, ...]]
            copies = [(self._epoch, i, copy) for i in order for copy in range(self.repeats)]
            ends = range(size, (len(self) + 1) * size, size)
            return [copies[end - size + rank : end : self.world_size] for end in ends]
        starts = range(rank * self.batch_size, len(self) * size, size)
        return [[(self._epoch, i) for i in order[s : s + self.batch_size]] for s in starts]

    def _layout(self) -> dict[str, int]:
        return {
            "samples": len(self.samples),
            "batch_size": self.batch_size,
            "world_size": self.world_size,
            "seed": self.seed,
            "repeats": self.repeats,
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
