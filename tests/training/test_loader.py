"""The order of samples: shuffled, seeded, sharded, and exact after a resume."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from timm.data.distributed_sampler import RepeatAugSampler

from polyvision.training import loader as loader_module
from polyvision.training.loader import TrainLoader, val_loader


class Numbers:
    """Item i is (i, three random numbers), to see the randomness that a sample meets."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        draw = [random.random(), np.random.rand(), torch.rand(()).item()]
        return torch.tensor([index, *draw], dtype=torch.float64)


def batches(loader):
    return [batch.tolist() for batch in loader]


def test_an_epoch_visits_every_sample_once_in_another_order_each_time():
    loader = TrainLoader(Numbers(12), 4, seed=0)
    first, second = batches(loader), batches(loader)
    indices = [[row[0] for batch in epoch for row in batch] for epoch in (first, second)]
    assert [sorted(i) for i in indices] == [list(range(12))] * 2
    assert indices[0] != indices[1]
    assert first == batches(TrainLoader(Numbers(12), 4, seed=0))
    assert first != batches(TrainLoader(Numbers(12), 4, seed=1))


def test_augmentation_differs_by_epoch_and_sample_but_not_by_workers():
    loader = TrainLoader(Numbers(8), 4, seed=0)
    first, second = batches(loader), batches(loader)
    draws = [tuple(row[1:]) for epoch in (first, second) for batch in epoch for row in batch]
    assert len(set(draws)) == 16
    assert batches(TrainLoader(Numbers(8), 4, seed=0, workers=2)) == first


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("taken", [1, 2, 3, 4, 6])
def test_resume_goes_on_where_the_state_was_taken(taken, workers):
    whole = TrainLoader(Numbers(13), 4, seed=3, workers=workers)  # three batches an epoch
    expected = [batch for _ in range(3) for batch in batches(whole)]
    broken = TrainLoader(Numbers(13), 4, seed=3, workers=workers)
    seen = []
    while len(seen) < taken:
        for batch in broken:
            seen.append(batch.tolist())
            if len(seen) == taken:
                break
    state = broken.state_dict()
    resumed = TrainLoader(Numbers(13), 4, seed=3, workers=workers)
    resumed.load_state_dict(state)
    while len(seen) < len(expected):
        seen.extend(batches(resumed))
    assert seen == expected


def test_state_of_other_data_is_refused():
    state = TrainLoader(Numbers(12), 4, seed=0).state_dict()
    with pytest.raises(ValueError, match=r"samples 12 -> 16, batch_size 4 -> 2"):
        TrainLoader(Numbers(16), 2, seed=0).load_state_dict(state)


def test_ranks_share_an_epoch(monkeypatch):
    parts = []
    for rank in (0, 1):
        group = SimpleNamespace(is_initialized=lambda: True, get_rank=lambda rank=rank: rank)
        monkeypatch.setattr(loader_module, "dist", group)
        parts.append(batches(TrainLoader(Numbers(16), 4, seed=0, world_size=2)))
    together = [row[0] for part in parts for batch in part for row in batch]
    assert sorted(together) == list(range(16))


def test_too_few_samples_are_refused():
    with pytest.raises(ValueError, match="3 training samples do not fill one batch of 4"):
        TrainLoader(Numbers(3), 4, seed=0)


def test_validation_shards_hold_each_sample_once():
    shards = [val_loader(Numbers(7), 2, rank=r, world_size=3) for r in range(3)]
    seen = [int(row[0]) for shard in shards for batch in shard for row in batch]
    assert sorted(seen) == list(range(7))


def test_repeated_samples_fill_an_epoch_of_the_same_length():
    loader = TrainLoader(Numbers(12), 4, seed=0, repeats=3)
    first, second = batches(loader), batches(loader)
    rows = [row for batch in first for row in batch]
    assert len(rows) == 12
    assert [row[0] for row in rows] == [i for row in rows[::3] for i in [row[0]] * 3]
    assert len({row[0] for row in rows}) == 4
    assert len({tuple(row[1:]) for row in rows}) == 12  # each copy is augmented for itself
    assert first != second
    assert first == batches(TrainLoader(Numbers(12), 4, seed=0, repeats=3, workers=2))


@pytest.mark.parametrize(
    ("samples", "world", "expected"), [(600, 2, 512), (600, 1, 512), (13, 1, 13)]
)
def test_an_epoch_of_repeats_is_as_long_as_timms(samples, world, expected):
    sampler = RepeatAugSampler(Numbers(samples), num_replicas=world, rank=0)
    loader = TrainLoader(Numbers(samples), 1, seed=0, repeats=3, world_size=world)
    assert len(loader) == len(sampler) == expected // world


def test_copies_go_to_different_ranks(monkeypatch):
    parts = []
    for rank in (0, 1, 2):
        group = SimpleNamespace(is_initialized=lambda: True, get_rank=lambda rank=rank: rank)
        monkeypatch.setattr(loader_module, "dist", group)
        loader = TrainLoader(Numbers(24), 2, seed=0, repeats=3, world_size=3)
        parts.append([[row[0] for row in batch] for batch in batches(loader)])
    assert parts[0] == parts[1] == parts[2]


def test_resume_within_repeats():
    whole = batches(TrainLoader(Numbers(12), 2, seed=1, repeats=3))
    broken = TrainLoader(Numbers(12), 2, seed=1, repeats=3)
    seen = [batch.tolist() for _, batch in zip(range(2), broken, strict=False)]
    resumed = TrainLoader(Numbers(12), 2, seed=1, repeats=3)
    resumed.load_state_dict({**broken.state_dict(), "position": 2})
    assert seen + batches(resumed) == whole
    with pytest.raises(ValueError, match="repeats 3 -> 1"):
        TrainLoader(Numbers(12), 2, seed=1).load_state_dict(broken.state_dict())
