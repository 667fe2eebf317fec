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


def test_links_are_followed_and_a_run_counts_once(write_run, tmp_path):
    folder = write_run("relu", 0)
    links = tmp_path / "links"
    links.mkdir()
    (links / "a").symlink_to(folder)
    (links / "again").symlink_to(links)
    assert find_runs([str(links)]) == ([links / "a"], [])
    assert find_runs([str(folder), str(links), f"{folder}/../seed0"]) == ([folder], [])


def test_a_place_without_runs_is_named(tmp_path):
    with pytest.raises(PolyvisionError, match=r"no folder '.*nowhere'"):
        find_runs([str(tmp_path / "nowhere")])
    with pytest.raises(PolyvisionError, match=r"nothing matches .*/\*\.ckpt"):
        find_runs([f"{tmp_path}/*.ckpt"])
    with pytest.raises(PolyvisionError, match="no run in"):
        find_runs([str(tmp_path)])


def test_a_run_without_a_state_is_told_apart(write_run, tmp_path):
    new, old = write_run("relu", 0), write_run("relu", 1)
    (old / "state.json").unlink()
    assert find_runs([str(tmp_path)]) == ([new], [old])


def test_a_torn_last_line_is_passed_over_and_other_damage_is_counted(tmp_path):
    path = tmp_path / "metrics.jsonl"
    whole = ['{"step": 1, "a": 1.5}', "noise", "[1]", '{"a": 2}', '{"step": 2, "a": NaN}']
    whole += ['{"step": -1, "a": 3}', '{"step": 1e999, "a": 3}']
    path.write_text("\n".join([*whole, '{"step": 3, "']))
    series, unreadable = read_metrics(path)
    assert list(series["a"]) == [1, 2]
    assert series["a"][1] == 1.5
    assert series["a"][2] != series["a"][2]
    assert unreadable == 5


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
        ("config.yaml", "model: {name: a}", r"config\.yaml is damaged: it has no data\.name"),
    ],
)
def test_a_damaged_file_is_named(write_run, file, text, message):
    folder = write_run("relu", 0)
    (folder / file).write_text(text)
    with pytest.raises(PolyvisionError, match=message):
        read_run(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"total_steps": "many"},
        {"state": "running", "process": "none"},
        {"resumed_at": None},
        {"settings": {"act": None, "seed": 0, "parameters": 1}},
    ],
)
def test_a_state_of_wrong_types_is_named(write_run, change):
    with pytest.raises(PolyvisionError, match=r"state\.json is not the state of a run: TypeError"):
        read_run(write_run("relu", 0, state=change))


def test_metrics_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(PolyvisionError, match=r"cannot read .*Is a directory"):
        read_metrics(tmp_path)
