"""The group ``experiment``: whole recipes by name, for both tasks."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from polyvision import configs
from polyvision.activations import activation_names
from polyvision.errors import PolyvisionError
from polyvision.training.config.compose import compose, config_from_plain
from polyvision.training.config.schema import TargetConfig
from polyvision.training.plan import target_text
from polyvision.training.run.folder import config_differences

FOLDER = Path(configs.__file__).parent / "experiment"
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))


DATA = {"vision": ["data.root=images"], "language": []}


def content(name):
    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text())


def task_of(name):
    return content(name)["experiment"]["task"]


@pytest.mark.parametrize("name", NAMES)
def test_each_composes_for_its_task_and_states_what_to_expect(name):
    (config,) = compose(task_of(name), [f"experiment={name}", *DATA[task_of(name)]])
    assert config.experiment.name == name
    target = config.experiment.target
    if target is not None:
        assert target.source
        assert set(target.value) <= set(activation_names())


@pytest.mark.parametrize("name", NAMES)
def test_each_chooses_model_data_and_recipe_and_leaves_the_rest_free(name):
    chosen = content(name)
    groups = [next(iter(entry)) for entry in chosen["defaults"]]
    assert groups == ["override /model", "override /data", "override /recipe"]
    assert not {"act", "seed", "run_root", "resume"} & set(chosen)


@pytest.mark.parametrize("name", NAMES)
def test_act_switches_the_activation_and_nothing_else(name):
    one, other = (
        compose(task_of(name), [f"experiment={name}", f"act={act}", *DATA[task_of(name)]])[
            0
        ].plain()
        for act in ("relu", "polynorm")
    )
    changed = {key for key, _, _ in config_differences(one, other)}
    assert changed
    assert {key.split(".")[0] for key in changed} == {"act"}


def test_the_command_line_wins():
    more = ["recipe.lr=0.2", "model=timm", "model.name=resnet18", "seed=5"]
    (config,) = compose("vision", ["experiment=digits_rn50", *more])
    assert (config.recipe.lr, config.model.name, config.seed) == (0.2, "resnet18", 5)
    assert config.experiment.name == "digits_rn50"


def test_a_sweep_over_experiments():
    made = compose("vision", ["experiment=digits_rn50,fake_rn50", "act=relu,polynorm"])
    assert [(c.experiment.name, c.act.name) for c in made] == [
        (e, a) for e in ("digits_rn50", "fake_rn50") for a in ("relu", "polynorm")
    ]


@pytest.mark.parametrize(
    ("task", "override", "expected"),
    [
        ("vision", "experiment=book_tiny", "run `python train_lm.py experiment=book_tiny`"),
        ("language", "experiment=digits_rn50", "run `python train_vision.py experiment=digits_rn"),
        ("vision", "experiment=digit_rn50", "unknown experiment 'digit_rn50'. Did you mean 'digit"),
        ("vision", "experiment.target=null", "experiment.target: experiment is None here"),
        ("vision", "experiment=null", "unknown experiment 'None'"),
    ],
)
def test_each_mistake_has_one_line(task, override, expected):
    with pytest.raises(PolyvisionError) as caught:
        compose(task, [override])
    (line,) = str(caught.value).splitlines()
    assert expected in line


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "experiment.target.value=x",
            "experiment.target.value must be a number or a mapping, got 'x'",
        ),
        ("experiment.targt.value=1", "Did you mean 'experiment.target'?"),
        ("~experiment.target.source", "experiment.target.source is missing"),
        ("recipe.augmnt.hflip=1", "Did you mean 'recipe.augment'?"),
    ],
)
def test_a_key_of_an_experiment_is_checked(override, expected):
    with pytest.raises(PolyvisionError) as caught:
        compose("vision", ["experiment=cifar_rn18", "data.root=images", override])
    assert expected in str(caught.value)


def test_plan_and_summary_show_the_target(train, tmp_path, capsys):
    more = ["experiment=fake_rn50", "trainer.max_steps=1"]
    target = ["experiment.target={metric: val/acc1, value: 0.5, source: a paper}"]
    summary = train("vision", *more, *target)
    shown = capsys.readouterr().out
    assert "\n  experiment  fake_rn50\n  target      val/acc1 0.5000 (a paper)\n" in shown
    assert shown.count("val/acc1 0.5000 (a paper)") == 2
    assert summary["target"] == "val/acc1 0.5000 (a paper)"
    assert summary["settings"]["experiment"] == "fake_rn50"
    assert re.search(r"compare +python train_vision\.py .*experiment=fake_rn50 .*act=", shown)
    (folder,) = tmp_path.glob("runs/*/*/*/*/*")
    assert folder.parent.parent.name == "test_resnet-fake_rn50"


@pytest.mark.parametrize(
    ("act", "expected"),
    [
        ("relu", "val/acc1 0.7491 (a paper)"),
        ("polynorm", "val/acc1 0.7512 (a paper)"),
        ("gelu", "none published for gelu; val/acc1: relu 0.7491, polynorm 0.7512 (a paper)"),
        ("polynorm-order4", "none published for polynorm-order4; val/acc1: relu 0.7491, polynorm"),
    ],
)
def test_a_target_is_that_of_the_activation(act, expected):
    target = TargetConfig("val/acc1", {"relu": 0.7491, "polynorm": 0.7512}, "a paper")
    shown = target.text(act, ["val/acc1", "val/loss"])
    assert shown.startswith(expected)
    assert "not measured" not in shown
    single = TargetConfig("val/acc1", 0.5, "my own")
    assert single.text(act, ["val/acc1"]) == "val/acc1 0.5000 (my own)"


def test_a_target_of_another_quantity_says_so():
    (config,) = compose("language", ["experiment=polycom_moe", "act=swiglu"])
    main = SimpleNamespace(shown=["val/loss", "val/ppl"])
    with_c4 = SimpleNamespace(shown=[*main.shown, "val/c4/loss"])
    published = "val/c4/loss 2.7200 (Table 2: C4 after 200 billion tokens of OLMoE-mix)"
    assert target_text(config, main) == f"{published}; not measured in this run"
    assert target_text(config, with_c4) == published
    (config,) = compose("language", ["experiment=polycom_1b", "act=gelu"])
    shown = target_text(config, main)
    assert shown.startswith("train/loss 2.2000 (Table 1: training loss after 250 billion tokens")
    assert "val/loss" not in shown


def test_runs_from_before_and_after_a_change_of_the_target_go_together():
    (config,) = compose("vision", ["experiment=rn50_tv90", "data.root=images"])
    before = config.plain()
    before["experiment"]["target"] = {"metric": "val/acc1", "value": 0.7613, "source": "a page"}
    assert config_from_plain(before).experiment.target.value == 0.7613
    assert config_differences(before, config.plain()) == []
    before["experiment"]["target"] = None
    assert config_differences(config.plain(), before) == []


def test_a_target_of_an_unknown_metric_is_refused(train):
    target = "experiment.target={metric: val/acc, value: 0.5, source: a paper}"
    with pytest.raises(PolyvisionError, match="Valid: train/loss, val/acc1, val/acc5, val/loss"):
        train("vision", "experiment=fake_rn50", target, "dry_run=true")


def test_a_config_of_an_older_version_has_the_defaults():
    (config,) = compose("vision", ["act.bias=false"])
    older = config.plain()
    del older["experiment"], older["act"]["options"]["order"]
    assert config_from_plain(older) == config
    for group in ("recipe", "seed", "act"):
        with pytest.raises((PolyvisionError, KeyError), match=group):
            config_from_plain({k: v for k, v in older.items() if k != group})
