"""Unlike runs are refused by key, value and run."""

import pytest

from polyvision.analysis.compare.reading import read_run
from polyvision.analysis.compare.settings import check_alike
from polyvision.errors import PolyvisionError


@pytest.fixture
def runs(write_run):
    """Two runs; the changes apply to the second."""

    def make(**changes):
        folders = [write_run("relu", 0), write_run("polynorm", 1, **changes)]
        return [read_run(folder) for folder in folders]

    return make


def test_activation_seed_paths_and_bookkeeping_may_differ(runs):
    free = {"trainer__log_every_n_steps": 7, "data__workers": 3, "run_root": "elsewhere"}
    free["analysis"] = {"every_n_steps": 5, "kinds": ["rank"]}
    free["experiment"] = {"target": {"metric": "val/acc1", "value": {"relu": 0.8}}}
    assert check_alike(runs(**free)) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"recipe__lr": 0.2}, r"recipe\.lr: 0\.1 in relu/seed0, 0\.2 in polynorm/seed1"),
        ({"data__root": "/b"}, r'data\.root: null in relu/seed0, "/b" in polynorm/seed1'),
        ({"precision": "fp16"}, r'precision: "32" in relu/seed0, "fp16" in polynorm/seed1'),
        ({"model__options": {"width": 2}}, r"model\.options\.width: \(absent\) in relu/seed0, 2"),
        ({"state": {"total_steps": 8}}, r"steps: 4 in relu/seed0, 8 in polynorm/seed1"),
    ],
)
def test_unlike_settings_are_refused(runs, change, message):
    with pytest.raises(PolyvisionError, match=message):
        check_alike(runs(**change))


def test_every_differing_key_is_listed_and_offered(runs):
    with pytest.raises(PolyvisionError, match=r"--allow recipe\.lr,trainer\.max_steps,steps$"):
        check_alike(runs(recipe__lr=0.2, trainer__max_steps=8, state={"total_steps": 8}))


def test_runs_of_several_models_are_named_by_folder_and_not_key_by_key(runs):
    pair = runs(model__name="lm_mini", recipe__lr=0.2)
    with pytest.raises(PolyvisionError) as caught:
        check_alike(pair)
    first, relu, polynorm, advice = str(caught.value).splitlines()
    assert first == "these runs differ in model.name:"
    assert relu.endswith(f": {pair[0].folder.parent.parent} (relu/seed0)")
    assert polynorm.endswith(f"lm_mini: {pair[1].folder.parent.parent} (polynorm/seed1)")
    assert advice.endswith("--allow model,recipe")
    with pytest.raises(PolyvisionError, match="the settings of these runs differ"):
        check_alike(pair, ["model"])


def test_what_is_allowed_is_said_and_the_rest_still_refused(runs):
    pair = runs(recipe__lr=0.2, recipe__epochs=3)
    notes = check_alike(pair, ["recipe"])
    assert {note.split(": ")[1] for note in notes} == {"recipe.lr", "recipe.epochs"}
    with pytest.raises(PolyvisionError, match=r"recipe\.epochs") as error:
        check_alike(pair, ["recipe.lr"])
    assert "recipe.lr:" not in str(error.value)


def test_a_key_that_no_run_has_is_refused(runs):
    pair = runs()
    with pytest.raises(PolyvisionError, match=r"'recipe\.rl'.* Did you mean 'recipe\.lr'"):
        check_alike(pair, ["recipe.rl"])
    with pytest.raises(PolyvisionError, match=r"'recpie'.* Did you mean 'recipe'\?"):
        check_alike(pair, ["recpie"])


def test_other_surroundings_are_said(runs):
    (note,) = check_alike(runs(environment={"git": {"commit": "abc", "changed": True}}))
    assert "git" in note
    assert '"abc with changes" in polynorm/seed1' in note
