"""Run folders as trainers, kills and resumes leave them."""

import subprocess
import sys

import pytest

from polyvision.analysis.compare.reading import find_runs, read_metrics, read_run
from polyvision.errors import PolyvisionError


def test_runs_are_found_by_folder_parent_and_glob(write_run, tmp_path):
    folders = [write_run("relu", seed) for seed in (9, 10)]
    root = tmp_path / "runs"
    for places in (
        [str(folder) for folder in folders],
        [str(root)],
        [f"{root}/*/seed*"],
        [f"{tmp_path}/**/relu"],
        [str(root), str(folders[0])],  # named twice, found once
    ):
        assert find_runs(places) == (folders, [])


def test_a_place_without_runs_is_named(tmp_path):
    with pytest.raises(PolyvisionError, match="nowhere does not exist"):
        find_runs([str(tmp_path / "nowhere")])
    with pytest.raises(PolyvisionError, match="no run in"):
        find_runs([str(tmp_path)])


def test_a_run_without_a_state_is_told_apart(write_run, tmp_path):
    new, old = write_run("relu", 0), write_run("relu", 1)
    (old / "state.json").unlink()
    assert find_runs([str(tmp_path)]) == ([new], [old])


def test_a_torn_last_line_is_passed_over_and_other_damage_is_counted(tmp_path):
    path = tmp_path / "metrics.jsonl"
    whole = ['{"step": 1, "a": 1.5}', "noise", "[1]", '{"a": 2}', '{"step": 2, "a": NaN}']
    path.write_text("\n".join([*whole, '{"step": 3, "']))
    series, unreadable = read_metrics(path)
    assert list(series["a"]) == [1, 2]
    assert series["a"][1] == 1.5
    assert series["a"][2] != series["a"][2]
    assert unreadable == 3


def test_what_a_resume_writes_again_replaces_what_was_there(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (2, 20.0), (3, 30.0)]
    path.write_text("".join(f'{{"step": {s}, "a": {v}}}\n' for s, v in rows))
    assert read_metrics(path)[0]["a"] == {1: 1.0, 2: 20.0, 3: 30.0}


def test_a_run_without_metrics_has_no_series(tmp_path):
    assert read_metrics(tmp_path / "metrics.jsonl") == ({}, 0)


def test_a_running_run_whose_process_is_gone_was_killed(write_run):
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    states = {
        "finished": {},
        "killed": {"state": "running", "process": process.pid},
        "running": {"state": "running"},
        "failed": {"state": "failed", "error": "RuntimeError: no"},
    }
    for i, (status, state) in enumerate(states.items()):
        assert read_run(write_run("relu", i, state=state)).status == status
    elsewhere = {"state": "running", "process": process.pid, "host": "another machine"}
    assert read_run(write_run("relu", 9, state=elsewhere)).status == "running"


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("state.json", "{", r"cannot read .*state\.json"),
        ("state.json", "{}", r"state\.json is not the state of a run: KeyError 'settings'"),
        ("config.yaml", "a: [", r"cannot read .*config\.yaml"),
        ("config.yaml", "text", r"config\.yaml is damaged"),
    ],
)
def test_a_damaged_file_is_named(write_run, file, text, message):
    folder = write_run("relu", 0)
    (folder / file).write_text(text)
    with pytest.raises(PolyvisionError, match=message):
        read_run(folder)
