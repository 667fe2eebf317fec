"""A training loader whose batches depend on (seed, epoch, position) alone, so that resume is exact.

Lightning saves and restores ``state_dict`` with every checkpoint, also in the middle of an epoch.
Each sample is drawn with its own seed: augmentation does not depend on the number of workers.
Worker processes live as long as the run, and begin the next epoch while this one is validated. The
place is kept as a number of samples of all ranks, so that their number may change on resume.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Sized
from typing import Any, Protocol, cast, runtime_checkable

from torch.utils.data import DataLoader, Dataset, Subset

from polyvision.errors import PolyvisionError
from polyvision.training.loading.order import Key, Order
from polyvision.training.loading.seeding import seed_all
from polyvision.training.loading.workers import Collate, data_loader, reraise_worker_error

__all__ = [
    "Fingerprinted",
    "MapDataset",
    "OrderedSamples",
    "Sampled",
    "TrainLoader",
    "ValLoader",
    "shared_batches",
    "val_loader",
]


def _nothing() -> None:
    pass


class MapDataset(Sized, Protocol):
    """A data set with a length and items by index."""

    def __getitem__(self, index: int) -> Any:
        """Return one sample."""


@runtime_checkable
class Fingerprinted(Protocol):
    """Samples that a resumed run must find unchanged."""

    def fingerprint(self) -> str:
        """Return what tells the samples and their order from others."""


@runtime_checkable
class Sampled(Protocol):
    """Samples of which a resumed run compares some, beside their fingerprint."""

    def contents(self) -> list[str | None]:
        """Return hashes of the contents of some samples; None for one that cannot be read."""


@runtime_checkable
class OrderedSamples(Sized, Fingerprinted, Protocol):
    """Samples without randomness of their own, in an order that each epoch shuffles itself.

    What is too large for a permutation in memory is read in this way.
    """

    def sample(self, epoch: int, index: int) -> Any:
        """Return one sample of an epoch."""


class _SeededSamples(Dataset[Any]):
    """Items by key, each read under a seed of its own."""

    def __init__(self, samples: MapDataset, seed: int) -> None:
        self.samples = samples
        self.seed = seed

    def __getitem__(self, key: Key) -> Any:
        seed_all(self.seed, "sample", *key)
        return self.samples[key[1]]


class _OrderedItems(Dataset[Any]):
    """Items by (epoch, index) of samples that have their own order."""

    def __init__(self, samples: OrderedSamples) -> None:
        self.samples = samples

    def __getitem__(self, key: Key) -> Any:
        return self.samples.sample(*key)


class TrainLoader:
    """Batches of a data set, sharded over ranks, resumable at any batch.

    Args:
        samples: the data set, which is shuffled here, or one with an order of its own.
        batch_size: samples per batch and rank.
        seed: seed of the order and of each sample's randomness.
        workers: loader processes.
        collate: joins samples to a batch; None for torch's default.
        world_size: number of ranks that share each epoch.
        repeats: how often each chosen sample comes in an epoch, differently augmented; see
            ``Order``.
        accumulate: batches of an optimizer step; an incomplete last step is left out.
        place: where the data lies, for the error when it is not that of a checkpoint.

    Attributes:
        between: called between two steps, when all that concerns the first is done; the end of an
            epoch is not between two.
        waited: seconds spent so far on waiting for batches, or on making them without workers.

    Raises:
        ValueError: the data set is smaller than one step of all ranks.
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
        repeats: int = 1,
        accumulate: int = 1,
        place: str = "",
    ) -> None:
        self.samples = samples
        self.place = place
        self.batch_size = batch_size
        self.seed = seed
        self.workers = workers
        self.collate = collate
        self.between: Callable[[], None] = _nothing
        self.waited = 0.0
        ordered = isinstance(samples, OrderedSamples)
        self._order = Order(
            len(samples),
            batch_size,
            world_size,
            seed,
            repeats=repeats,
            shuffled=not ordered,
            accumulate=accumulate,
        )
        self._epoch = -1
        self._position = 0
        self._resumed = False
        self._stream: Iterator[Any] | None = None
        self._next = (0, 0)  # epoch and position of what the stream yields next
        if len(self) == 0:
            raise PolyvisionError(
                f"{len(samples)} training samples do not fill one batch of "
                f"{self._order.step}: lower recipe.batch_size or give more data"
            )

    def __len__(self) -> int:
        """Batches of this rank in an epoch."""
        return len(self._order)

    def __iter__(self) -> Iterator[Any]:
        """Yield the rest of a resumed epoch, else the whole next one."""
        _ = self._identity  # as the data is now, not when the first checkpoint is written
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
            # A run is saved here and not in a hook of Lightning's: its last hook of a step comes
            # before the step counts as completed and before the validation that may follow it. A
            # checkpoint written there would count one batch less and leave that validation out.
            if self._position % self._order.accumulate == 0:
                self.between()

    def close(self) -> None:
        """End the worker processes."""
        self._stream = None

    def batch_at(self, position: int) -> Any:
        """Make a batch of the current epoch again, in this process."""
        batches = self._order.after(self._epoch, position)
        return reraise_worker_error(
            next(iter(data_loader(self._items(), 0, self.collate, batch_sampler=batches)))
        )

    def _place(self, epoch: int, position: int) -> tuple[int, int]:
        return (epoch + 1, 0) if position == len(self) else (epoch, position)

    def _seek(self, epoch: int, position: int) -> None:
        """Let the stream go on from this place, epoch after epoch without an end."""
        place = self._place(epoch, position)
        if self._stream is None or self._next != place:
            self._next = place
            batches = self._order.after(*place)
            self._stream = iter(
                data_loader(self._items(), self.workers, self.collate, batch_sampler=batches)
            )

    def _items(self) -> Dataset[Any]:
        if isinstance(self.samples, OrderedSamples):
            return _OrderedItems(self.samples)
        return _SeededSamples(self.samples, self.seed)

    def _advance(self) -> Any:
        # No other name refers to the stream: workers end as soon as it is dropped.
        assert self._stream is not None, "closed"
        start = time.perf_counter()
        batch = next(self._stream)
        self.waited += time.perf_counter() - start
        return reraise_worker_error(batch)

    def _places(self, then: str | None) -> str:
        if not then or not self.place:
            return ""
        if then == self.place:
            return f": another content of {then}"
        return f": {then} then, {self.place} now"

    def _layout(self) -> dict[str, int | str]:
        layout: dict[str, int | str] = {
            "samples": len(self.samples),
            "batch": self._order.step,
            "seed": self.seed,
            "repeats": self._order.repeats,
        }
        data, _ = self._identity
        if data is not None:
            layout["data"] = data
        return layout

    @functools.cached_property
    def _identity(self) -> tuple[str | None, list[str | None]]:
        """The fingerprint of the samples, and the hashes of some of them."""
        data = self.samples.fingerprint() if isinstance(self.samples, Fingerprinted) else None
        return data, self.samples.contents() if isinstance(self.samples, Sampled) else []

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the data as plain values."""
        done = self._position * self._order.batch
        _, contents = self._identity
        return {
            "epoch": self._epoch,
            "done": done,
            "layout": self._layout(),
            "contents": contents,
            "place": self.place,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the place that ``state`` names.

        Raises:
            ValueError: the state is of other data, another seed or another batch of a step.
        """
        then, now = state["layout"], self._layout()
        if "data" not in then:  # a checkpoint of before data had a fingerprint
            now.pop("data", None)
        other = [k for k in {**then, **now} if then.get(k) != now.get(k)]
        changes = [f"{k} {then.get(k)} -> {now.get(k)}" for k in other]
        _, contents = self._identity
        known = state.get("contents") or []
        if not changes and len(known) == len(contents):
            differing = sum(a != b for a, b in zip(known, contents, strict=True) if a and b)
            if differing:
                changes = [f"{differing} of {len(known)} samples that were compared differ"]
        if changes:
            raise PolyvisionError(
                f"cannot resume: the data changed since the checkpoint ({', '.join(changes)})"
                f"{self._places(state.get('place'))}. Give the same data, or start a new run: "
                "leave resume= out, and finetune=<run folder> begins with the weights"
            )
        self._epoch = state["epoch"]
        self._position = state["done"] // self._order.batch
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
        yield from map(reraise_worker_error, self._loader)

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
    """Return this rank's share of the samples, in order, each exactly once.

    Raises:
        PolyvisionError: some rank would have none.
    """
    if len(samples) < world_size:
        raise PolyvisionError(
            f"a validation set of {len(samples)} samples cannot be shared by {world_size} devices: "
            "give more data or lower trainer.devices"
        )
    shard: Subset[Any] = Subset(cast(Dataset[Any], samples), range(rank, len(samples), world_size))
    keep = workers > 0
    return ValLoader(
        data_loader(shard, workers, collate, batch_size=batch_size, persistent_workers=keep)
    )


def shared_batches(samples: Sized, batch_size: int, world_size: int) -> int:
    """Return the batches of ``val_loader`` that each rank has; some may have one more."""
    return math.ceil(len(samples) // world_size / batch_size)
