"""From overrides to a typed configuration: every file composes, every mistake gets its line."""

import ast
import dataclasses
from pathlib import Path

import hydra
import pytest

import polyvision
from polyvision import configs
from polyvision.activations import activation_names
from polyvision.errors import PolyvisionError
from polyvision.training.config import schema
from polyvision.training.config.compose import (
    CONFIG_MODULE,
    SCRIPTS,
    check_keys,
    compose,
    register_groups,
)

CONFIGS = Path(configs.__file__).parent
SOURCE = Path(polyvision.__file__).parent
NEEDED = {
    "timm": ["model.name=resnet18"],
    "folder": ["data.root=images"],
    "imagenet": ["data.root=images"],
    "tar": ["data.root=images"],
    "wds": ["data.root=images"],
    "text": ["data.path=book.txt"],
}


def files(group):
    return sorted(p.stem for p in (CONFIGS / group).glob("*.yaml"))


def task_of(group, name):
    text = (CONFIGS / group / f"{name}.yaml").read_text()
    return "language" if "base/language@_here_" in text else "vision"


@pytest.mark.parametrize(
    ("group", "name"), [(g, n) for g in ("model", "data", "recipe", "trainer") for n in files(g)]
)
def test_every_file_composes(group, name):
    task = task_of(group, name)
    (config,) = compose(task, [f"{group}={name}", *NEEDED.get(name, [])])
    assert config.task == task


@pytest.mark.parametrize("name", activation_names())
def test_every_activation_is_a_choice(name):
    (config,) = compose("language", [f"act={name}"])
    assert config.act.label == name


def test_defaults_of_the_two_scripts():
    (vision,) = compose("vision", [])
    (language,) = compose("language", [])
    assert (vision.model.name, vision.act.name, vision.data.name) == (
        "resnet50",
        "polynorm",
        "digits",
    )
    assert (language.model.name, language.act.name, language.data.name) == (
        "lm_tiny",
        "polynorm",
        "book",
    )


def test_options_that_a_file_does_not_have_need_no_plus():
    given = ["recipe.schedule=wsd", "recipe.schedule_options.decay_epochs=0.1,0.2"]
    given += [
        "recipe.optimizer_options.eps=1e-6",
        "data.options.samples=9",
        "model.options.depth=2",
    ]
    configs = compose("vision", given)
    assert [c.recipe.schedule_options for c in configs] == [
        {"decay_epochs": 0.1},
        {"decay_epochs": 0.2},
    ]
    assert configs[0].recipe.optimizer_options["eps"] == 1e-6
    assert configs[0].data.options == {"samples": 9}
    assert configs[0].model.options == {"depth": 2}


def test_options_reach_the_label():
    (config,) = compose("vision", ["act.order=4", "act.bias=false"])
    assert config.act.options == {"order": 4, "eps": 1e-6, "bias": False, "norm": "rms"}
    assert config.act.label == "polynorm-order4-biasFalse"


def test_a_sweep_makes_every_combination():
    made = compose("vision", ["act=relu,polynorm", "seed=0,1,2"])
    assert [(c.act.name, c.seed) for c in made] == [
        (a, s) for a in ("relu", "polynorm") for s in (0, 1, 2)
    ]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("mdoel=resnet50", "unknown key 'mdoel'. Did you mean 'model'?"),
        ("lr=0.1", "unknown key 'lr'. Did you mean recipe.lr?"),
        ("max_steps=5", "unknown key 'max_steps'. Did you mean trainer.max_steps?"),
        ("name=resnet18", "unknown key 'name'. Did you mean act.name, data.name, model.name"),
        ("order=4", "unknown key 'order'. Did you mean act.order?"),
        ("act=polynrom", "unknown act 'polynrom'. Did you mean 'polynorm'?"),
        ("act=mine", "One of your own needs plugins=[<module or file.py>]"),
        ("act.ordr=4", "unknown key 'act.ordr'. Did you mean 'act.order'?"),
        ("act.order=9", "order must be an integer from 1 to 8, got 9"),
        ("act.order=three", "act.order must be an integer, got 'three'"),
        ("trainer.max_epochs=abc", "trainer.max_epochs must be an integer, got 'abc'"),
        ("trainer.max_epochs=0", "trainer.max_epochs must be at least 1, got 0"),
        ("trainer.max_epochs=1.5", "trainer.max_epochs must be an integer, got 1.5"),
        (
            "trainer.devices=two",
            "trainer.devices must be an integer at least 1 or 'auto', got 'two'",
        ),
        ("trainer.devices=0", "trainer.devices must be an integer at least 1 or 'auto', got 0"),
        ("seed=-1", "seed must be at least 0, got -1"),
        ("precision=fp8", "unknown precision 'fp8'"),
        ("recipe.lr=inf", "recipe.lr must be finite, got inf"),
        ("recipe.lr=0", "recipe.lr must be greater than 0"),
        ("recipe.clip_grad=-1", "recipe.clip_grad must be greater than 0"),
        ("recipe.batch_size=true", "recipe.batch_size must be an integer, got True"),
        ("recipe.schedule=cosin", "unknown recipe.schedule 'cosin'. Did you mean 'cosine'?"),
        ("recipe.augment.hflip=2", "recipe.augment.hflip must be at most 1, got 2"),
        ("recipe.schedule_options.k_decays=1", "cosine does not read it. Did you mean 'k_decay'?"),
        ("recipe.schedule_options.decay_rate=1", "Take it out with ~recipe.schedule_options.decay"),
        ("recipe.shedule_options.k=1", "unknown key 'recipe.shedule_options'. Did you mean"),
        ("model.option.k=1", "unknown key 'model.option'. Did you mean 'model.options'?"),
        ("+recipe.lrr=1", "unknown key 'recipe.lrr'. Did you mean 'recipe.lr'?"),
        ("model=timm", "model.name must be given: add model.name=<value>"),
        ("model=lm_tiny", "run `python train_lm.py model=lm_tiny`"),
        ("data=book", "data=book is for language, not for vision"),
        ("recipe=book", "choose recipe= one of: cutout_baseline, digits, fashion, polycom_vision"),
        ("act=swiglu", "act=swiglu is gated"),
        ("seed", "cannot read 'seed': write key=value"),
        ('data.mix={"a":1}', """cannot read 'data.mix={"a":1}': write key=value"""),
        ("dry_run=maybe", "dry_run must be true or false, got 'maybe'"),
        ("~model", "model is missing: choose model=<name>"),
        ("~seed", "seed is missing"),
        ("~act.name", "unknown activation 'None'"),
        ("act.name=3", "unknown activation '3'"),
        ("task=visoin", "unknown task 'visoin'. Did you mean 'vision'?"),
        ("run_root=${nothing}", "run_root: cannot resolve"),
        ("run_root=a folder (1)", """in the shell 'run_root="a folder (1)"'"""),
    ],
)
def test_each_mistake_has_one_line(override, expected):
    with pytest.raises(PolyvisionError) as caught:
        compose("vision", [override])
    assert expected in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_an_option_of_an_activation_without_options_is_refused_as_such():
    with pytest.raises(PolyvisionError, match=r"'act\.order': act=relu has no options$"):
        compose("vision", ["act=relu", "act.order=4"])


def test_all_mistakes_come_in_one_error():
    mistakes = ["mdoel=x", "act=polynrom", "act.ordr=4", "trainer.max_epochs=abc", "seed=-1"]
    with pytest.raises(PolyvisionError) as caught:
        compose("vision", mistakes)
    assert [line.split(". ")[0].split(", got")[0] for line in str(caught.value).splitlines()] == [
        "unknown act 'polynrom'",
        "unknown key 'mdoel'",
        "trainer.max_epochs must be an integer",
        "seed must be at least 0",
        "unknown key 'act.ordr'",
    ]


def test_showing_the_configuration_needs_no_values_but_the_right_keys():
    check_keys("vision", ["data=folder"])
    with pytest.raises(PolyvisionError, match="Did you mean 'model'"):
        check_keys("vision", ["mdoel=timm"])


def test_a_mistake_in_one_job_of_a_sweep_is_found():
    with pytest.raises(ValueError, match="seed must be at least 0, got -3"):
        compose("vision", ["seed=0,1,-3"])


def test_every_key_is_read():
    """Each field of the schema is an attribute that some module of the package reads."""
    read = {
        node.attr
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    # Read as text to tell the task, by interpolation, and as a whole.
    assert "${recipe.epochs}" in (CONFIGS / "trainer" / "default.yaml").read_text()
    indirect = {"task", "epochs", *(f.name for f in dataclasses.fields(schema.AugmentConfig))}
    groups = filter(dataclasses.is_dataclass, map(vars(schema).get, schema.__all__))
    fields = {f.name for group in groups for f in dataclasses.fields(group)}
    assert {"lr", "width", "crop_pct", "seed"} <= fields
    assert fields - read - indirect == set()


@pytest.mark.parametrize("task", ["vision", "language"])
def test_help_says_what_is_trained_and_not_hydras_name_of_the_program(task):
    register_groups()
    with hydra.initialize_config_module(CONFIG_MODULE, version_base="1.3"):
        config = hydra.compose(SCRIPTS[task], return_hydra_config=True)
    assert config.hydra.help.header.startswith(f"Trains a {task} model")
    assert "powered by Hydra" not in config.hydra.help.header + config.hydra.help.footer
