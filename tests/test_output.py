"""Printing fails no program: neither for a character, nor for a closed output or a full disk."""

import errno
import io
import os
import subprocess
import sys
import threading
from contextlib import suppress

import pytest
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from tensorboard.summary.writer.record_writer import RecordWriter

from polyvision.errors import PolyvisionError
from polyvision.output import (
    _lasting,
    count,
    duration,
    escape_output,
    lasting_output,
    plural,
    say_error,
)
from polyvision.training import app
from polyvision.training.logging.quiet import quiet
from polyvision.training.run.ranks import RankError


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (count(14110.0), "14.1k"),
        (count(999.9), "1k"),
        (count(23.5e6), "23.5M"),
        (count(0.8234), "0.823"),
        (duration(8.42), "8.4 s"),
        (duration(59.97), "1 min 0 s"),
        (duration(200.4), "3 min 20 s"),
        (duration(2 * 3600 + 301), "2 h 5 min"),
        (plural(1, "thread"), "1 thread"),
        (plural(0, "thread"), "0 threads"),
        (plural(2000, "document"), "2,000 documents"),
    ],
)
def test_numbers_have_units_that_fit(shown, expected):
    assert shown == expected


def ascii_file(path):
    return io.TextIOWrapper(path.open("wb"), encoding="ascii")


@pytest.mark.parametrize("function", [escape_output, lasting_output])
def test_what_the_encoding_lacks_is_escaped(function, tmp_path, monkeypatch):
    path = tmp_path / "out"
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, ascii_file(path))
        with pytest.raises(UnicodeEncodeError):
            print("—", file=getattr(sys, name))
    function()
    print("gr\u00fc\u00dfe \U0001f600 \udcc3", flush=True)
    assert path.read_text(encoding="ascii") == "gr\\xfc\\xdfe \\U0001f600 \\udcc3\n"


def test_an_output_that_is_no_file_is_left_alone(monkeypatch):
    mine = io.StringIO()
    monkeypatch.setattr(sys, "stdout", mine)
    lasting_output()
    assert sys.stdout is mine


def test_a_reader_that_is_gone_is_survived(tmp_path):
    reading, writing = os.pipe()
    with io.TextIOWrapper(io.FileIO(writing, "w"), encoding="utf-8") as stream:
        lasting = _lasting(stream)
        print("seen", file=lasting, flush=True)
        assert os.read(reading, 99) == b"seen\n"
        os.close(reading)
        with pytest.raises(BrokenPipeError):
            os.write(writing, b"what happens without")
        for _ in range(3):
            print("not seen", file=lasting, flush=True)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a file that is always full")
def test_a_full_disk_is_said_once_and_survived():
    code = "from polyvision.output import lasting_output as f; f()\n"
    code += "for i in range(3): print('line', flush=True)\n"
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, check=True
        )
    assert done.stderr == b"note: standard output: No space left on device; going on without it\n"


@pytest.mark.skipif(os.name != "posix", reason="closes descriptors as a shell does")
def test_no_file_takes_the_place_of_a_closed_output(tmp_path):
    code = "import os, sys\n"
    code += "from polyvision.output import lasting_output as f; f()\n"
    code += "print('out'); print('err', file=sys.stderr)\n"
    code += "file = open(sys.argv[1], 'w'); os.write(2, b'for the terminal')\n"
    file = tmp_path / "metrics"
    shell = '"$0" -c "$1" "$2" <&- >&- 2>&-'
    subprocess.run(["sh", "-c", shell, sys.executable, code, str(file)], check=True)
    assert file.read_bytes() == b""


def test_the_trainers_print_so(monkeypatch):
    called = []
    monkeypatch.setattr(sys, "argv", ["train_lm.py", "seed=1"])
    monkeypatch.setattr(app, "lasting_output", lambda: called.append("output"))
    monkeypatch.setattr(app, "_main", lambda task: called.append(task))
    app.main("language")
    assert called == ["output", "language"]


@pytest.mark.parametrize("options", [[], ["-m"], ["--multirun"]])
def test_the_runs_of_a_sweep_know_that_they_are(options, monkeypatch):
    monkeypatch.setenv("POLYVISION_SWEEP", "")  # to be put back
    monkeypatch.delenv("POLYVISION_SWEEP")
    monkeypatch.setattr(sys, "argv", ["train_lm.py", *options, "seed=1"])
    monkeypatch.setattr(app, "_checked", lambda *_: [None])
    monkeypatch.setattr(app, "_run", lambda *_: None)
    seen = []
    monkeypatch.setattr(app, "_sweep", lambda *_: seen.append(os.environ["POLYVISION_SWEEP"]) or 0)
    with suppress(SystemExit):
        app.main("language")
    assert seen == (["1"] if options else [])
    assert ("POLYVISION_SWEEP" in os.environ) == bool(options)


def test_an_error_of_another_rank_comes_after_its_traceback(capsys):
    say_error(PolyvisionError("one\ntwo"))
    assert capsys.readouterr().err == "error: one\nerror: two\n"
    say_error(RankError(3, "ValueError: no", details="Traceback ...\n"))
    assert capsys.readouterr().err == "Traceback ...\nerror: rank 3: ValueError: no\n"


def add_and_flush(writer):
    for _ in range(9):
        writer.add_event(Event(step=1))
        writer.flush()


def test_tensorboards_thread_says_nothing_of_a_full_disk(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(threading, "excepthook", said.append)
    quiet()
    quiet()
    writer = EventFileWriter(str(tmp_path))

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(RecordWriter, "write", full)
    with pytest.raises(OSError, match="No space"):  # here, in the main thread
        add_and_flush(writer)
    assert said == []
    other = threading.Thread(target=full)
    other.start()
    other.join()
    assert [failed.exc_type for failed in said] == [OSError]
