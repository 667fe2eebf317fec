"""What a run folder says of a run that ended, broke, or was stopped."""

import json

import pytest

from polyvision.training.run.state import track


def state(folder):
    return json.loads((folder / "state.json").read_text())


def test_a_run_is_running_and_then_finished(tmp_path):
    with track(tmp_path, {"total_steps": 9}, 0, lambda: 9):
        assert state(tmp_path)["state"] == "running"
        assert state(tmp_path)["total_steps"] == 9
    assert (state(tmp_path)["state"], state(tmp_path)["step"]) == ("finished", 9)


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (ValueError("two\n  lines"), "failed", "ValueError: two lines"),
        (KeyboardInterrupt(), "interrupted", None),
        (SystemExit(143), "interrupted", None),
    ],
)
def test_how_a_run_ended_is_kept(tmp_path, error, status, text):
    with pytest.raises(type(error)), track(tmp_path, {}, 0, lambda: 5):
        raise error
    found = state(tmp_path)
    assert (found["state"], found["step"], found["error"]) == (status, 5, text)


def test_every_resume_is_kept(tmp_path):
    for first_step in (0, 4, 7):
        with track(tmp_path, {}, first_step, lambda: 9):
            pass
    assert state(tmp_path)["resumed_at"] == [4, 7]
    (tmp_path / "state.json").write_text("{")
    with track(tmp_path, {}, 8, lambda: 9):
        pass
    assert state(tmp_path)["resumed_at"] == [8]


def test_a_trained_run_leaves_its_facts(train, tmp_path):
    train("language", "trainer.max_steps=2")
    (folder,) = tmp_path.glob("runs/*/*/*/*/seed0")
    found = state(folder)
    assert (found["state"], found["step"], found["total_steps"]) == ("finished", 2, 2)
    assert found["settings"]["act"] == "polynorm"
    assert found["activation_bytes"] > 0
