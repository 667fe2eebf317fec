"""Which samples make each batch: a function of (seed, epoch, position) alone."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from polyvision.training.loading.seeding import derive_seed

__all__ = ["Key", "Order"]

Key = tuple[int, ...]

# timm's unit of an epoch with repeated samples.
_ROUND = 256


@dataclasses.dataclass(frozen=True)
class Order:
    """The batches of this rank, as lists of (epoch, index), or (epoch, index, copy) of repeats.

    All ranks together go through the same samples in the same order, however many they are.

    Attributes:
        samples: size of the data set.
        batch_size: samples per batch and rank.
        world_size: number of ranks that share each epoch.
        seed: seed of the permutations.
        repeats: how often each chosen sample comes in an epoch. As in timm and DeiT an epoch stays
            as long: n samples, rounded down to a multiple of 256 where there are as many, of which
            about n / repeats differ (Hoffer et al. 2019, "Augment your batch",
            https://arxiv.org/abs/1901.09335). The copies go to different ranks.
        shuffled: whether each epoch has a permutation of its own, or goes from 0 upwards.
        accumulate: batches of an optimizer step; an incomplete last step is left out. The samples
            of a step are the same however it is split over ranks and batches.
    """

    samples: int
    batch_size: int
    world_size: int
    seed: int
    repeats: int = 1
    shuffled: bool = True
    accumulate: int = 1

    @property
    def batch(self) -> int:
        """Samples of all ranks in a batch."""
        return self.batch_size * self.world_size

    @property
    def step(self) -> int:
        """Samples of an optimizer step."""
        return self.batch * self.accumulate

    def __len__(self) -> int:
        """Batches of this rank in an epoch."""
        length = self.samples
        if self.repeats > 1 and length >= _ROUND:
            length -= length % _ROUND
        return length // self.step * self.accumulate

    def epoch(self, epoch: int, position: int = 0) -> Iterator[list[Key]]:
        """Yield the batches of one epoch, from ``position`` on."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        order = self._permutation(epoch)
        for start in range(position * self.batch, len(self) * self.batch, self.batch):
            if self.repeats > 1:
                places = range(start + rank, start + self.batch, self.world_size)
                copies = (divmod(place, self.repeats) for place in places)
                yield [(epoch, int(order[i]), copy) for i, copy in copies]
            else:
                first = start + rank * self.batch_size
                yield [(epoch, int(i)) for i in order[first : first + self.batch_size]]

    def after(self, epoch: int, position: int) -> Iterator[list[Key]]:
        """Yield the batches from this place on, epoch after epoch without an end."""
        yield from self.epoch(epoch, position)
        for later in itertools.count(epoch + 1):
            yield from self.epoch(later)

    def _permutation(self, epoch: int) -> Sequence[Any]:
        if not self.shuffled:
            return range(self.samples)
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "order", epoch))
        # Eight bytes a sample; a list of Python's integers would take several times as much.
        return cast(Sequence[Any], torch.randperm(self.samples, generator=generator).numpy())
