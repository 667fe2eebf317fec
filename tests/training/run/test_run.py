"""Run folders: names, claims, and what counts as the same run."""

import dataclasses
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
import yaml

from polyvision.errors import PolyvisionError
from polyvision.training.config.compose import compose
from polyvision.training.logging.loggers import truncate_metrics
from polyvision.training.run.checkpoint import AtomicCheckpointIO
from polyvision.training.run.folder import Run, config_differences, hold_run, locate_run, open_run
from polyvision.training.run.resume import Place
from polyvision.training.session import _prepare_folder


@pytest.fixture
def config(tmp_path, monkeypatch):
    for name in ("POLYVISION_RUN_FOLDER", "POLYVISION_RUN_CHECKPOINT", "POLYVISION_SWEEP"):
        monkeypatch.delenv(name, raising=False)
    (made,) = compose("vision", [f"run_root={tmp_path}/runs", "act.order=4", "seed=3"])
    return made


def opened(config, **changes):
    config = dataclasses.replace(config, **changes)
    return open_run(config, locate_run(config))


def test_name_says_task_data_model_activation_and_seed(config, tmp_path):
    run = opened(config)
    assert run.folder == tmp_path / "runs/vision/digits/resnet50/polynorm-order4/seed3"
    assert yaml.safe_load((run.folder / "config.yaml").read_text()) == config.plain()
    assert json.loads((run.folder / "environment.json").read_text())["torch"] == torch.__version__


def test_reruns_count_up(config):
    assert [opened(config).folder.name for _ in range(3)] == ["seed3", "seed3-2", "seed3-3"]


def test_two_processes_never_share_a_folder(config):
    plans = [locate_run(config) for _ in range(2)]
    assert plans[0].folder == plans[1].folder
    assert [open_run(config, plan).folder.name for plan in plans] == ["seed3", "seed3-2"]


def test_auto_takes_the_latest_run_and_starts_one_if_there_is_none(config):
    assert opened(config, resume="auto").checkpoint is None
    opened(config)
    second = locate_run(dataclasses.replace(config, resume="auto"))
    assert second.folder.name == "seed3-2"
    second.last.touch()
    assert locate_run(dataclasses.replace(config, resume="auto")).checkpoint == second.last


def test_a_run_root_that_the_locale_cannot_read_is_refused(config):
    with pytest.raises(
        PolyvisionError, match=r"run_root='r\\udcc3\\udcbcns' is not .* PYTHONUTF8=1"
    ):
        locate_run(dataclasses.replace(config, run_root="r\udcc3\udcbcns"))


def changed(config, lr, **more):
    recipe = dataclasses.replace(config.recipe, lr=lr)
    return dataclasses.replace(config, recipe=recipe, **more)


def test_auto_takes_the_run_with_this_configuration(config, monkeypatch):
    """As after ``-m recipe.lr=1e-3,2e-3,3e-3`` was stopped in the second of three runs."""
    rates = (1e-3, 2e-3, 3e-3)
    for lr in rates[:2]:
        opened(changed(config, lr)).last.touch()
    monkeypatch.setenv("POLYVISION_SWEEP", "1")
    plans = [locate_run(changed(config, lr, resume="auto")) for lr in rates]
    assert [plan.folder.name for plan in plans] == ["seed3", "seed3-2", "seed3-3"]
    assert [plan.checkpoint == plan.last for plan in plans] == [True, True, False]
    assert [plan.new for plan in plans] == [False, False, True]
    monkeypatch.delenv("POLYVISION_SWEEP")
    assert locate_run(changed(config, rates[0], resume="auto")).folder.name == "seed3"
    with pytest.raises(PolyvisionError, match=r"recipe\.lr: 0\.002 then, 0\.003 now"):
        locate_run(changed(config, rates[2], resume="auto"))  # one command is about one run


def test_of_many_differences_the_first_are_shown(config):
    run = opened(config)
    run.last.touch()
    (other,) = compose("language", [f"run_root={config.run_root}", f"resume={run.folder}"])
    with pytest.raises(PolyvisionError, match=r"task: 'vision' then, 'language' now; .* more\)\."):
        locate_run(other)


def test_auto_finds_runs_after_one_that_was_deleted(config):
    for lr in (1e-3, 2e-3, 3e-3):
        opened(changed(config, lr)).last.touch()
    shutil.rmtree(locate_run(changed(config, 1e-3, resume="auto")).folder)
    assert locate_run(changed(config, 3e-3, resume="auto")).folder.name == "seed3-3"
    assert locate_run(config).folder.name == "seed3-4"  # the latest run has the last name


def test_a_run_that_has_nothing_to_go_on_from_hides_no_other(config):
    opened(changed(config, 1e-3)).last.touch()
    opened(changed(config, 2e-3))
    assert locate_run(changed(config, 1e-3, resume="auto")).folder.name == "seed3"
    shutil.rmtree(locate_run(changed(config, 1e-3, resume="auto")).folder)
    assert locate_run(changed(config, 3e-3, resume="auto")).new


def test_starts_at_once_with_auto_train_one_run(config):
    auto = dataclasses.replace(config, resume="auto")
    plans = [locate_run(auto) for _ in range(3)]
    assert all(plan.new for plan in plans)
    with hold_run(auto, plans[0]) as run:
        for plan in plans[1:]:
            with (
                pytest.raises(PolyvisionError, match="seed3: another process has just started"),
                hold_run(auto, plan),
            ):
                pass
    assert [each.name for each in run.folder.parent.iterdir()] == ["seed3"]
    with hold_run(config, plans[1]) as beside:  # without resume= it gives way
        assert beside.folder.name == "seed3-2"


@pytest.mark.parametrize("left", ["best", "metrics"])
def test_a_run_whose_checkpoints_are_gone_is_not_begun_anew(config, left):
    run = opened(config)
    if left == "best":
        run.best.touch()
    else:
        run.metrics.write_text('{"step": 1, "train/loss": 2}\n{"step": 5, "val/loss": 3}\n')
    before = sorted(run.folder.rglob("*"))
    for how in ("auto", str(run.folder)):
        with pytest.raises(PolyvisionError, match=r"last\.ckpt and previous\.ckpt are gone"):
            locate_run(dataclasses.replace(config, resume=how))
    assert sorted(run.folder.rglob("*")) == before


def test_a_run_killed_before_its_first_checkpoint_begins_anew_in_place(config):
    run = opened(config)
    run.metrics.write_text('{"step": 1, "train/loss": 2}\n')
    assert locate_run(dataclasses.replace(config, resume="auto")) == Run(run.folder)


@pytest.mark.parametrize("name", ["nothing.ckpt", "nowhere"])
def test_what_cannot_be_resumed_is_refused(config, name, tmp_path):
    with pytest.raises(ValueError, match="is neither a checkpoint"):
        locate_run(dataclasses.replace(config, resume=str(tmp_path / name)))


def test_a_checkpoint_outside_a_run_is_refused(config, tmp_path):
    (tmp_path / "some" / "where").mkdir(parents=True)
    path = tmp_path / "some" / "where" / "x.ckpt"
    path.touch()
    with pytest.raises(ValueError, match=r"has no config\.yaml"):
        locate_run(dataclasses.replace(config, resume=str(path)))


@pytest.mark.parametrize("text", ["a: [", "just text", ""])
def test_a_damaged_configuration_is_named(config, text):
    run = opened(config)
    run.last.touch()
    (run.folder / "config.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"config\.yaml is damaged"):
        locate_run(dataclasses.replace(config, resume="auto"))


def test_a_damaged_summary_is_named(config):
    run = opened(config)
    (run.folder / "summary.json").write_text("{")
    with pytest.raises(ValueError, match=r"summary\.json is damaged"):
        locate_run(dataclasses.replace(config, resume="auto"))


def test_a_checkpoint_is_found_from_its_own_folder(config, monkeypatch):
    run = opened(config)
    run.last.touch()
    monkeypatch.chdir(run.checkpoints)
    plan = locate_run(dataclasses.replace(config, resume="last.ckpt"))
    assert plan.folder == run.folder.absolute()


@pytest.mark.parametrize("kind", ["file", "dangling link", "too long", "null byte"])
def test_an_unusable_run_root_is_named(config, kind, tmp_path):
    root = tmp_path / ("x" * 300 if kind == "too long" else "root")
    if kind == "file":
        root.touch()
    elif kind == "dangling link":
        root.symlink_to(tmp_path / "a" / "b")
    name = f"{root}\0" if kind == "null byte" else str(root)
    with pytest.raises(PolyvisionError, match="cannot"):
        opened(config, run_root=name)


def test_differences_name_what_matters_only(config):
    old = config.plain()
    new = dataclasses.replace(
        config,
        seed=4,
        resume="auto",
        recipe=dataclasses.replace(config.recipe, lr=1.0),
        data=dataclasses.replace(config.data, workers=7),
    ).plain()
    assert config_differences(old, new) == [("recipe.lr", 0.005, 1.0), ("seed", 3, 4)]


def test_a_failed_save_keeps_the_previous_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "last.ckpt"
    files = AtomicCheckpointIO()
    files.save_checkpoint({"step": 1}, path)

    def full(checkpoint, file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space left"):
        files.save_checkpoint({"step": 2}, path)
    assert files.load_checkpoint(path) == {"step": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["last.ckpt"]


def test_a_damaged_checkpoint_is_named(tmp_path):
    path = tmp_path / "last.ckpt"
    path.write_bytes(b"not a checkpoint")
    with pytest.raises(ValueError, match=r"last\.ckpt cannot be read as a checkpoint"):
        AtomicCheckpointIO().load_checkpoint(path)


def test_a_further_rank_leaves_the_folder_alone(config, monkeypatch):
    run = opened(config)
    names = ["metrics.jsonl", "events.out.tfevents.1"]
    for name in names:
        (run.folder / name).write_text("of the first rank")
    task = SimpleNamespace(files={"classes.json": "[]"})
    with monkeypatch.context() as patch:
        patch.setenv("LOCAL_RANK", "1")
        assert locate_run(config) == run
        _prepare_folder(run, task, Place())
    assert [(run.folder / name).exists() for name in names] == [True, True]
    _prepare_folder(run, task, Place())
    assert [(run.folder / name).exists() for name in names] == [False, False]


@pytest.mark.parametrize("which", ["last", "previous", None])
def test_every_rank_goes_on_from_the_checkpoint_of_the_first(which, config, monkeypatch):
    run = opened(config)
    run.last.touch()
    run.previous.touch()
    chosen = getattr(run, which) if which else None
    open_run(config, dataclasses.replace(run, checkpoint=chosen))
    monkeypatch.setenv("LOCAL_RANK", "1")
    for resume in ("auto", str(run.folder), str(run.last)):
        assert locate_run(dataclasses.replace(config, resume=resume)).checkpoint == chosen


def test_another_launcher_is_refused(config, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(PolyvisionError, match="start the script without a launcher"):
        locate_run(config)


def test_metrics_after_the_checkpoint_and_torn_lines_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    truncate_metrics(path, 2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_validation_after_the_checkpoint_of_its_step_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    before = '{"step": 1}\n{"step": 2, "train/loss": 3}\n'
    path.write_text(before + '{"step": 2, "val/loss": 4}\n')
    truncate_metrics(path, 2, len(before))
    assert path.read_text() == before
