"""Which rank's error ended a distributed run, and that the first rank says it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch.distributed as dist

from polyvision.errors import PolyvisionError
from polyvision.training import app
from polyvision.training.loop.non_finite import NonFiniteError
from polyvision.training.run import ranks
from polyvision.training.run.ranks import RankError, Watch, leave_error, watched
from polyvision.training.run.state import track

GLOO = "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:42315"


class Process:
    def __init__(self, code=None):
        self.code = code
        self.signals = []

    def poll(self):
        return self.code

    def send_signal(self, number):
        self.signals.append(number)


class Trainer:
    is_global_zero = True

    def __init__(self, *processes):
        launcher = object.__new__(ranks._Launcher)
        launcher._ranks = processes
        self.strategy = type("Strategy", (), {"launcher": launcher})


@pytest.fixture
def leave(tmp_path, monkeypatch):
    """Leave errors as further ranks do."""

    def leave(rank, error):
        with monkeypatch.context() as patch:
            patch.setenv("POLYVISION_RUN_FOLDER", str(tmp_path))
            patch.setenv("LOCAL_RANK", str(rank))
            try:
                raise error
            except Exception as raised:
                leave_error(raised)
        time.sleep(0.002)  # the next error has a later time

    return leave


@pytest.fixture(autouse=True)
def _short_patience(monkeypatch):
    monkeypatch.setattr(ranks, "_PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr(ranks, "_PATIENCE_WITH_A_SAVE_SECONDS", 0.4)
    monkeypatch.setattr(ranks, "_POLL_SECONDS", 0.01)


def run(trainer, folder, error, before=lambda: None):
    """Return what a run raises in which the first rank meets ``error``."""
    watch = Watch(folder, lambda found: None, lambda: False)
    try:
        with watched(trainer, watch):
            trainer.strategy.launcher.started(trainer.strategy.launcher._ranks)
            before()
            raise error
    except Exception as raised:
        return raised


def test_a_lost_connection_gives_way_to_what_ended_the_other_rank(tmp_path, leave):
    processes = [Process(), Process(2)]

    def before():
        leave(1, RuntimeError(GLOO))
        leave(2, NonFiniteError("step 3: the data is not finite"))

    error = run(Trainer(*processes), tmp_path, RuntimeError(GLOO), before)
    assert isinstance(error, RankError)
    assert str(error) == "rank 2: step 3: the data is not finite"
    assert (error.kind, error.code, error.details) == ("NonFiniteError", 2, "")
    assert [process.signals for process in processes] == [[signal.SIGKILL]] * 2
    assert not list(tmp_path.glob(".rank*"))


def test_an_error_that_is_no_mistake_brings_its_traceback(tmp_path, leave):
    error = run(
        Trainer(Process(1)),
        tmp_path,
        dist.DistNetworkError("the socket is closed"),
        lambda: leave(1, ZeroDivisionError("division\nby zero")),
    )
    assert str(error) == "rank 1: ZeroDivisionError: division by zero"
    assert (error.kind, error.code) == (None, 1)
    assert "in leave" in error.details
    assert error.details.endswith("ZeroDivisionError: division\nby zero\n")


@pytest.mark.parametrize(("code", "how"), [(-9, "SIGKILL"), (3, "exit code 3")])
def test_a_rank_that_ends_without_a_word_is_named(code, how, tmp_path, leave):
    trainer = Trainer(Process(), Process(code))
    error = run(trainer, tmp_path, RuntimeError(GLOO), lambda: leave(1, RuntimeError(GLOO)))
    assert str(error) == f"rank 2: the process ended with {how}"
    assert error.code == 1


def test_the_first_of_two_mistakes_counts(tmp_path, leave):
    def before():
        leave(2, PolyvisionError("first"))
        leave(1, PolyvisionError("second"))

    trainer = Trainer(Process(2), Process(2))
    assert str(run(trainer, tmp_path, RuntimeError(GLOO), before)) == "rank 2: first"
    assert str(run(trainer, tmp_path, PolyvisionError("third"), before)) == "rank 2: first"


def test_an_error_of_the_first_rank_is_its_own(tmp_path, leave):
    own = PolyvisionError("mine")
    assert run(Trainer(Process()), tmp_path, own) is own
    aborted = Trainer(Process(-6))  # as NCCL ends a process whose peer is gone
    assert run(aborted, tmp_path, own) is own
    assert run(aborted, tmp_path, own, lambda: leave(1, RuntimeError(GLOO))) is own
    lost = RuntimeError(GLOO)
    assert run(Trainer(Process()), tmp_path, lost) is lost


def test_a_report_of_an_earlier_run_does_not_count(tmp_path, leave):
    leave(1, PolyvisionError("of yesterday"))
    lost = RuntimeError(GLOO)
    assert run(Trainer(Process()), tmp_path, lost) is lost


@pytest.mark.parametrize("saving", [False, True])
def test_a_first_rank_that_waits_without_an_end_is_ended(saving, tmp_path, leave):
    found, ended = [], threading.Event()

    def end(error):
        found.append(error)
        ended.set()

    watch = Watch(tmp_path, end, lambda: saving)
    watch.begin([Process(), Process(-9)])
    assert ended.wait(20)
    assert [str(error) for error in found] == ["rank 2: the process ended with SIGKILL"]


def test_a_run_that_ends_by_itself_is_not_ended(tmp_path):
    found = []
    watch = Watch(tmp_path, found.append, lambda: False)
    process = Process()
    watch.begin([process])
    watch.close()
    process.code = -9  # as ranks are, when the first one is stopped
    time.sleep(0.5)
    assert found == []


def test_what_is_recorded_names_the_rank(tmp_path):
    for error, text in (
        (RankError(1, "no such file", "PolyvisionError", 2), "PolyvisionError: rank 1: no such"),
        (RankError(1, "the process ended with SIGKILL"), "rank 1: the process ended with SIGKILL"),
    ):
        with pytest.raises(RankError), track(tmp_path, {}, 0, lambda: 5):
            raise error
        state = json.loads((tmp_path / "state.json").read_text(encoding="utf-8"))
        assert (state["state"], state["step"]) == ("failed", 5)
        assert state["error"].startswith(text)


def test_one_that_cannot_leave_the_block_is_recorded(tmp_path):
    with track(tmp_path, {}, 0, lambda: 5) as failed:
        failed(RankError(1, "the process ended with SIGKILL"))
        state = json.loads((tmp_path / "state.json").read_text(encoding="utf-8"))
        assert state["state"] == "failed"


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_further_rank_prints_nothing(rank, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.setenv("POLYVISION_RUN_FOLDER", str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        app._fail(PolyvisionError("a mistake"), debug=False)
    assert ended.value.code == 2
    reports = [path.name for path in tmp_path.iterdir()]
    printed = capsys.readouterr().err
    expected = ([], "error: a mistake\n") if rank == "0" else ([".rank1.error"], "")
    assert (reports, printed) == expected


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="needs the parent's number")
def test_a_further_rank_ends_with_the_first(tmp_path):
    """The first rank here is a process that starts another one and is killed."""
    code = """
import subprocess, sys, time
from polyvision.training.run.ranks import end_with_the_first
if len(sys.argv) > 1:
    end_with_the_first()
    print("ready", flush=True)
    time.sleep(60)
else:
    subprocess.Popen([sys.executable, __file__, "further"]).wait()
"""
    script = tmp_path / "first.py"
    script.write_text(code, encoding="utf-8")
    first = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE)
    with contextlib.closing(first.stdout) as output:
        assert output.readline() == b"ready\n"
        first.kill()
        assert output.read() == b""  # comes when the other one has ended as well
    first.wait()


def test_an_error_beside_options_of_hydra_is_one_line(tmp_path, monkeypatch, capsys):
    def fails(*arguments):
        raise PolyvisionError("a mistake")

    monkeypatch.setattr(app, "_run", fails)
    monkeypatch.setattr("sys.argv", ["train_lm.py", "model=lm_tiny", f"hydra.run.dir={tmp_path}"])
    with pytest.raises(SystemExit) as ended:
        app.main("language")
    assert (ended.value.code, capsys.readouterr().err) == (2, "error: a mistake\n")
