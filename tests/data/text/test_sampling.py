"""Which tokens a sample holds: each once an epoch, in whole documents, for any number at once."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from polyvision.data.text import corpus as corpus_module
from polyvision.data.text import sampling
from polyvision.data.text.corpus import Part
from polyvision.data.text.prepare.part_writer import PartWriter
from polyvision.data.text.sampling import MixedWindows, PartWindows, ShuffledWindows, _shares
from polyvision.data.text.shards import open_shard
from polyvision.errors import PolyvisionError

# Document d is d * 100, d * 100 + 1, ...: every token says where it is from.
LENGTHS = [1, 37, 5, 90, 2, 64, 8, 8, 3, 50, 21, 1, 13, 77, 6, 30, 9, 44, 2, 5]


def part(folder: Path, lengths: list[int], shard_tokens: int, first: int = 0) -> Part:
    folder.mkdir()
    writer = PartWriter(
        folder, "train", vocab_size=10_000, tokenizer="cd" * 32, shard_tokens=shard_tokens
    )
    for number, length in enumerate(lengths, start=first):
        writer.add(np.arange(length) + 100 * number, length)
        writer.end_document()
    shards = [open_shard(folder / entry["file"]) for entry in writer.finish()["shards"]]
    return Part(shards, 10_000)


@pytest.fixture(params=[10, 60, 10_000], ids=["20 shards", "6 shards", "1 shard"])
def tokens(request: pytest.FixtureRequest, tmp_path: Path) -> Part:
    return part(tmp_path / "part", LENGTHS, request.param)


def stream(windows: ShuffledWindows, epoch: int) -> tuple[list[int], list[int]]:
    """Return the order of the windows, by where each begins, and the row that they make up."""
    found = [windows.sample(epoch, i) for i in range(len(windows))]
    for inputs, targets in found:
        assert inputs[1:].tolist() == targets[:-1].tolist()
        assert inputs.dtype == targets.dtype == torch.int64
    after = {tuple(x.tolist()): (x.tolist(), y.tolist()) for x, y in found}
    assert len(after) == len(found)
    # A window's last target is the first input of the next one in the row.
    by_first = {x[0]: (x, y) for x, y in after.values()}
    seconds = {y[-1] for _, y in after.values()}
    (first,) = set(by_first) - seconds
    row, order = [], {}
    at = first
    while at in by_first:
        order[at] = len(order)
        x, y = by_first[at]
        row += x
        at = y[-1]
    return [order[x.tolist()[0]] for x, _ in found], [*row, at]


@pytest.mark.parametrize("context", [1, 7, 100])
def test_an_epoch_is_a_row_of_whole_documents_cut_into_windows(tokens: Part, context: int) -> None:
    windows = ShuffledWindows(tokens, context, seed=3)
    total = sum(LENGTHS)
    assert len(windows) == (total - 1) // context
    rows = []
    for epoch in (0, 1):
        order, row = stream(windows, epoch)
        assert sorted(order) == list(range(len(windows)))
        assert len(set(row)) == len(row) == len(windows) * context + 1
        borders = [i for i in range(1, len(row)) if row[i] != row[i - 1] + 1]
        starts = [row[0], *(row[i] for i in borders)]
        assert all(s % 100 == 0 for s in starts)  # each run begins with a document
        ends = [row[i - 1] for i in borders]
        assert all(e % 100 == LENGTHS[e // 100] - 1 for e in ends)  # and ends with it
        rows.append((order, row))
    assert rows[0][1] != rows[1][1]
    if len(windows) > 20:
        assert rows[0][0] != sorted(rows[0][0])


def test_any_sample_can_be_asked_for_alone(tokens: Part) -> None:
    windows = ShuffledWindows(tokens, 5, seed=1)
    every = [[windows.sample(e, i)[0].tolist() for i in range(len(windows))] for e in range(3)]
    for epoch in (2, 0, 1):
        for index in (len(windows) - 1, 0, 41):
            fresh = ShuffledWindows(tokens, 5, seed=1)
            assert fresh.sample(epoch, index)[0].tolist() == every[epoch][index]
            copy = pickle.loads(pickle.dumps(windows))
            assert copy.sample(epoch, index)[0].tolist() == every[epoch][index]
    assert ShuffledWindows(tokens, 5, seed=2).sample(0, 0)[0].tolist() != every[0][0]
    for outside in (-1, len(windows)):
        with pytest.raises(IndexError):
            windows.sample(0, outside)


def test_the_order_is_the_same_for_ever(tmp_path: Path) -> None:
    windows = ShuffledWindows(part(tmp_path / "p", LENGTHS, 60), 50, seed=0)
    firsts = [int(windows.sample(0, i)[0][0]) for i in range(len(windows))]
    assert firsts == [1368, 918, 1515, 531, 700, 335, 1318, 1718, 130]


@pytest.mark.parametrize("context", [1, 6, 100, 475])
def test_windows_in_order_cross_shards(tokens: Part, context: int) -> None:
    windows = PartWindows(tokens, context)
    row = [100 * d + i for d, n in enumerate(LENGTHS) for i in range(n)]
    assert len(windows) == (len(row) - 1) // context
    for i in range(len(windows)):
        inputs, targets = windows[i]
        assert inputs.tolist() == row[i * context : (i + 1) * context]
        assert targets.tolist() == row[i * context + 1 : (i + 1) * context + 1]
    with pytest.raises(IndexError):
        windows[len(windows)]


def test_a_mixture_keeps_its_proportions_and_repeats_what_is_used_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "_BLOCK", 100)
    small = ShuffledWindows(part(tmp_path / "a", [30, 11], 999), 4, seed=0)
    large = ShuffledWindows(part(tmp_path / "b", LENGTHS, 99, first=50), 4, seed=0)
    mixed = MixedWindows([small, large], [3.0, 1.0], seed=5)
    assert len(mixed) == len(small) + len(large) == 10 + 118
    assert mixed.counts.tolist() == [75, 25]
    seen: dict[bool, list[int]] = {True: [], False: []}
    for number in range(300):
        first = int(mixed.sample(*divmod(number, len(mixed)))[0][0])
        seen[first < 5000].append(first)
        if number in (99, 299):
            assert len(seen[True]) == 3 * len(seen[False]) == 75 * (number + 1) // 100
    for corpus, firsts in ((small, seen[True]), (large, seen[False])):
        expected = [int(corpus.sample(*divmod(n, len(corpus)))[0][0]) for n in range(len(firsts))]
        assert firsts == expected  # nothing is left out and nothing comes twice in an epoch


@pytest.mark.parametrize("weights", [[1.0], [1, 1, 1], [1e-9, 1.0], [0.1, 0.2, 0.7], [5, 3, 2, 9]])
def test_shares(weights: list[float]) -> None:
    counts = _shares(weights, 10_000)
    exact = np.array(weights) / sum(weights) * 10_000
    assert counts.sum() == 10_000
    assert counts.min() >= 1
    assert np.abs(counts - exact).max() <= 2


def test_fingerprints_tell_data_apart(tmp_path: Path) -> None:
    one, two = part(tmp_path / "a", [9, 8], 99), part(tmp_path / "b", [8, 9], 99)
    a, b = ShuffledWindows(one, 4, 0), ShuffledWindows(two, 4, 0)
    mixes = [MixedWindows([a, b], [w, 1.0], 0).fingerprint() for w in (1.0, 2.0)]
    every = {a.fingerprint(), b.fingerprint(), ShuffledWindows(one, 5, 0).fingerprint(), *mixes}
    assert len(every) == 5


def test_an_id_that_an_altered_shard_holds_is_refused(tmp_path: Path) -> None:
    found = part(tmp_path / "a", [40], 99)
    path = found.shards[0].path
    content = bytearray(path.read_bytes())
    content[128 + 2 * 10 : 128 + 2 * 11] = b"\xff\xff"
    path.write_bytes(content)
    windows = PartWindows(found, 4)
    assert windows[0][0].tolist() == [0, 1, 2, 3]
    with pytest.raises(
        PolyvisionError, match="token id 65535 at tokens 8 to 13 is outside the voc"
    ):
        windows[2]


def test_maps_are_dropped_before_they_add_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = part(tmp_path / "a", LENGTHS, 1)
    windows = PartWindows(found, 10)
    monkeypatch.setattr(corpus_module, "_MAPS", 3)
    for i in range(len(windows)):
        windows[i]
        assert len(found._maps) <= 3
    monkeypatch.setattr(corpus_module, "_MAPPED_BYTES", 0)
    windows[5]
    assert len(found._maps) == 1


@pytest.mark.slow
def test_memory_of_the_process_does_not_grow_with_the_file(tmp_path: Path) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    writer = PartWriter(
        tmp_path, "train", vocab_size=60_000, tokenizer="cd" * 32, shard_tokens=10**9
    )
    block = np.random.default_rng(0).integers(0, 60_000, 1_000_000)
    for _ in range(100):  # 200 MB
        writer.add(block, len(block))
        writer.end_document()
    writer.finish()
    found = Part([open_shard(tmp_path / "train-00000.bin")], 60_000)
    assert found.shards[0].header.file_bytes > 200e6
    windows = ShuffledWindows(found, 1024, seed=0)
    windows.sample(0, 0)
    before = resident()
    for batch in range(500):
        for i in range(8):
            windows.sample(0, batch * 8 + i)
    assert resident() - before < 50e6
