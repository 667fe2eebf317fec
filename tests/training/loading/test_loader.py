"""The order of samples: shuffled, seeded, sharded, and exact after a resume."""

import gc
import itertools
import multiprocessing
import os
import random
import signal
from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from timm.data.distributed_sampler import RepeatAugSampler

from polyvision.data.text.file import TokenWindows
from polyvision.errors import PolyvisionError
from polyvision.training.loading import order as order_module
from polyvision.training.loading.loader import TrainLoader, val_loader
from polyvision.training.loading.workers import worker_count


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
    with pytest.raises(ValueError, match=r"samples 12 -> 16, batch 4 -> 2"):
        TrainLoader(Numbers(16), 2, seed=0).load_state_dict(state)


def test_ranks_share_an_epoch(monkeypatch):
    parts = []
    for rank in (0, 1):
        group = SimpleNamespace(is_initialized=lambda: True, get_rank=lambda rank=rank: rank)
        monkeypatch.setattr(order_module, "dist", group)
        parts.append(batches(TrainLoader(Numbers(16), 4, seed=0, world_size=2)))
    together = [row[0] for part in parts for batch in part for row in batch]
    assert sorted(together) == list(range(16))


class Ordered:
    """Sample i of epoch e is 100 e + i."""

    def __init__(self, length, name="a"):
        self.length, self.name = length, name

    def __len__(self):
        return self.length

    def sample(self, epoch, index):
        return torch.tensor([100 * epoch + index])

    def fingerprint(self):
        return self.name


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_with_an_order_of_their_own_come_in_it(workers):
    loader = TrainLoader(Ordered(7), 2, seed=0, workers=workers)
    epochs = [[row[0] for batch in batches(loader) for row in batch] for _ in range(2)]
    assert epochs == [[0, 1, 2, 3, 4, 5], [100, 101, 102, 103, 104, 105]]
    state = loader.state_dict()
    with pytest.raises(ValueError, match="data a -> b"):
        TrainLoader(Ordered(7, "b"), 2, seed=0).load_state_dict(state)
    with pytest.raises(ValueError, match="data a -> None"):
        TrainLoader(Numbers(7), 2, seed=0).load_state_dict(state)


@pytest.mark.parametrize("data", [Ordered(26), Numbers(26)])
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (4, 2)])
def test_the_number_of_ranks_may_change(before, after, data, monkeypatch):
    def ranks(world_size, state=None, taken=None):
        """Return the samples of each step of all ranks, and the state after ``taken`` steps."""
        columns, found = [], None
        for rank in range(world_size):
            group = SimpleNamespace(is_initialized=lambda: True, get_rank=lambda rank=rank: rank)
            monkeypatch.setattr(order_module, "dist", group)
            loader = TrainLoader(data, 4 // world_size, seed=0, world_size=world_size)
            if state is not None:
                loader.load_state_dict(state)
            columns.append([])
            for batch in loader:
                columns[-1].append([row[0] for row in batch.tolist()])
                if len(columns[-1]) == taken:
                    found = loader.state_dict()
                    break
        steps = zip(*columns, strict=True)
        return [list(itertools.chain(*step)) for step in steps], found

    whole, _ = ranks(before)
    first, state = ranks(before, taken=2)
    rest, _ = ranks(after, state)
    assert first + rest == whole
    assert len(whole) == 6


@pytest.mark.parametrize("repeats", [1, 3])
def test_a_step_has_the_same_samples_however_it_is_split(repeats):
    def steps(passes, state=None, taken=4):
        loader = TrainLoader(Numbers(50), 12 // passes, seed=2, accumulate=passes, repeats=repeats)
        if state is not None:
            loader.load_state_dict(state)
        seen, ends = [], []
        loader.between = lambda: ends.append(len(seen))
        for batch in loader:
            seen += [row[0] for row in batch.tolist()]
            if len(seen) == 12 * taken:
                break
        assert ends == list(range(12, len(seen), 12))  # after each step that another one follows
        return seen, loader.state_dict()

    whole, _ = steps(1)
    assert len(whole) == 48  # not the two that fill no step
    assert steps(4)[0] == whole
    first, state = steps(3, taken=2)
    assert first + steps(2, state, taken=2)[0] == whole


def test_a_signal_to_all_processes_ends_no_worker():
    loader = TrainLoader(Processes(40), 2, seed=0, workers=2)
    seen = set()
    for batch in loader:
        for process in set(batch.tolist()) - seen:
            for number in (signal.SIGINT, signal.SIGTERM):
                os.kill(process, number)
        seen |= set(batch.tolist())
    assert len(seen) == 2
    loader.close()


def test_too_few_samples_are_refused():
    with pytest.raises(ValueError, match="3 training samples do not fill one batch of 4"):
        TrainLoader(Numbers(3), 4, seed=0)


def test_validation_shards_hold_each_sample_once():
    shards = [val_loader(Numbers(7), 2, rank=r, world_size=3) for r in range(3)]
    seen = [int(row[0]) for shard in shards for batch in shard for row in batch]
    assert sorted(seen) == list(range(7))
    with pytest.raises(PolyvisionError, match="of 7 samples cannot be shared by 8 devices"):
        val_loader(Numbers(7), 2, rank=0, world_size=8)


class Faulty(Numbers):
    """Item 5 is a mistake of the user."""

    def __getitem__(self, index):
        if index == 5:
            raise PolyvisionError("cannot read image 5")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_mistake_in_the_data_is_one_line_from_workers_too(workers):
    for loader in (
        TrainLoader(Faulty(12), 4, seed=0, workers=workers),
        val_loader(Faulty(12), 4, workers=workers),
    ):
        with closing(loader), pytest.raises(PolyvisionError) as caught:
            batches(loader)
        assert str(caught.value) == "cannot read image 5"


@pytest.mark.parametrize("workers", [0, 2])
def test_a_mistake_while_joining_a_batch_is_one_line_too(workers):
    loader = TrainLoader(Numbers(8), 4, seed=0, workers=workers, collate=refuse)
    with closing(loader), pytest.raises(PolyvisionError) as caught:
        batches(loader)
    assert str(caught.value) == "nothing left of 4"


def refuse(batch):
    raise PolyvisionError(f"nothing left of {len(batch)}")


class Processes(Numbers):
    """Item i is the process that read it."""

    def __getitem__(self, index):
        return os.getpid()


def test_workers_live_from_epoch_to_epoch_until_closed():
    train = TrainLoader(Processes(8), 2, seed=0, workers=2)
    val = val_loader(Processes(8), 2, workers=2)
    for loader in (train, val):
        first, second = ({p for batch in loader for p in batch.tolist()} for _ in range(2))
        assert first == second
        assert len(first) == 2
        assert os.getpid() not in first
        loader.close()
        gc.collect()
        assert not first & {child.pid for child in multiprocessing.active_children()}


def test_an_epoch_left_early_is_not_mixed_with_the_next():
    whole, left = (TrainLoader(Numbers(12), 4, seed=0, workers=w) for w in (0, 2))
    next(iter(left))
    batches(whole)
    assert batches(left) == batches(whole)


def test_loaders_leave_the_randomness_of_the_process_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    batches(val_loader(Processes(4), 2))
    next(iter(TrainLoader(Processes(8), 2, seed=0, workers=1)))
    assert torch.equal(torch.get_rng_state(), before)


def test_worker_processes_fit_the_machine(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)), raising=False)
    assert [worker_count("auto", devices) for devices in (1, 2, 4, 12, 24)] == [8, 5, 2, 0, 0]
    assert worker_count(20, 4) == 20


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
        monkeypatch.setattr(order_module, "dist", group)
        loader = TrainLoader(Numbers(24), 2, seed=0, repeats=3, world_size=3)
        parts.append([[row[0] for row in batch] for batch in batches(loader)])
    assert parts[0] == parts[1] == parts[2]


def test_resume_within_repeats():
    whole = batches(TrainLoader(Numbers(12), 2, seed=1, repeats=3))
    broken = TrainLoader(Numbers(12), 2, seed=1, repeats=3)
    seen = [batch.tolist() for _, batch in zip(range(2), broken, strict=False)]
    resumed = TrainLoader(Numbers(12), 2, seed=1, repeats=3)
    resumed.load_state_dict({**broken.state_dict(), "done": 4})
    assert seen + batches(resumed) == whole
    with pytest.raises(ValueError, match="repeats 3 -> 1"):
        TrainLoader(Numbers(12), 2, seed=1).load_state_dict(broken.state_dict())


def test_a_text_that_changed_but_not_in_length_is_refused():
    def loader(tokens):
        return TrainLoader(TokenWindows(np.asarray(tokens, np.uint8), 4), 2, seed=0)

    state = loader(range(50)).state_dict()
    loader(range(50)).load_state_dict(state)
    with pytest.raises(PolyvisionError, match=r"the data changed since the checkpoint \(data "):
        loader(range(1, 51)).load_state_dict(state)
    del state["layout"]["data"]  # as checkpoints had it once
    loader(range(50)).load_state_dict(state)


class Compared(Numbers):
    """Numbers of which some are compared."""

    def __init__(self, contents):
        super().__init__(8)
        self.found = contents

    def contents(self):
        return self.found


def test_samples_that_changed_are_refused_with_both_places():
    def loader(contents, place="/a"):
        return TrainLoader(Compared(contents), 2, seed=0, place=place)

    state = loader(["x", "y", None]).state_dict()
    for repaired in (["x", "y", "z"], [None, "y", None]):
        loader(repaired, "/b").load_state_dict(state)
    with pytest.raises(PolyvisionError) as caught:
        loader(["x", "z", "z"], "/b").load_state_dict(state)
    assert str(caught.value) == (
        "cannot resume: the data changed since the checkpoint (1 of 3 samples that were compared "
        "differ): /a then, /b now. Give the same data, or start a new run: leave resume= out, and "
        "finetune=<run folder> begins with the weights"
    )
    with pytest.raises(PolyvisionError, match=r"differ\): another content of /a\. Give the same"):
        loader(["z", "y", None]).load_state_dict(state)
    for key in ("contents", "place"):  # as checkpoints had it once
        del state[key]
    loader(["z", "z", "z"], "/b").load_state_dict(state)


def test_data_is_compared_as_it_was_when_the_run_began():
    samples = Compared(["x"])
    loader = TrainLoader(samples, 2, seed=0)
    next(iter(loader))
    samples.found = ["y"]
    assert loader.state_dict()["contents"] == ["x"]
