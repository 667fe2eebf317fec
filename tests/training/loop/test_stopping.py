"""A run that a signal stops, at any place, ends like one that nothing stopped, to the bit."""

import itertools
import json
import os
import signal

import pytest
import torch

from polyvision.training.loop.module import TaskModule
from polyvision.training.loop.stopping import Stopping

SHORT = ["recipe.batch_size=128", "trainer.max_epochs=2", "trainer.histograms=false"]
SHORT += ["recipe.optimizer_options={}"]


@pytest.fixture(scope="module")
def wholes():
    """Folders of unbroken runs, by their settings."""
    return {}


@pytest.fixture
def stopped(train, tmp_path, tmp_path_factory, monkeypatch, wholes):
    """Run until signals come at a place; resume; compare with an unbroken run."""

    def run(name, when, numbers, *more, resume=(), code=None):
        key = tuple(more)
        if key not in wholes:
            root = tmp_path_factory.mktemp("whole")
            train("language", *SHORT, *more, f"run_root={root}")
            wholes[key] = folder_of(root)
        owner = torch if name == "save" else TaskModule
        original, fired = getattr(owner, name), []

        def poked(self, *arguments):
            if not fired and when(self, *arguments):
                fired.append(True)
                for number in numbers:
                    os.kill(os.getpid(), number)
            return original(self, *arguments)

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, poked)
            with pytest.raises(SystemExit) as ended:
                train("language", *SHORT, *more)
        assert fired
        assert ended.value.code == (code or 128 + numbers[0])
        folder = folder_of(tmp_path / "runs")
        assert json.loads((folder / "state.json").read_text())["state"] == "interrupted"
        train("language", *SHORT, *more, "resume=auto", *resume)
        return folder, wholes[key]

    return run


def folder_of(root):
    (folder,) = root.glob("*/*/*/*/seed0")
    return folder


def series(folder, tag):
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(row["step"], row[tag]) for row in rows if tag in row]


def check_equal(folder, whole):
    for tag in ("train/loss", "val/loss", "optim/grad_norm"):
        assert series(folder, tag) == series(whole, tag), tag
    a, b = (torch.load(f / "checkpoints/last.ckpt", weights_only=True) for f in (folder, whole))
    assert a["global_step"] == b["global_step"]
    for key, value in a["state_dict"].items():
        assert torch.equal(value, b["state_dict"][key]), key
    best = [json.loads((f / "summary.json").read_text())["best"] for f in (folder, whole)]
    assert best[0] == best[1]


TERM, INT, USR1 = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1


def first_of_two(self, batch, index):
    return self.global_step == 2 and index % 2 == 0


def last_of_an_epoch(self, batch, index):
    return self.global_step == self.epoch_steps - 1


def in_validation(step):
    return lambda self, batch, index, *_: self.global_step == step and index == 0


SPLIT = ["recipe.accumulate=2"]
EVERY = ["trainer.checkpoint_every_n_steps=2"]


@pytest.mark.parametrize(
    ("name", "when", "numbers", "more"),
    [
        pytest.param("training_step", first_of_two, [TERM], SPLIT, id="in-a-step"),
        pytest.param("validation_step", in_validation(5), [INT, TERM], SPLIT, id="validation"),
        *(
            pytest.param(*place, marks=pytest.mark.slow)
            for place in (
                ("training_step", last_of_an_epoch, [USR1], []),
                ("validation_step", in_validation(3), [INT], ["trainer.val_every_n_steps=3"]),
                ("validation_step", in_validation(10), [TERM], []),
                ("validation_step", in_validation(10), [TERM], ["trainer.val_every_n_steps=99"]),
            )
        ),
    ],
)
def test_a_stop_anywhere_changes_nothing(name, when, numbers, more, stopped, capfd):
    check_equal(*stopped(name, when, numbers, *more))
    errors = capfd.readouterr().err
    assert errors.count("stopping after this step") == 1
    assert "interrupted at step" in errors


@pytest.mark.slow
def test_a_second_ctrl_c_stops_at_once(stopped, capsys):
    check_equal(
        *stopped("training_step", lambda self, *_: self.global_step == 3, [INT, INT], *EVERY)
    )
    assert "interrupted at step 3" in (errors := capsys.readouterr().err)
    assert "which goes on from step 2" in errors


@pytest.mark.slow
def test_ctrl_c_after_another_signal_saves_too(stopped, capsys):
    check_equal(*stopped("training_step", lambda self, *_: self.global_step == 3, [TERM, INT]))
    assert "interrupted at step 4: go on with" in capsys.readouterr().err


@pytest.mark.slow
def test_signals_during_a_save_wait_for_it(stopped, capsys):
    saves = itertools.count()
    when = lambda *_: next(saves) == 1  # noqa: E731 - of step 4
    check_equal(*stopped("save", when, [INT, INT, TERM], *EVERY))
    assert "interrupted at step 4: go on with" in capsys.readouterr().err


def test_a_step_may_be_split_anew(stopped, capsys):
    folder, whole = stopped(
        "training_step",
        first_of_two,
        [TERM],
        "recipe.accumulate=2",
        resume=["recipe.accumulate=4"],
    )
    assert (
        "recipe.accumulate was 2 and is 4. A step has the same samples" in capsys.readouterr().err
    )
    # The loss that is logged is that of a step's last pass.
    for tag in ("val/loss", "optim/grad_norm", "optim/lr", "train/tokens"):
        (steps, values), (_, expected) = (
            zip(*series(f, tag), strict=True) for f in (folder, whole)
        )
        assert steps == tuple(step for step, _ in series(whole, tag))
        assert values == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("numbers", "ends", "code"),
    [
        ([TERM], False, TERM),
        ([TERM, INT], False, TERM),
        ([TERM, TERM, INT, USR1], False, TERM),
        ([INT, TERM], False, INT),
        ([INT, INT], True, INT),
        ([TERM, INT, INT], True, TERM),
    ],
)
def test_only_a_second_ctrl_c_ends_a_run_without_a_save(numbers, ends, code, capfd):
    stopping = Stopping()
    for number in numbers[:-1]:
        stopping._receive(number, None)
    if ends:
        with pytest.raises(KeyboardInterrupt):
            stopping._receive(numbers[-1], None)
    else:
        stopping._receive(numbers[-1], None)
    assert stopping.number == code
    hints = capfd.readouterr().err.count("Ctrl-C again stops at once")
    assert hints == (INT in numbers)


def test_what_is_ignored_stays_ignored(monkeypatch):
    class Quiet:
        class _signal_connector:
            pass

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Stopping().listening(Quiet):
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)
