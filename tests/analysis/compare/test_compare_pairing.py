"""Numbers of a comparison against values worked out by hand and printed tables of Student's t."""

import math

import pytest

from polyvision.analysis.compare.pairing import (
    Difference,
    baseline_of,
    best,
    common_step,
    final,
    group_runs,
    metrics_of,
    paired_difference,
)
from polyvision.analysis.compare.reading import read_run
from polyvision.analysis.compare.report import mean_and_band, smooth
from polyvision.errors import PolyvisionError


@pytest.mark.parametrize(
    ("values", "t"),  # 97.5 % quantiles as printed in textbooks
    [((1.0, 2.0), 12.706), ((1.0, 2.0, 3.0), 4.303), (tuple(map(float, range(10))), 2.262)],
)
def test_interval_is_that_of_students_t(values, t):
    n = len(values)
    mean = sum(values) / n
    std = math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1))
    low, high = Difference(tuple(range(n)), values).interval
    assert (low + high) / 2 == pytest.approx(mean)
    assert (high - low) / 2 == pytest.approx(t * std / math.sqrt(n), rel=1e-3)


@pytest.mark.parametrize("values", [(), (1.0,), (0.1, 0.1), (0.1 + 0.2, 0.3), (0.0, 0.0)])
def test_no_interval_without_two_different_values(values):
    assert Difference(tuple(range(len(values))), values).interval is None


def test_only_common_seeds_pair():
    difference = paired_difference({3: 5.0, 1: 2.0, 7: 9.0}, {1: 1.5, 3: 1.0, 4: 0.0})
    assert difference == Difference((1, 3), (0.5, 4.0))
    assert difference.mean == 2.25


def test_final_best_and_training_loss(write_run):
    folder = write_run("relu", 0, (0.9, math.nan, 0.7), steps=(2, 4, 6))
    rows = "".join(f'{{"step": {s}, "train/loss": {s}}}\n' for s in range(1, 21))
    (folder / "metrics.jsonl").open("a").write(rows)
    run = read_run(folder)
    assert final(run, "val/acc1") == 0.7
    assert final(run, "val/acc1", step=3) == 0.9
    assert final(run, "val/ppl") is None
    assert best(run, "val/acc1") == 0.9
    assert best(run, "val/loss") == pytest.approx(0.1)
    assert final(run, "train/loss") == 19.5  # steps 19 and 20 of 20
    assert final(run, "train/loss", step=10) == 10.0


def test_the_same_seed_twice_is_said_and_never_averaged(write_run):
    stopped = {"state": {"state": "interrupted"}}
    cases = [
        ([{}, {}], "seed0-2"),
        ([{}, stopped], "seed0"),
        ([stopped, {}], "seed0-2"),
        ([stopped, stopped], "seed0-2"),
    ]
    for i, (kinds, kept) in enumerate(cases):
        names = ("seed0", "seed0-2")
        runs = [
            read_run(write_run(f"act{i}", 0, name=name, **kind))
            for name, kind in zip(names, kinds, strict=True)
        ]
        groups, (note,) = group_runs(runs)
        assert groups[f"act{i}"][0].folder.name == kept
        (dropped,) = {*names} - {kept}
        assert f"{dropped} (" in note


def test_baseline_is_relu_or_the_first_or_the_one_asked_for():
    groups = {"gelu": {}, "relu": {}, "silu": {}}
    assert baseline_of(groups, None) == "relu"
    assert baseline_of({"gelu": {}, "silu": {}}, None) == "gelu"
    assert baseline_of(groups, "silu") == "silu"
    with pytest.raises(PolyvisionError, match="Did you mean 'gelu'"):
        baseline_of(groups, "gleu")


def test_runs_of_two_tasks_share_no_metric(write_run):
    folders = [write_run("relu", 0), write_run("relu", 1, state={"monitor": "val/loss"})]
    with pytest.raises(PolyvisionError, match="val/acc1, val/loss"):
        metrics_of([read_run(folder) for folder in folders])


def test_common_step_is_the_last_that_all_have(write_run):
    a = read_run(write_run("relu", 0, (0.1, 0.2, 0.3), steps=(2, 4, 6)))
    b = read_run(write_run("relu", 1, (0.1, 0.2), steps=(2, 4)))
    none = read_run(write_run("relu", 2, ()))
    assert common_step([a, b]) == 4
    with pytest.raises(PolyvisionError, match=r"relu/seed0 last at 6, .*relu/seed2 last at none"):
        common_step([a, b, none])


def test_band_ends_with_the_shortest_run():
    lines = [{1: 1.0, 2: 2.0, 3: 3.0}, {1: 3.0, 2: 2.0}]
    assert mean_and_band(lines) == ([1, 2], [2.0, 2.0], [pytest.approx(math.sqrt(2)), 0.0])
    assert mean_and_band([{5: 1.0}]) == ([5], [1.0], [0.0])
    assert mean_and_band([]) == ([], [], [])


def test_smoothing_keeps_short_lines_and_averages_long_ones():
    short = {i: float(i % 2) for i in range(199)}
    assert smooth(short) == short
    long = smooth({i: float(i % 2) for i in range(200)})
    assert long[0] == 0.0
    assert set(list(long.values())[1:]) == {0.5}
