"""Child processes: how many at a time, what reaches them, what their codes mean."""

import os
import signal
import sys
import threading
import time

import pytest

from polyvision.training.signals import Child, describe_code, run_children

SLEEPER = """
import signal, sys, time
def stop(number, _):
    print("got", number, flush=True)
    sys.exit(7)
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
print("ready", flush=True)
time.sleep(60)
"""


def python(code, log=None):
    return Child([sys.executable, "-S", "-c", code], log)


def test_codes_come_in_order_and_a_failure_stops_nothing(tmp_path):
    log = tmp_path / "log"
    order = []
    codes, stopped_by = run_children(
        [
            python("print(1)", log),
            python("raise SystemExit(3)"),
            python("import os; os.kill(os.getpid(), 9)"),
            python("print(2)", log),
        ],
        started=lambda number: order.append(("start", number)),
        ended=lambda number, code: order.append((number, code)),
    )
    assert codes == [0, 3, 137, 0]
    assert stopped_by is None
    assert order[:4] == [("start", 0), (0, 0), ("start", 1), (1, 3)]
    assert log.read_text().split() == ["1", "2"]


def test_slots_bound_what_runs_at_a_time_and_lend_their_variables(tmp_path):
    log = tmp_path / "log"
    running, most = set(), 0

    def started(number):
        nonlocal most
        running.add(number)
        most = max(most, len(running))

    code = "import os, time; print(os.environ['SLOT']); time.sleep(0.15)"
    run_children(
        [python(code, log)] * 5,
        [{"SLOT": "a"}, {"SLOT": "b"}],
        started,
        lambda number, _: running.discard(number),
    )
    assert most == 2
    assert set(log.read_text().split()) == {"a", "b"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_every_child_once_and_nothing_more_starts(tmp_path, number):
    logs = [tmp_path / str(i) for i in range(3)]
    before = signal.getsignal(number)

    def send():
        while not all(log.exists() and "ready" in log.read_text() for log in logs[:2]):
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    threading.Thread(target=send).start()
    codes, stopped_by = run_children([python(SLEEPER, log) for log in logs], [{}, {}])
    assert codes == [7, 7, None]
    assert stopped_by == number
    assert [log.read_text().count(f"got {int(number)}") for log in logs[:2]] == [1, 1]
    assert not logs[2].exists()
    assert signal.getsignal(number) == before


def test_an_error_leaves_no_child_behind(tmp_path):
    log = tmp_path / "log"

    def started(number):
        if number == 1:
            while not log.exists() or "ready" not in log.read_text():
                time.sleep(0.01)
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        run_children([python(SLEEPER, log), python("")], [{}, {}], started)
    assert "got 15" in log.read_text()


@pytest.mark.parametrize(("code", "text"), [(2, "exit code 2"), (137, "SIGKILL"), (143, "SIGTERM")])
def test_codes_in_words(code, text):
    assert describe_code(code) == text
