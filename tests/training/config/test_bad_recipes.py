"""Settings of a vision recipe that fit their type but not each other: refused before training."""

import pytest

from polyvision.errors import PolyvisionError

SMOOTH = ["recipe.loss=bce", "recipe.label_smoothing=0.9"]  # of 4 classes: 0.225 and 0.325


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (["recipe.bce_threshold=0.2"], "recipe.bce_threshold=0.2 is for recipe.loss=bce, not ce"),
        ([*SMOOTH, "recipe.bce_threshold=0.4"], "the targets are 0.225 and 0.325, and it must lie"),
        ([*SMOOTH, "recipe.bce_threshold=0.2"], "the targets are 0.225 and 0.325, and it must lie"),
        (["recipe.repeats=17"], "recipe.repeats=17 is more than recipe.batch_size=16"),
        (["recipe.ema_warmup=true"], "recipe.ema_warmup=true needs recipe.ema_decay"),
        (["recipe.lr_scaling=sqrt"], "recipe.lr_scaling=sqrt needs recipe.lr_base_batch"),
        (
            ["model.name=vgg11", "recipe.drop_path=0.1"],
            "recipe.drop_path=0.1: vgg11 has no paths that can be dropped; use 0",
        ),
        (
            ["model.options.drop_path_rat=0.1"],
            "model.options.drop_path_rat: unknown option of test_resnet 'drop_path_rat'. "
            "Did you mean 'drop_path_rate'?",
        ),
        (["model.options.layers=3"], "timm could not build 'test_resnet': 'int' object is not"),
        (["recipe.optimizer_options.beta=1"], "does not read it. Did you mean 'betas'? Valid:"),
        (
            ["+model.options.drop_path_rate=0.3", "recipe.drop_path=0.1"],
            "recipe.drop_path=0.1 and model.options.drop_path_rate=0.3 are the same setting",
        ),
        (["model.name=test_vit", "data.test_size=48"], "data.test_size=48: test_vit takes images"),
        (["recipe.accumulate=16"], "does not train on passes of shape (1, 3, 32, 32): Expected"),
    ],
)
def test_settings_that_do_not_fit_together(given, text, train, tmp_path):
    with pytest.raises(PolyvisionError) as caught:
        train("vision", *given, "dry_run=true")
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "runs").exists()


def test_a_drop_path_that_a_network_takes_and_drops(train, monkeypatch):
    monkeypatch.setattr("polyvision.training.tasks.vision.DropPath", ())  # as if none were built
    with pytest.raises(PolyvisionError, match=r"drop_path=0\.1: test_resnet has no paths that can"):
        train("vision", "recipe.drop_path=0.1", "dry_run=true")


def test_settings_at_the_edge_that_do(train, capsys):
    loss = ["recipe.loss=bce", "recipe.label_smoothing=0.1", "recipe.bce_threshold=0.025"]
    mixing = ["recipe.mix.mixup=0.2", "recipe.mix.prob=0.25", "recipe.repeats=16"]
    train("vision", *loss, *mixing, "recipe.drop_path=0.1", "data.test_size=48", "dry_run=true")
    shown = capsys.readouterr().out
    assert "mixup 0.2, 75% not mixed, drop path 0.1, each image 16 times" in shown
    assert "32 pixels; in validation 48, crop 0.95" in shown
