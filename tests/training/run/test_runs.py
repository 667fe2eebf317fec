"""Whole runs: the loss falls, a broken run goes on bitwise, guards stop what must not train."""

import dataclasses
import functools
import json
import math

import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from polyvision.models.language.shape import TransformerShape
from polyvision.models.trained.network import LanguageNetwork, network_to_plain
from polyvision.training.config.compose import compose
from polyvision.training.logging.console import Console
from polyvision.training.loop.module import TaskModule
from polyvision.training.loop.non_finite import NonFiniteError
from polyvision.training.loop.saving import Checkpoints
from polyvision.training.run.folder import Run
from polyvision.training.run.resume import check_files
from polyvision.training.session import run_task
from polyvision.training.tasks.vision import build_task

TASKS = ["vision", "language"]


def folder_of(tmp_path, name="seed0"):
    (found,) = tmp_path.glob(f"runs/*/*/*/*/{name}")
    return found


def rows_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def series(folder, tag):
    return [(row["step"], row[tag]) for row in rows_of(folder) if tag in row]


@pytest.mark.parametrize("task", TASKS)
def test_loss_falls_and_everything_is_written(task, train, tmp_path):
    summary = train(task, "trainer.max_epochs=3")
    folder = folder_of(tmp_path)
    losses = [value for _, value in series(folder, "train/loss")]
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])
    assert summary["steps"] == len(losses)
    assert summary["samples_per_s"] == pytest.approx(summary["speed"]["samples_per_s"], abs=0.01)
    assert 0 < summary["speed"]["data_wait"] < 1
    names = {p.name for p in folder.iterdir()}
    assert {"config.yaml", "environment.json", "summary.json", "checkpoints"} <= names
    assert not [p for p in folder.rglob("*") if "=" in p.name]
    for checkpoint in (folder / "checkpoints").iterdir():
        torch.load(checkpoint, weights_only=True)
    accumulator = EventAccumulator(str(folder)).Reload()
    tags = set(accumulator.Tags()["scalars"])
    shared = {"train/loss", "val/loss", "x_optim/lr", "x_optim/grad_norm", "x_perf/samples_per_s"}
    shared |= {"x_perf/data_wait", "x_perf/eta_s", "x_perf/peak_memory_gib"}
    own = {"vision": {"val/acc1", "val/acc5"}, "language": {"val/ppl", "val/bpb"}}
    assert shared | own[task] <= tags
    assert {t.rsplit("/", 1)[1] for t in tags if t.startswith("z_act/")} == {
        "weight_1",
        "weight_2",
        "weight_3",
        "bias",
    }
    assert "z_act/curves" in accumulator.Tags()["images"]
    assert accumulator.Tags()["histograms"]
    assert accumulator.PluginTagToContent("hparams")
    # The final metrics of the hparams tab must not draw a line back to the start of the charts.
    steps = [event.step for event in accumulator.Scalars("val/loss")]
    assert steps == sorted(steps)
    assert steps[0] > 0


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(
    "more",
    [
        ["trainer.checkpoint_every_n_steps=4"],  # in the middle of an epoch
        [],  # at its end
        ["trainer.checkpoint_every_n_steps=4", "recipe.accumulate=2"],
        ["trainer.val_every_n_steps=5"],
    ],
    ids=["mid-epoch", "epoch-end", "accumulate", "val-by-steps"],
)
def test_resume_is_bitwise(task, more, train, tmp_path, break_at, overrides):
    more = [*more, "trainer.max_epochs=3", "recipe.optimizer_options={}"]
    train(task, *more, f"run_root={tmp_path}/whole")
    restore = break_at(15)
    with pytest.raises(RuntimeError, match="killed"):
        train(task, *more)
    restore()
    train(task, *more, "resume=auto")
    (whole,) = tmp_path.glob("whole/*/*/*/*/seed0")
    broken = folder_of(tmp_path)
    for tag in ("train/loss", "val/loss", "optim/lr", "optim/grad_norm"):
        assert series(whole, tag) == series(broken, tag)
    a, b = (torch.load(f / "checkpoints" / "last.ckpt", weights_only=True) for f in (whole, broken))
    assert a["global_step"] == b["global_step"]
    for key, value in a["state_dict"].items():
        assert torch.equal(value, b["state_dict"][key]), key


EVERYTHING = [
    "recipe.mix.mixup=0.2",
    "recipe.mix.cutmix=1.0",
    "recipe.augment.auto_augment=rand-m6-mstd0.5-inc1",
    "recipe.augment.erase=0.3",
    "recipe.ema_decay=0.9",
    "recipe.ema_warmup=true",
    "recipe.repeats=3",
    "recipe.drop_path=0.2",
    "recipe.loss=bce",
    "recipe.accumulate=2",
    "trainer.checkpoint_every_n_steps=4",
    "trainer.max_epochs=3",
]


@pytest.mark.parametrize("workers", [0, 2])
def test_resume_is_bitwise_with_everything_random(workers, train, tmp_path, break_at):
    more = [*EVERYTHING, f"data.workers={workers}"]
    train("vision", *more, f"run_root={tmp_path}/whole")
    restore = break_at(15)
    with pytest.raises(RuntimeError, match="killed"):
        train("vision", *more)
    restore()
    train("vision", *more, "resume=auto")
    (whole,) = tmp_path.glob("whole/*/*/*/*/seed0")
    broken = folder_of(tmp_path)
    for tag in ("train/loss", "val/loss", "val_ema/loss", "optim/lr", "optim/grad_norm"):
        assert series(whole, tag)
        assert series(whole, tag) == series(broken, tag)
    a, b = (torch.load(f / "checkpoints" / "last.ckpt", weights_only=True) for f in (whole, broken))
    for part in ("state_dict", "ema"):
        for key, value in a[part].items():
            assert torch.equal(value, b[part][key]), key


def test_a_checkpoint_comes_after_the_metrics_of_its_step(train, tmp_path, monkeypatch):
    """A kill right after a checkpoint must lose no row: the run never computes that step again."""
    original = Checkpoints._save
    saved = []

    def checked(self, trainer):
        rows = rows_of(self.run.folder)
        saved.append((trainer.global_step, max(r["step"] for r in rows if "train/loss" in r)))
        original(self, trainer)

    monkeypatch.setattr(Checkpoints, "_save", checked)
    train("vision", "trainer.checkpoint_every_n_steps=3", "trainer.max_epochs=2")
    # Before and after a validation, and at every third step.
    assert [step for step, _ in saved] == [3, 6, 9, 9, 12, 15, 18, 18]
    assert all(step == written for step, written in saved)


@pytest.mark.parametrize("step", [6, 10])  # one of every three, and one after an epoch's last
def test_a_run_killed_right_after_a_checkpoint_goes_on(step, train, tmp_path, monkeypatch):
    more = ["trainer.checkpoint_every_n_steps=3", "trainer.val_every_n_steps=100"]
    more += ["trainer.max_epochs=2"]
    train("vision", *more, f"run_root={tmp_path}/whole")
    original = Checkpoints._save

    def killed(self, trainer):
        original(self, trainer)
        if trainer.global_step == step:
            raise RuntimeError("killed")

    monkeypatch.setattr(Checkpoints, "_save", killed)
    with pytest.raises(RuntimeError, match="killed"):
        train("vision", *more)
    monkeypatch.setattr(Checkpoints, "_save", original)
    train("vision", *more, "resume=auto")
    (whole,) = tmp_path.glob("whole/*/*/*/*/seed0")
    for tag in ("train/loss", "val/loss", "optim/grad_norm"):
        assert series(whole, tag) == series(folder_of(tmp_path), tag)


@pytest.mark.parametrize(
    ("owner", "name", "every"),
    [
        (TaskModule, "validation_step", None),  # as an image that cannot be read
        (Checkpoints, "on_validation_end", None),  # its metrics are written, and will be again
        pytest.param(TaskModule, "validation_step", 5, marks=pytest.mark.slow),
        pytest.param(Console, "on_validation_end", 5, marks=pytest.mark.slow),
    ],
)
def test_a_validation_that_fails_costs_no_step(owner, name, every, train, tmp_path, monkeypatch):
    more = ["trainer.max_epochs=2", "recipe.ema_decay=0.9", "trainer.histograms=false"]
    more += [f"trainer.val_every_n_steps={every}"] if every else []
    train("vision", *more, f"run_root={tmp_path}/whole")

    def fail(self, *arguments):
        raise RuntimeError("unreadable")

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        with pytest.raises(RuntimeError, match="unreadable"):
            train("vision", *more)
    checkpoint = folder_of(tmp_path) / "checkpoints/last.ckpt"
    assert torch.load(checkpoint, weights_only=True)["global_step"] == (every or 9)
    train("vision", *more, "resume=auto")
    (whole,) = tmp_path.glob("whole/*/*/*/*/seed0")
    rows = [[keyed(row) for row in rows_of(f)] for f in (whole, folder_of(tmp_path))]
    assert rows[0] == rows[1]
    a, b = (
        torch.load(f / "checkpoints/last.ckpt", weights_only=True)
        for f in (whole, folder_of(tmp_path))
    )
    assert a["callbacks"]["ActivationMonitor"] == b["callbacks"]["ActivationMonitor"]
    assert a["callbacks"]["Checkpoints"]["best"] == b["callbacks"]["Checkpoints"]["best"]
    for key, value in a["state_dict"].items():
        assert torch.equal(value, b["state_dict"][key]), key


def keyed(row):
    return {key: value for key, value in row.items() if not key.startswith("perf/")}


def test_resume_refuses_another_configuration(train, break_at):
    restore = break_at(15)
    with pytest.raises(RuntimeError, match="killed"):
        train("language", "trainer.checkpoint_every_n_steps=5")
    restore()
    with pytest.raises(ValueError, match=r"recipe\.lr: 0\.003 then, 0\.1 now"):
        train("language", "resume=auto", "recipe.lr=0.1")


def test_finished_run_is_not_repeated_by_auto(train, tmp_path, capsys):
    first = train("language", "trainer.max_steps=3")
    again = train("language", "trainer.max_steps=3", "resume=auto")
    assert again["last"] == first["last"]
    assert "has finished already" in capsys.readouterr().out
    train("language", "trainer.max_steps=3")
    assert folder_of(tmp_path, "seed0-2").is_dir()


def test_a_finished_run_is_not_taken_for_one_on_other_data(train, tmp_path, capsys):
    text = tmp_path / "corpus.txt"
    text.write_text("hello whale, hello ship.\n" * 400, encoding="utf-8")
    run = ["data=text", f"data.path={text}", "data.tokenizer=bytes", "trainer.max_steps=2"]
    first = train("language", *run)
    text.write_text(text.read_text(encoding="utf-8").replace("hello", "HELLO", 1), encoding="utf-8")
    with pytest.raises(ValueError, match="data changed"):
        train("language", *run, "resume=auto")
    text.unlink()  # results stay when the data is gone
    assert train("language", *run, "resume=auto")["last"] == first["last"]
    assert "was not compared" in capsys.readouterr().err


def test_non_finite_loss_stops_before_the_step(train, monkeypatch):
    seen = {}
    original = TaskModule.training_step

    def poisoned(self, batch, batch_idx):
        loss = original(self, batch, batch_idx)
        if self.global_step == 2:
            seen["module"] = self
            loss = loss * math.nan
            self._loss = loss.detach()
        return loss

    monkeypatch.setattr(TaskModule, "training_step", poisoned)
    with pytest.raises(NonFiniteError, match="step 2: a value is not finite"):
        train("vision")
    assert all(p.isfinite().all() for p in seen["module"].parameters())


def test_pixels_that_are_not_finite_are_named(train, tmp_path, monkeypatch):
    original = TaskModule.on_train_batch_start

    def spoil(self, batch, batch_idx):
        original(self, batch, batch_idx)
        if self.global_step == 5:
            batch[0][3, 0, 1, 1] = math.inf
            batch[0][12, 2] = math.nan

    more = ["trainer.checkpoint_every_n_steps=4", "trainer.max_epochs=2"]
    with monkeypatch.context() as patch:
        patch.setattr(TaskModule, "on_train_batch_start", spoil)
        with pytest.raises(NonFiniteError, match="step 5: the data is not finite: samples 12, 3"):
            train("vision", *more)
    folder = folder_of(tmp_path)
    assert torch.load(folder / "checkpoints/last.ckpt", weights_only=True)["global_step"] == 4
    assert json.loads((folder / "state.json").read_text())["error"].startswith("NonFiniteError")
    assert train("vision", *more, "resume=auto")["steps"] == 18


def test_first_bad_module_is_named(train, monkeypatch):
    original = TaskModule.on_train_batch_start

    def break_weights(self, batch, batch_idx):
        original(self, batch, batch_idx)
        with torch.no_grad():
            self.model.blocks[0].ffn.up.weight[0, 0] = math.inf

    monkeypatch.setattr(TaskModule, "on_train_batch_start", break_weights)
    with pytest.raises(NonFiniteError, match=r"first non-finite output: blocks\.0\.ffn\.up"):
        train("language")


def test_fp16_on_a_cpu_is_real_fp16(train, tmp_path, monkeypatch):
    dtypes = set()
    original = TaskModule.training_step

    def spy(self, batch, batch_idx):
        for module in self.model.modules():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_hook(
                    lambda _, __, out: dtypes.add(out.dtype) if out.requires_grad else None
                )
        return original(self, batch, batch_idx)

    monkeypatch.setattr(TaskModule, "training_step", spy)
    train("language", "precision=fp16", "trainer.max_steps=3")
    assert dtypes == {torch.float16}
    assert [v for _, v in series(folder_of(tmp_path), "optim/loss_scale")] == [65536.0] * 3


def test_a_step_that_the_scaler_skips_has_no_gradient_norm(train, tmp_path, monkeypatch):
    scaler = functools.partial(torch.amp.GradScaler, init_scale=2.0**24, backoff_factor=2.0**-12)
    monkeypatch.setattr(torch.amp, "GradScaler", scaler)
    train("language", "precision=fp16", "trainer.max_steps=3")
    folder = folder_of(tmp_path)
    assert series(folder, "optim/loss_scale") == [(1, 2.0**24), (2, 2.0**12), (3, 2.0**12)]
    norms = series(folder, "optim/grad_norm")
    assert [step for step, _ in norms] == [2, 3]
    assert all(math.isfinite(value) for _, value in norms)


def test_accumulation_changes_nothing_but_rounding(train, tmp_path):
    steps = ["trainer.max_steps=4", "recipe.optimizer=sgd", "recipe.optimizer_options={}"]
    train("language", *steps)
    train("language", *steps, "recipe.accumulate=4")
    one, four = folder_of(tmp_path), folder_of(tmp_path, "seed0-2")
    a, b = (series(f, "val/loss")[-1] for f in (one, four))
    assert a[0] == b[0]
    assert a[1] == pytest.approx(b[1], rel=1e-5)


def test_dry_run_writes_nothing(train, tmp_path, capsys):
    assert train("vision", "dry_run=true") is None
    assert not (tmp_path / "runs").exists()
    shown = capsys.readouterr().out
    for label in ("model", "activation", "parameters", "data", "steps", "device", "precision"):
        assert f"\n  {label} " in shown


def test_unreadable_training_images_are_named_in_the_summary(train, tmp_path, capsys):
    for part, count in (("train", 16), ("val", 4)):
        for label in ("a", "b"):
            folder = tmp_path / "images" / part / label
            folder.mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", (8, 8), (i, 0, 0)).save(folder / f"{i}.png")
    broken = tmp_path / "images" / "train" / "b" / "broken.png"
    broken.write_bytes(b"no image")
    data = ["data=folder", f"data.root={tmp_path}/images", "data.image_size=32"]
    model = ["model=timm", "model.name=test_resnet", "recipe.batch_size=11"]
    (config,) = compose("vision", [*data, *model, f"run_root={tmp_path}/runs", "recipe.epochs=1"])
    summary = run_task(config, build_task)
    assert summary["unreadable"] == [str(broken)]
    assert f"NOT read       1 training file: {broken}" in capsys.readouterr().out


def test_other_classes_are_not_resumed(tmp_path):
    (tmp_path / "classes.json").write_text('["ant", "bee"]')
    run = Run(tmp_path, checkpoint=tmp_path / "last.ckpt")
    same, other = ({"classes.json": text} for text in ('["ant", "bee"]', "[]"))
    check_files(run, same)
    check_files(Run(tmp_path), other)  # a new run writes its own
    with pytest.raises(ValueError, match=r"its classes\.json is not what the data gives now"):
        check_files(run, other)


def test_a_run_from_before_an_option_was_added_is_resumed(tmp_path):
    shape = TransformerShape(vocab_size=16, context=8, width=8, layers=1, heads=1, ffn_hidden=8)

    def text(**options):
        network = LanguageNetwork(
            dataclasses.replace(shape, activation="polyrelu", activation_options=options)
        )
        return json.dumps(network_to_plain(network))

    (tmp_path / "network.json").write_text(text(order=3, bias=True), encoding="utf-8")
    run = Run(tmp_path, checkpoint=tmp_path / "last.ckpt")
    now = text(order=3, bias=True, init="equal")
    check_files(run, {"network.json": now})
    with pytest.raises(ValueError, match=r"its network\.json is not"):
        check_files(run, {"network.json": now.replace('"equal"', '"base"')})
