"""Windows of tokens from shards: in order for validation, shuffled for training, or mixed.

The order of an epoch follows from (seed, epoch). Any sample can be asked for at once, so ranks,
loader processes and resumed runs need only its number. Nothing of the corpus is held but the
document borders of the shards that are being read.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from polyvision.data.text.corpus import Part

__all__ = ["MixedWindows", "PartWindows", "ShuffledWindows"]

# Documents are shuffled among this many shards, which are themselves drawn at random.
_POOL = 8
_KEPT = 4  # pools in memory
# A mixture repeats its proportions in every block of this many samples.
_BLOCK = 10_000

Window = tuple[Tensor, Tensor]


def _shifted(window: np.ndarray) -> Window:
    tokens = torch.from_numpy(window)
    return tokens[:-1], tokens[1:]


def _hash(*parts: int | str) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


def _fingerprint(part: Part, context: int) -> str:
    return _hash(context, *(shard.header.checksum for shard in part.shards))


def _permutation(length: int, *parts: int | str) -> np.ndarray:
    """Return a permutation that depends on ``parts`` alone, on any machine and version."""
    # RandomState's numbers are fixed for good; those of Generator may change.
    return np.random.RandomState(int(_hash(*parts)[:8], 16)).permutation(length)


class PartWindows(Dataset[Window]):
    """Consecutive windows of a part of a corpus, in the order of the shards.

    Item i is ``(inputs, targets)``, both (context,) int64, the tokens from ``i * context`` on and
    the same shifted by one. What is left at the end, less than a window, is not used.

    Args:
        part: the tokens, more than ``context``.
        context: tokens per window.
    """

    def __init__(self, part: Part, context: int) -> None:
        assert 0 < context < part.tokens
        self.part = part
        self.context = context
        self._starts = np.cumsum([0, *(shard.header.tokens for shard in part.shards)])

    def fingerprint(self) -> str:
        """Return a hash of the tokens and the context."""
        return _fingerprint(self.part, self.context)

    def __len__(self) -> int:
        return (int(self._starts[-1]) - 1) // self.context

    def __getitem__(self, index: int) -> Window:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        window = np.empty(self.context + 1, dtype=np.int64)
        shard = int(np.searchsorted(self._starts, index * self.context, "right")) - 1
        start, filled = index * self.context - int(self._starts[shard]), 0
        while filled < len(window):
            length = self.part.shards[shard].header.tokens
            count = min(len(window) - filled, length - start)
            window[filled : filled + count] = self.part.read(shard, start, count)
            filled += count
            shard, start = shard + 1, 0
        return _shifted(window)


@dataclasses.dataclass(frozen=True)
class _Pool:
    """The shuffled documents of a few shards, as one row of tokens.

    Attributes:
        shard: (documents,) which shard each is in.
        start: (documents,) where in it.
        begin: (documents + 1,) where each lies in the row.
        window: (windows,) the shuffled order of the windows that begin in the row.
    """

    shard: np.ndarray
    start: np.ndarray
    begin: np.ndarray
    window: np.ndarray


class ShuffledWindows:
    """Windows over shuffled documents: sample i of epoch e, for any e and i.

    An epoch puts the shards in random order and shuffles the documents of each eight of them
    together; with up to eight shards, all documents. The documents in that order are one row of
    tokens, which is cut into windows as ``PartWindows`` does. The windows of each eight shards are
    shuffled again, so that those of one long document do not meet in a batch. Each token is a
    target once an epoch, but for the first and fewer than ``context`` at the end.

    Args:
        part: the tokens, more than ``context``.
        context: tokens per window.
        seed: of the order.
    """

    def __init__(self, part: Part, context: int, seed: int) -> None:
        assert 0 < context < part.tokens
        self.part = part
        self.context = context
        self.seed = seed
        self._lengths = np.array([shard.header.tokens for shard in part.shards])
        self._pools: OrderedDict[tuple[int, int], _Pool] = OrderedDict()
        self._layouts: OrderedDict[int, tuple[np.ndarray, np.ndarray]] = OrderedDict()

    def __len__(self) -> int:
        """Windows of an epoch."""
        return (int(self._lengths.sum()) - 1) // self.context

    def fingerprint(self) -> str:
        """Return a hash of the tokens and the context."""
        return _fingerprint(self.part, self.context)

    def sample(self, epoch: int, index: int) -> Window:
        """Return window ``index`` of an epoch: inputs and targets, both (context,) int64."""
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        _, begins = self._layout(epoch)
        firsts = -(-begins // self.context)  # the first window that begins in each pool
        number = int(np.searchsorted(firsts, index, "right")) - 1
        pool = self._pool(epoch, number)
        place = index - int(firsts[number])
        start = (int(firsts[number]) + int(pool.window[place])) * self.context
        return _shifted(self._read(epoch, number, start - int(begins[number])))

    def _read(self, epoch: int, number: int, start: int) -> np.ndarray:
        """Read a window from ``start`` of a pool's row on, over into the next pool."""
        window = np.empty(self.context + 1, dtype=np.int64)
        filled = 0
        while filled < len(window):
            pool = self._pool(epoch, number)
            document = int(np.searchsorted(pool.begin, start, "right")) - 1
            while filled < len(window) and document < len(pool.shard):
                skip = start - int(pool.begin[document])
                left = int(pool.begin[document + 1]) - start
                count = min(len(window) - filled, left)
                window[filled : filled + count] = self.part.read(
                    int(pool.shard[document]), int(pool.start[document]) + skip, count
                )
                filled += count
                start += count
                document += 1
            number, start = number + 1, 0
        return window

    def _layout(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the order of the shards, and where each pool begins in the epoch's row."""
        if epoch not in self._layouts:
            order = _permutation(len(self._lengths), self.seed, "shards", epoch)
            begins = np.cumsum([0, *self._lengths[order]])[:-1:_POOL]
            self._layouts[epoch] = order, begins
            if len(self._layouts) > _KEPT:
                self._layouts.popitem(last=False)
        return self._layouts[epoch]

    def _pool(self, epoch: int, number: int) -> _Pool:
        key = epoch, number
        if key in self._pools:
            self._pools.move_to_end(key)
        else:
            self._pools[key] = self._build(epoch, number)
            if len(self._pools) > _KEPT:
                self._pools.popitem(last=False)
        return self._pools[key]

    def _build(self, epoch: int, number: int) -> _Pool:
        order, begins = self._layout(epoch)
        chosen = order[number * _POOL : (number + 1) * _POOL]
        offsets = [self.part.shards[i].offsets() for i in chosen]
        counts = [len(each) - 1 for each in offsets]
        shuffle = _permutation(sum(counts), self.seed, "documents", epoch, number)
        lengths = np.concatenate([np.diff(each) for each in offsets])[shuffle]
        end = int(begins[number] + lengths.sum())
        first, last = -(-int(begins[number]) // self.context), -(-end // self.context)
        return _Pool(
            shard=np.repeat(chosen, counts)[shuffle],
            start=np.concatenate([each[:-1] for each in offsets])[shuffle],
            begin=np.cumsum([0, *lengths]),
            window=_permutation(
                max(0, min(last, len(self)) - first), self.seed, "windows", epoch, number
            ),
        )

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_pools": OrderedDict(), "_layouts": OrderedDict()}


class MixedWindows:
    """Windows of several corpora in given proportions.

    Each block of 10,000 samples holds the same number of each corpus, its weight rounded to a
    ten-thousandth, in a random order. A corpus that is used up begins its next epoch; the length,
    which is an epoch of the mixture, is the sum of the corpora's.

    Args:
        corpora: the windows of each.
        weights: positive, of any sum.
        seed: of the order.
    """

    def __init__(
        self, corpora: Sequence[ShuffledWindows], weights: Sequence[float], seed: int
    ) -> None:
        assert len(corpora) == len(weights)
        assert min(weights) > 0
        self.corpora = list(corpora)
        self.context = corpora[0].context
        self.seed = seed
        self.counts = _shares(weights, _BLOCK)
        self._blocks: OrderedDict[int, tuple[np.ndarray, np.ndarray]] = OrderedDict()

    def __len__(self) -> int:
        """Windows of all corpora together."""
        return sum(len(corpus) for corpus in self.corpora)

    def fingerprint(self) -> str:
        """Return a hash of the corpora and their proportions."""
        corpora = [corpus.fingerprint() for corpus in self.corpora]
        return _hash(*corpora, *self.counts.tolist())

    def sample(self, epoch: int, index: int) -> Window:
        """Return window ``index`` of an epoch: inputs and targets, both (context,) int64."""
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        block, place = divmod(epoch * len(self) + index, _BLOCK)
        which, rank = self._block(block)
        chosen = int(which[place])
        corpus = self.corpora[chosen]
        number = block * int(self.counts[chosen]) + int(rank[place])
        return corpus.sample(*divmod(number, len(corpus)))

    def _block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Return for each sample of a block its corpus, and how many of it came before."""
        if block not in self._blocks:
            order = _permutation(_BLOCK, self.seed, "mixture", block)
            which = np.repeat(np.arange(len(self.counts)), self.counts)[order]
            rank = np.empty(_BLOCK, dtype=np.int64)
            for corpus, count in enumerate(self.counts):
                rank[which == corpus] = np.arange(count)
            self._blocks[block] = which, rank
            if len(self._blocks) > _KEPT:
                self._blocks.popitem(last=False)
        return self._blocks[block]


def _shares(weights: Sequence[float], total: int) -> np.ndarray:
    """Split ``total`` by weight into whole numbers of at least 1, largest remainders first."""
    exact = np.asarray(weights, dtype=np.float64)
    exact = exact / exact.sum() * (total - len(exact))
    counts: np.ndarray = np.floor(exact).astype(np.int64)
    short = total - len(exact) - int(counts.sum())
    counts[np.argsort(counts - exact, kind="stable")[:short]] += 1
    counts += 1
    return counts
