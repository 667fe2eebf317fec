"""Two ranks compute what one process does, stop together, and go on as one."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
# Load balance is measured on the tokens of a pass, and so is no mean over ranks: left out.
MIXTURE = ["model=moe_tiny", "model.width=32", "model.layers=1", "model.heads=2"]
MIXTURE += ["model.ffn_hidden=32", "model.context=32", "model.moe.experts=256", "model.moe.top_k=1"]
MIXTURE += ["model.moe.load_balance=0", "recipe.optimizer=sgd", "recipe.optimizer_options={}"]
MIXTURE += ["recipe.ema_decay=0.9", "trainer.max_epochs=2", "trainer.checkpoint_every_n_steps=4"]
MIXTURE += ["recipe.batch_size=128", "analysis.every_n_steps=5", "analysis.kinds=[rank,health]"]


def start(*arguments):
    return subprocess.Popen(
        [sys.executable, str(ROOT / "train_lm.py"), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def finish(process, code=0):
    output, errors = process.communicate(timeout=500)
    assert process.returncode == code, errors
    return output, errors


def series(folder, tag):
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(row["step"], row[tag]) for row in rows if tag in row]


def folder_of(root):
    (folder,) = root.glob("*/*/*/*/*")  # of all ranks
    return folder


@pytest.fixture
def mixture(overrides):
    return [o for o in overrides["language"] if not o.startswith(("run_root", "model"))] + MIXTURE


def test_two_ranks_of_a_mixture_of_experts(mixture, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    finish(start(*mixture, f"run_root={one}"))
    output, errors = finish(start(*mixture, f"run_root={two}", "trainer.devices=2"))
    assert "recommended" not in errors
    for line in ("Plan\n", "Sample\n", "Summary\n"):
        assert output.count(line) == 1
    one, two = folder_of(one), folder_of(two)
    assert len(list((two / "analysis").glob("*.json"))) == 6
    assert EventAccumulator(str(two)).Reload().PluginTagToContent("hparams")
    tags = ["val/loss", "val_ema/loss", "optim/grad_norm", "train/router_z", "train/tokens"]
    tags += ["train/loss", "train/ppl", "train/bpb"]
    tags += ["router/blocks.0/busiest", "router/blocks.0/idle", "router/blocks.0/entropy"]
    for tag in tags:
        (steps, values), (_, expected) = (zip(*series(f, tag), strict=True) for f in (two, one))
        assert steps == tuple(step for step, _ in series(one, tag))
        assert values == pytest.approx(expected, rel=1e-4), tag
    assert max(value for _, value in series(two, "router/blocks.0/idle")) > 0


@pytest.mark.parametrize("to_all", [False, True])
def test_two_ranks_stop_together_and_one_goes_on(to_all, mixture, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    finish(start(*mixture, f"run_root={one}"))
    process = start(*mixture, f"run_root={two}", "trainer.devices=2")
    while process.poll() is None and not list(two.glob("*/*/*/*/*/checkpoints/last.ckpt")):
        time.sleep(0.01)
    if to_all:
        (child,) = subprocess.run(
            ["pgrep", "-P", str(process.pid), "-f", "train_lm"], capture_output=True, text=True
        ).stdout.split()
        os.kill(int(child), signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    _, errors = finish(process, 143)
    assert errors.count("stopping after this step") == 1
    assert errors.count("interrupted at step") == 1
    step = json.loads((folder_of(two) / "state.json").read_text())["step"]
    saved = torch.load(folder_of(two) / "checkpoints/last.ckpt", weights_only=True)
    assert saved["global_step"] == step < 10
    _, errors = finish(start(*mixture, f"run_root={two}", "resume=auto"))
    one, two = folder_of(one), folder_of(two)
    assert [s for s, _ in series(two, "train/loss")] == list(range(1, 11))
    (_, values), (_, expected) = (zip(*series(f, "val/loss"), strict=True) for f in (two, one))
    assert values == pytest.approx(expected, rel=1e-4)


def test_a_rank_that_fails_leaves_no_other_behind(mixture, tmp_path):
    """The first rank alone writes, and its disk is full."""
    process = start(*mixture, f"run_root={tmp_path}", "trainer.devices=2")
    while process.poll() is None and not list(tmp_path.glob("*/*/*/*/*/state.json")):
        time.sleep(0.01)
    (folder,) = tmp_path.glob("*/*/*/*/*")
    (folder / "checkpoints").rmdir()
    (folder / "checkpoints").write_text("in the way")
    _, errors = finish(process, 2)
    assert "error: " in errors
    left = subprocess.run(["pgrep", "-f", f"run_root={tmp_path}"], capture_output=True, text=True)
    assert left.stdout == ""


FINISHED = """
import atexit, os, pathlib, sys
from polyvision.training import app

def threads():
    names = [path.read_text() for path in pathlib.Path("/proc/self/task").glob("*/comm")]
    pathlib.Path(f"{sys.argv[0]}.{os.environ.get('LOCAL_RANK', '0')}").write_text("".join(names))

atexit.register(threads)
app.main("language")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the threads of a process from /proc")
def test_no_thread_of_gloo_is_left_when_a_rank_ends(overrides, tmp_path):
    """It could free a tensor while the interpreter shuts down, which aborts the process."""
    script = tmp_path / "finished.py"
    script.write_text(FINISHED, encoding="utf-8")
    command = [sys.executable, str(script), *overrides["language"], "trainer.devices=2"]
    subprocess.run([*command, "trainer.max_epochs=1"], check=True, timeout=500)
    for rank in range(2):
        names = Path(f"{script}.{rank}").read_text()
        assert "python" in names
        assert "gloo" not in names


FAULTY = """
import os, signal, sys
from polyvision.errors import PolyvisionError
from polyvision.training import app
from polyvision.training.loop.module import TaskModule

def fault(kind):
    if kind == "mistake":
        raise PolyvisionError("sample 5 cannot be read")
    if kind == "bug":
        return 1 / 0
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)

kind = os.environ["FAULT"]
if os.environ.get("LOCAL_RANK") == "1":
    if kind == "early":
        sys.exit(3)
    original = TaskModule.training_step

    def step(self, batch, index):
        if self.global_step == 2:
            fault(kind)
        return original(self, batch, index)

    TaskModule.training_step = step
app.main("language")
"""


@pytest.mark.parametrize(
    ("kind", "code", "line", "recorded"),
    [
        ("mistake", 2, "rank 1: sample 5 cannot be read", "PolyvisionError: {}"),
        ("bug", 1, "rank 1: ZeroDivisionError: division by zero", "{}"),
        ("killed", 1, "rank 1: the process ended with SIGKILL", "{}"),
        ("early", 1, "rank 1: the process ended with exit code 3", "{}"),
    ],
)
def test_the_first_error_of_any_rank_is_said_and_recorded(
    kind, code, line, recorded, overrides, tmp_path
):
    script = tmp_path / "faulty.py"
    script.write_text(FAULTY, encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, str(script), *overrides["language"], "trainer.devices=2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "FAULT": kind},
    )
    _, errors = finish(process, code)
    said = [text for text in errors.splitlines() if text.startswith("error: ")]
    assert said == [f"error: {line}"]
    assert "gloo" not in errors
    assert errors.count("Traceback") == (kind == "bug")
    folder = folder_of(tmp_path / "runs")
    state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    assert state["state"] == "failed"
    assert state["error"] == recorded.format(line)
    assert not list(folder.glob(".rank*"))
