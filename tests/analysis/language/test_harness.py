"""The real LM Evaluation Harness on tasks of a local folder; skipped where it is not installed."""

from __future__ import annotations

import json

import pytest

from polyvision.cli import main

pytest.importorskip("lm_eval")

CHOICE = """
task: tiny_choice
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}]
"""
ROLLING = """
task: tiny_rolling
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: bits_per_byte}]
"""
UNTIL = """
task: tiny_until
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 4}
metric_list: [{metric: exact_match}]
"""


@pytest.fixture
def task_folder(tmp_path, monkeypatch):
    for name in ("HF_DATASETS_OFFLINE", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    folder = tmp_path / "tasks"
    folder.mkdir()
    rows = [
        {"question": "the white", "choices": [" whale", " sea", " cafe"], "answer": i % 3}
        for i in range(6)
    ]
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in (("choice", CHOICE), ("rolling", ROLLING), ("until", UNTIL)):
        (folder / f"{name}.yaml").write_text(text.replace("FILE", str(data)))
    return folder


def test_three_kinds_of_tasks(bpe_run, task_folder, tmp_path, capsys) -> None:
    output = tmp_path / "found.json"
    tasks = ["tiny_choice", "tiny_rolling", "tiny_until"]
    command = ["evaluate", str(bpe_run), "--tasks", *tasks, "--task-folder", str(task_folder)]
    assert main([*command, "--output", str(output)]) == 0
    shown = capsys.readouterr().out
    found = json.loads(output.read_text())["tasks"]
    assert found["tiny_choice"]["acc"] == pytest.approx(1 / 3)  # one answer for the same question
    assert found["tiny_rolling"]["bits_per_byte"] > 0
    assert set(found) == set(tasks)
    assert "tiny_choice" in shown
    assert "0.3333" in shown


def test_an_unknown_task_and_one_without_data(bpe_run, task_folder, capsys) -> None:
    command = ["evaluate", str(bpe_run), "--task-folder", str(task_folder), "--tasks"]
    assert main([*command, "tiny_choise"]) == 2
    error = capsys.readouterr().err
    assert "unknown task 'tiny_choise'. Did you mean 'tiny_choice'?" in error
    assert len(error) < 400  # not the harness's thousands of names
    assert main([*command, "sciq"]) == 2
    assert "--task-folder takes tasks with local files" in capsys.readouterr().err
