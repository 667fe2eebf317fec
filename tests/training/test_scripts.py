"""The two scripts as a user runs them: processes, exit codes, kills."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
SCRIPTS = {"vision": "train_vision.py", "language": "train_lm.py"}


def start(task, *arguments, **environment):
    return subprocess.Popen(
        [sys.executable, str(ROOT / SCRIPTS[task]), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


def rows_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def finish(process):
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return output


def test_mistakes_exit_with_2_and_no_traceback(tmp_path):
    process = start("vision", "mdoel=resnet50", "act=polynrom", f"run_root={tmp_path}/runs")
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 2
    assert output == ""
    assert [line[:7] for line in errors.splitlines()] == ["error: "] * 2
    assert not (tmp_path / "runs").exists()


def test_two_activations_make_two_runs(overrides, tmp_path):
    short = ["trainer.max_steps=2", "-m", "act=relu,polynorm"]
    output = finish(start("vision", *overrides["vision"], *short))
    folders = sorted(p.parent.parent.name for p in tmp_path.glob("runs/*/*/*/*/*/summary.json"))
    assert folders == ["polynorm", "relu"]
    assert output.count("Summary\n") == 2
    assert "Run 2 of 2: " in output


def killed_and_resumed(task, arguments, tmp_path):
    """Return the folders of an unbroken run, and of one that was killed after a checkpoint."""
    finish(start(task, *arguments, f"run_root={tmp_path}/whole"))
    (whole,) = tmp_path.glob("whole/*/*/*/*/seed0")
    folder = tmp_path / "runs" / whole.relative_to(tmp_path / "whole")
    process = start(task, *arguments)
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and process.poll() is None:
        if (folder / "checkpoints" / "last.ckpt").exists():
            break
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (folder / "summary.json").exists()
    finish(start(task, *arguments, "resume=auto"))
    return whole, folder


def test_sigkill_then_resume_ends_like_an_unbroken_run(overrides, tmp_path):
    arguments = [*overrides["language"], "trainer.checkpoint_every_n_steps=3"]
    whole, folder = killed_and_resumed("language", [*arguments, "trainer.max_epochs=3"], tmp_path)
    last = [json.loads((f / "summary.json").read_text())["shown"] for f in (whole, folder)]
    assert last[0] == last[1]
    steps = [row["step"] for row in rows_of(folder) if "train/loss" in row]
    assert steps == list(range(1, len(steps) + 1))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_sigkill_of_images_with_workers_changes_no_step(workers, overrides, tmp_path):
    arguments = [*overrides["vision"], f"data.workers={workers}", "recipe.mix.mixup=0.2"]
    arguments += ["recipe.ema_decay=0.9", "recipe.augment.auto_augment=rand-m6-mstd0.5-inc1"]
    arguments += ["trainer.checkpoint_every_n_steps=4", "trainer.max_epochs=3"]
    whole, folder = killed_and_resumed("vision", arguments, tmp_path)
    for tag in ("train/loss", "val/loss", "val_ema/loss"):
        rows = [[(r["step"], r[tag]) for r in rows_of(f) if tag in r] for f in (whole, folder)]
        assert rows[0] == rows[1]
        assert len(rows[0]) == (27 if tag == "train/loss" else 3)


def test_two_processes_compute_what_one_does(overrides, tmp_path):
    steps = ["trainer.max_steps=3", "recipe.optimizer=sgd", "recipe.optimizer_options={}"]
    steps += ["trainer.histograms=false"]
    finish(start("language", *overrides["language"], *steps, f"run_root={tmp_path}/one"))
    two = [*steps, "trainer.devices=2", f"run_root={tmp_path}/two"]
    finish(start("language", *overrides["language"], *two))
    folders = [next(tmp_path.glob(f"{n}/*/*/*/*/seed0")) for n in ("one", "two")]
    assert len(list(tmp_path.glob("two/*/*/*/*/*"))) == 1
    losses = [[r["val/loss"] for r in rows_of(f) if "val/loss" in r] for f in folders]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.slow
def test_a_locale_of_ascii_fails_no_run(overrides, tmp_path):
    text = tmp_path / "b\u00fcch.txt"
    text.write_text("Call me \U0001f600 Ishmael \u2014 gr\u00fc\u00dfe.\n" * 600, encoding="utf-8")
    given = [o for o in overrides["language"] if not o.startswith("data.path")]
    given += [f"data.path='{text}'", "trainer.max_steps=3"]
    output = finish(start("language", *given, LC_ALL="C", PYTHONUTF8="0"))
    assert "Sample\n" in output
    assert "\\u" in output
    assert len(list(tmp_path.glob("runs/*/*/*/*/*/summary.json"))) == 1


@pytest.mark.slow
def test_a_run_goes_on_without_the_reader_of_its_output(overrides, tmp_path):
    process = start("language", *overrides["language"], "trainer.max_steps=6")
    assert process.stdout.readline() == "Plan\n"
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(timeout=300) == 0, errors
    assert errors.count("going on without it") == 1
    assert len(list(tmp_path.glob("runs/*/*/*/*/*/summary.json"))) == 1


@pytest.mark.slow
def test_a_stopped_sweep_over_any_key_goes_on(overrides, tmp_path):
    command = [*overrides["language"], "trainer.max_steps=40", "-m", "recipe.lr=1e-3,2e-3,3e-3"]
    process = start("language", *command)
    while process.poll() is None and not list(tmp_path.glob("runs/*/*/*/*/seed0-2/metrics.jsonl")):
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 143
    assert "1 of 3 runs were not started; the same command with resume=auto goes on" in errors
    finish(start("language", *command, "resume=auto"))
    (parent,) = {path.parent for path in tmp_path.glob("runs/*/*/*/*/seed0")}
    found = {
        folder.name: yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        for folder in parent.iterdir()
        if (folder / "summary.json").exists()
    }
    rates = {name: config["recipe"]["lr"] for name, config in found.items()}
    assert rates == {"seed0": 1e-3, "seed0-2": 2e-3, "seed0-3": 3e-3}


@pytest.mark.slow
def test_of_three_starts_at_once_one_trains(overrides, tmp_path):
    command = [*overrides["language"], "trainer.max_steps=200", "trainer.max_epochs=40"]
    processes = [start("language", *command, "resume=auto") for _ in range(3)]
    ends = [(process.communicate(timeout=500)[1], process.returncode) for process in processes]
    assert sorted(code for _, code in ends) == [0, 2, 2], ends
    refused = [errors for errors, code in ends if code]
    assert all(errors.startswith("error: ") and errors.count("\n") == 1 for errors in refused)
    assert [path.name for path in tmp_path.glob("runs/*/*/*/*/*")] == ["seed0"]
