"""Ablations: which runs a study makes, what it keeps, what its report says. Nothing is trained."""

import json
import os
import socket
from pathlib import Path

import pytest
import yaml

from polyvision import cli
from polyvision.errors import PolyvisionError
from polyvision.models.language.ffn import gated_hidden
from polyvision.training.ablate import command as ablate
from polyvision.training.ablate.plan import plan_study, sized
from polyvision.training.ablate.studies import STUDIES, Size
from polyvision.training.config.compose import compose

ACTS = {
    "activations": ["swiglu", "polynorm", "polyrelu", "gelu", "relu", "relu2"],
    "order": ["polyrelu", "polyrelu-order2", "polyrelu-order4"],
    "composition": ["polynorm", "polyrelu", "polyprelu", "polyrelunorm"],
    "relu-variants": ["polyrelu", "relu", "relu2"],
    "scaling": ["swiglu", "polyrelu", "polynorm"],
    "coefficients": ["polynorm", "polynorm-biasFalse", "polyrelu", "polyrelu-biasFalse"],
}


def language_model(**changes):
    (config,) = compose("language", [f"model.{key}={value}" for key, value in changes.items()])
    return config.model


def test_the_documentation_lists_the_studies_in_order():
    lines = (Path(__file__).parents[3] / "docs/ablate.md").read_text(encoding="utf-8").splitlines()
    assert [line.split("`")[1] for line in lines if line.startswith("| `")] == list(STUDIES)


@pytest.mark.parametrize("name", ACTS)
def test_a_study_has_these_activations_first_the_baseline(name, tmp_path):
    planned = plan_study(STUDIES[name], "language", [], seeds=1, output=tmp_path)
    per_model = len(planned) // max(1, len(STUDIES[name].sizes))
    assert [each.config.act.label for each in planned[:per_model]] == ACTS[name]
    assert len({each.run.folder for each in planned}) == len(planned)


@pytest.mark.parametrize(
    ("name", "folder"),
    [("order", "runs"), ("scaling", "runs"), ("order", "a b,c='d'=\u00fc"), ("order", "[x]\\")],
)
def test_the_overrides_of_a_run_make_its_configuration(name, folder, tmp_path):
    output = tmp_path / folder
    each = plan_study(STUDIES[name], "language", [], seeds=1, output=output)[-1]
    assert compose("language", each.overrides) == [each.config]
    assert output in each.run.folder.parents


def test_seeds_come_one_after_the_other_so_that_early_runs_pair(tmp_path):
    planned = plan_study(STUDIES["order"], "vision", ["recipe.lr=0.02"], seeds=2, output=tmp_path)
    assert [each.config.seed for each in planned] == [0, 0, 0, 1, 1, 1]
    assert {each.config.recipe.lr for each in planned} == {0.02}
    assert {each.config.resume for each in planned} == {"auto"}


def test_the_sizes_are_those_of_table_10():
    largest = language_model(width=2048, layers=24, heads=16, ffn_hidden=8256)
    widths, layers, hidden = [], [], []
    for overrides in sized(STUDIES["scaling"], largest):
        (config,) = compose("language", ["model.width=2048", "model.layers=24", *overrides])
        widths.append(config.model.width)
        layers.append(config.model.layers)
        hidden.append(config.model.ffn_hidden)
    assert widths == [768, 1024, 1536, 2048]
    assert layers == [12, 16, 16, 24]
    assert all(3 * gated_hidden(h) == 2 * h for h in hidden[:3])


def test_a_model_too_small_to_scale_is_refused():
    with pytest.raises(PolyvisionError, match="is too small for 4 sizes"):
        sized(STUDIES["scaling"], language_model(width=8, heads=4, layers=1))


def test_the_largest_size_is_the_model_itself():
    assert STUDIES["scaling"].sizes[-1] == Size(1, 1)
    assert sized(STUDIES["scaling"], language_model())[-1] == []


def test_parallel_runs_share_threads_and_gpus():
    assert ablate.job_slots(1, 8, ["0", "1"]) == [{}]
    assert ablate.job_slots(3, 8, []) == [{"OMP_NUM_THREADS": "2"}] * 3
    assert ablate.job_slots(2, 1, []) == [{"OMP_NUM_THREADS": "1"}] * 2
    gpus = [slot["CUDA_VISIBLE_DEVICES"] for slot in ablate.job_slots(3, 8, ["2", "5"])]
    assert gpus == ["2", "5", "2"]


@pytest.fixture
def children(monkeypatch):
    """Stand in for the processes: write what a run would; ``fail`` names runs that fail."""
    made = []
    configs = {}

    def plan(*arguments, **keywords):
        planned = plan_study(*arguments, **keywords)
        configs.update({tuple(each.overrides): each.config for each in planned})
        return planned

    def install(*fail, stop=None):
        def run_children(children, slots, started, ended):
            codes = []
            for number, child in enumerate(children):
                started(number)
                config = configs[tuple(child.command[3:])]
                made.append(config)
                name = f"{config.act.label}/seed{config.seed}"
                broken = name in fail
                write_run(config, broken)
                child.log.write_text("Plan\nerror: the loss is nan\n" if broken else "Plan\n")
                codes.append(2 if broken else 0)
                ended(number, codes[-1])
            return codes, stop

        monkeypatch.setattr(ablate, "plan_study", plan)
        monkeypatch.setattr(ablate, "run_children", run_children)
        return made

    return install


def write_run(config, broken):
    parts = (config.task, config.data.name, config.model.name, config.act.label)
    folder = os.path.join(config.run_root, *parts, f"seed{config.seed}")
    os.makedirs(os.path.join(folder, "checkpoints"))
    order = config.act.options.get("order", 3)
    value = 3.0 - 0.1 * order - 0.001 * config.model.width * (1 + config.seed) - 0.01 * config.seed
    rows = [{"step": 0, "act/blocks.0.ffn/weight_1": 0.5, "act/blocks.0.ffn/bias": 0.0}]
    rows += [{"step": 1, "train/loss": 4.0}, {"step": 2, "train/loss": value}]
    rows += [{"step": 2, "val/loss": value, "act/blocks.0.ffn/weight_1": 0.25 + config.seed}]
    state = {
        "state": "failed" if broken else "finished",
        "error": "ValueError: the loss is nan" if broken else None,
        "step": 2,
        "resumed_at": [],
        "process": os.getpid(),
        "host": socket.gethostname(),
        "settings": {
            "act": config.act.label,
            "seed": config.seed,
            "parameters": 100 * config.model.width,
        },
        "monitor": "val/loss",
        "total_steps": 2,
        "activation_bytes": 2**20,
    }
    summary = {"settings": {}, "monitor": "val/loss", "last": {"val/loss": value}, "seconds": 1.5}
    files = {
        "config.yaml": yaml.safe_dump(config.plain()),
        "state.json": json.dumps(state),
        "metrics.jsonl": "".join(f"{json.dumps(row)}\n" for row in rows),
    }
    if not broken:
        files["summary.json"] = json.dumps(summary)
    for name, text in files.items():
        with open(os.path.join(folder, name), "w") as file:
            file.write(text)


def ablate_order(tmp_path, *more, study="order"):
    return cli.main(["ablate", study, "--seeds", "2", "--output", str(tmp_path), "--steps", *more])


def test_a_study_ends_in_a_report_and_is_not_trained_twice(children, tmp_path, capsys):
    made = children()
    assert ablate_order(tmp_path, "2") == 0
    assert len(made) == 6
    assert {config.trainer.max_steps for config in made} == {2}
    shown = capsys.readouterr().out
    assert "[6/6] lm_tiny polyrelu-order4 seed 1: val/loss" in shown
    text = (tmp_path / "order" / "report.md").read_text()
    assert text.startswith("# Order of PolyReLU (Figure 5a): polyrelu, polyrelu-order2,")
    assert "orders 3 and 4 do not differ" in text
    assert "- polyrelu-order2 against polyrelu, val/loss (last): +0.1000 (" in text
    assert (tmp_path / "order" / "report.html").exists()
    assert ablate_order(tmp_path, "2") == 0
    assert len(made) == 6
    assert "finished, kept" in capsys.readouterr().out


def test_studies_share_their_runs(children, tmp_path):
    made = children()
    ablate_order(tmp_path, "2")
    ablate_order(tmp_path, "2", study="relu-variants")
    assert [config.act.label for config in made[6:]] == ["relu", "relu2", "relu", "relu2"]


def test_a_failed_run_is_named_and_the_rest_is_compared(children, tmp_path, capsys):
    children("polyrelu-order2/seed1")
    with pytest.raises(SystemExit) as stop:
        ablate_order(tmp_path, "2")
    assert stop.value.code == 1
    errors = capsys.readouterr().err
    assert "lm_tiny polyrelu-order2 seed 1: failed with exit code 2: the loss is nan (" in errors
    text = (tmp_path / "order" / "report.md").read_text()
    assert "- Failed: lm_tiny polyrelu-order2 seed 1" in text
    assert "No finished run of polyrelu-order2 with seed 1: no pair there." in text
    assert "polyrelu-order4 against polyrelu, val/loss (last): -0.1000 (" in text


def test_a_signal_ends_the_study_and_says_how_to_go_on(children, tmp_path, capsys):
    children(stop=15)
    with pytest.raises(SystemExit) as stop:
        ablate_order(tmp_path, "2")
    assert stop.value.code == 143
    assert "the same command goes on" in capsys.readouterr().err


def test_scaling_compares_at_each_size_and_draws_the_curve(children, tmp_path):
    made = children()
    assert ablate_order(tmp_path, "2", study="scaling") == 0
    assert len({config.model.name for config in made}) == 4
    text = (tmp_path / "scaling" / "report.md").read_text()
    assert "- lm_tiny-w48l2, polyrelu against swiglu, val/loss (last):" in text
    assert "## lm_tiny: Differences to swiglu" in text
    assert "| lm_tiny-w96l3 | polynorm   | 9,600" in text
    names = {path.name for path in (tmp_path / "scaling").iterdir()}
    assert {"scaling.png", "lm_tiny-w48l2-curves.png", "lm_tiny-runs.csv"} <= names


def test_coefficients_are_tabled_by_site_over_the_seeds(children, tmp_path):
    children()
    assert ablate_order(tmp_path, "2", study="coefficients") == 0
    text = (tmp_path / "coefficients" / "report.md").read_text()
    assert "| polynorm           | blocks.0.ffn | 0.7500 ± 0.7071 (2 runs) |" in text
    assert "| polynorm           | start        | 0.5000" in text


def test_a_dry_run_lists_and_writes_nothing(children, tmp_path, capsys):
    made = children()
    assert ablate_order(tmp_path / "none", "2", "--dry-run") == 0
    assert not made
    assert not (tmp_path / "none").exists()
    assert capsys.readouterr().out.count("to be trained") == 6


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["order", "act=relu"], "act=relu: leave it out, the study chooses the activations"),
        (["order", "seed=1,2"], "use --seeds"),
        (["order", "run_root=x"], "use --output"),
        (["order", "--seeds", "0"], "--seeds must be at least 1, got 0"),
        (["order", "--jobs", "-1"], "--jobs must be at least 1, got -1"),
        (["order", "--model", "lm_tinny"], "Did you mean 'lm_tiny'"),
        (["order", "recipe.lr=1,2"], "has one value, not several"),
        (["scaling", "--task", "vision"], "scales language models only"),
        (["order", "--data", "text", "data.path=none.txt"], "data.path='none.txt' does not exist"),
        (["oder"], "unknown study 'oder'. Did you mean 'order'?"),
        (["order", "recipe.lr=1e-3", "--sedes", "2"], "'--sedes'. Did you mean '--seeds'?"),
    ],
)
def test_mistakes_are_named_before_anything_starts(children, tmp_path, capsys, arguments, text):
    made = children()
    assert cli.main(["ablate", *arguments, f"--output={tmp_path}/none"]) == 2
    assert text in capsys.readouterr().err
    assert not made
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["recipe.lr=1e-3", "--seeds", "1", "recipe.total_tokens=640"],
        ["--seeds", "1", "recipe.lr=1e-3", "recipe.total_tokens=640"],
        ["recipe.lr=1e-3", "recipe.total_tokens=640", "--seeds=1"],
        ["recipe.lr=1", "--seeds", "1", "recipe.total_tokens=640", "--jobs", "1", "recipe.lr=1e-3"],
        ["--seeds", "1", "--", "recipe.lr=1e-3", "recipe.total_tokens=640"],
    ],
)
def test_options_and_overrides_mix_in_any_order(children, tmp_path, arguments):
    made = children()
    assert cli.main(["ablate", "--output", str(tmp_path), "order", *arguments]) == 0
    assert [config.recipe.lr for config in made] == [1e-3] * 3
    assert {config.recipe.total_tokens for config in made} == {640}


def test_runs_of_other_settings_are_not_taken(children, tmp_path, capsys):
    made = children()
    ablate_order(tmp_path, "2")
    assert ablate_order(tmp_path, "3") == 2
    errors = capsys.readouterr().err
    assert errors.count("trainer.max_steps: 2 then, 3 now") == 6
    assert "or another --output" in errors
    assert len(made) == 6
