"""Analyses of small runs: in training, and afterwards by the command."""

import json

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from polyvision.cli import main
from polyvision.errors import PolyvisionError
from polyvision.training.config.compose import compose, config_from_plain
from polyvision.training.logging.analysis_callback import KINDS, probe, rank_history
from polyvision.training.restore import load_model

STEPS = ["trainer.max_steps=2", "trainer.histograms=false"]
ANALYSES = [*STEPS, "analysis.every_n_steps=2", "analysis.samples=4"]


def folder_of(tmp_path, name="seed0"):
    (found,) = tmp_path.glob(f"runs/*/*/*/*/{name}")
    return found


def rows_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("task", "kinds"), [("vision", ("rank", "health")), ("language", KINDS)])
def test_callback_writes_everything_and_changes_nothing(task, kinds, train, tmp_path):
    layers = ["model.layers=2"] if task == "language" else []
    train(task, *ANALYSES, *layers, f"analysis.kinds=[{','.join(kinds)}]", "recipe.accumulate=2")
    train(task, *STEPS, *layers, "recipe.accumulate=2")
    folder, plain = folder_of(tmp_path), folder_of(tmp_path, "seed0-2")
    names = {f"{kind}-step{s:06}.{e}" for kind in kinds for s in (0, 2) for e in ("json", "png")}
    assert {path.name for path in (folder / "analysis").iterdir()} == names
    assert not (plain / "analysis").exists()

    events = EventAccumulator(str(folder)).Reload()
    tags = [t for t in events.Tags()["scalars"] if t.startswith("x_analysis/")]
    assert {t.split("/")[1] for t in tags} == set(kinds)
    assert {f"x_analysis/{kind}" for kind in kinds} <= set(events.Tags()["images"])
    logged = {t for row in rows_of(folder) for t in row if t.startswith("analysis/")}
    assert {f"x_{t}" for t in logged} == set(tags)
    assert sorted(rank_history(folder / "metrics.jsonl")) == [0, 2]

    norms = [events.Scalars(t) for t in tags if t.endswith("/grad_norm")]
    assert {event.step for series in norms for event in series} == {2}
    whole = next(e.value for e in events.Scalars("x_optim/grad_norm") if e.step == 2)
    assert sum(series[0].value ** 2 for series in norms) ** 0.5 == pytest.approx(whole, rel=1e-4)

    weights = [
        torch.load(f / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
        for f in (folder, plain)
    ]
    assert all(torch.equal(value, weights[1][key]) for key, value in weights[0].items())


def test_callback_in_fp16(train, tmp_path):
    train("language", *ANALYSES, "precision=fp16", "analysis.kinds=[health]")
    health = json.loads((folder_of(tmp_path) / "analysis/health-step000002.json").read_text())
    assert health["sparsity"]["loss_dense"] == pytest.approx(5.5, abs=1)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, small_text):
    """A language run that ended after a few steps."""
    import importlib

    from polyvision.training.session import run_task

    root = tmp_path_factory.mktemp("finished")
    overrides = [
        *(f"run_root={root}", "trainer.accelerator=cpu", "data=text", f"data.path={small_text}"),
        *("data.tokenizer=bytes", "model.width=32", "model.layers=2", "model.heads=2"),
        *("model.ffn_hidden=96", "model.context=32", "recipe.batch_size=32"),
        *("trainer.max_steps=4", "analysis.every_n_steps=2", "analysis.kinds=[rank]"),
        *("act=polynorm", "act.order=2"),
    ]
    (config,) = compose("language", overrides)
    run_task(config, importlib.import_module("polyvision.training.tasks.language").build_task)
    (folder,) = root.glob("*/*/*/*/seed0")
    return folder


@pytest.mark.parametrize(
    ("kind", "place"), [*((kind, "") for kind in KINDS), ("rank", "checkpoints/best.ckpt")]
)
def test_command(kind, place, finished, tmp_path, capsys):
    output = tmp_path / "out"
    command = ["analyse", kind, str(finished / place), "--output", str(output), "--samples", "4"]
    assert main([*command, "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert str(output / f"{kind}.json") in text
    data = json.loads((output / f"{kind}.json").read_text())
    assert data["kind"] == kind
    assert (output / f"{kind}.png").stat().st_size > 1000
    events = EventAccumulator(str(output)).Reload()
    assert f"x_analysis/{kind}" in events.Tags()["images"]
    (step,) = {e.step for t in events.Tags()["scalars"] for e in events.Scalars(t)}
    assert step == 4
    if kind == "rank":
        assert list(data["history"]) == ["0", "2", "4"]
        for tag, value in data["history"]["4"].items():  # measured again from the checkpoint
            assert data["scalars"][tag] == pytest.approx(value, rel=1e-5)


def test_default_output_lies_in_the_run(finished, capsys):
    assert main(["analyse", "similarity", str(finished)]) == 0
    assert (finished / "analysis" / "similarity.png").exists()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["rnak"], "unknown analysis 'rnak'. Did you mean 'rank'?"),
        (["rank"], "needs a run folder or a checkpoint"),
        (["rank", "nowhere"], "nowhere is neither a checkpoint"),
        (["cost", "--samples", "0"], "--samples must be at least 1"),
    ],
)
def test_mistakes(arguments, text, capsys):
    assert main(["analyse", *arguments]) == 2
    assert text in capsys.readouterr().err


def test_loaded_model_is_the_trained_one(finished):
    restored = load_model(finished)
    state = torch.load(finished / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    assert restored.step == 4
    assert restored.config.act.options["order"] == 2
    assert not restored.module.training
    for key, value in restored.module.state_dict().items():
        assert torch.equal(value, state[key])


def test_a_checkpoint_that_does_not_fit_is_refused(finished, tmp_path):
    folder = tmp_path / "copy"
    (folder / "checkpoints").mkdir(parents=True)
    text = (finished / "config.yaml").read_text()
    (folder / "config.yaml").write_text(text.replace("layers: 2", "layers: 3"))
    with pytest.raises(PolyvisionError, match="no checkpoint yet"):
        load_model(folder)
    target = folder / "checkpoints" / "last.ckpt"
    target.write_bytes((finished / "checkpoints" / "last.ckpt").read_bytes())
    with pytest.raises(PolyvisionError, match=r"does not fit the model.*blocks\.2"):
        load_model(folder)
    (folder / "config.yaml").write_text(text.replace("width: 32", "width: many"))
    with pytest.raises(PolyvisionError, match=r"config\.yaml does not fit.*model\.width"):
        load_model(target)
    (folder / "config.yaml").write_text("[")
    with pytest.raises(PolyvisionError, match=r"config\.yaml is damaged"):
        load_model(target)
    (folder / "config.yaml").unlink()
    with pytest.raises(PolyvisionError, match="does not lie in the checkpoints/"):
        load_model(target)


def test_a_configuration_survives_its_file():
    (config,) = compose("vision", ["act=polycom", "act.rho=gelu"])
    assert config_from_plain(config.plain()) == config


def test_unknown_kinds_are_named():
    with pytest.raises(PolyvisionError, match=r"analysis\.kinds\[1\].*'helth'.*'health'"):
        compose("language", ["analysis.kinds=[rank,helth]"])


def test_rank_history_of_a_damaged_file(tmp_path):
    rows = [
        b'\xff{"step": 0, "analysis/rank/a/up": 1}',
        b'{"step": 2, "analysis/rank/a/up": 3}',
        b'{"step": 0, "analysis/rank/a/up": null}',
        b'{"step": 4, "analysis/rank/a/up": 5, "analysis/rank/mean/up": 6}',
        b'{"analysis/rank/a/up": 7}',
        b'{"st',
    ]
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(rows))
    assert rank_history(tmp_path / "metrics.jsonl") == {2: {"a/up": 3.0}, 4: {"a/up": 5.0}}
    assert rank_history(tmp_path / "none") == {}


def test_probe_is_spread_over_the_data():
    data = [(torch.tensor(float(i)), i) for i in range(100)]
    inputs, targets = probe(data, 4, None)
    assert targets.tolist() == [0, 25, 50, 75]
    assert inputs.tolist() == targets.tolist()
    assert len(probe(data[:3], 16, None)[1]) == 3
