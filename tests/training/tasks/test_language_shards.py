"""Training on shards: several validation sets, resume, and the errors of the configuration."""

from __future__ import annotations

import json
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from polyvision.cli import main
from polyvision.data.text.corpus import Corpus
from polyvision.errors import PolyvisionError
from polyvision.training.config.compose import compose
from polyvision.training.run.resume import check_files
from polyvision.training.tasks.language import build_task


@pytest.fixture(scope="session")
def corpus(small_text, tmp_path_factory):
    out = tmp_path_factory.mktemp("shards") / "book"
    command = ["prepare-text", str(small_text), "--out", str(out), "--tokenizer", "bytes"]
    assert main([*command, "--separator", r"\n\n", "--val-fraction", "0.3"]) == 0
    return out


@pytest.fixture
def shards(corpus):
    return ["data=shards", f"data.path={corpus}", "data.tokenizer=null", "recipe.batch_size=8"]


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_each_validation_set_has_its_own_metrics(train, shards, corpus, tmp_path):
    more = [f"data.val.again={corpus}", f"data.val.b-2={corpus}"]
    summary = train("language", *shards, *more, "trainer.max_steps=2")
    last = summary["last"]
    for key in ("loss", "ppl", "bpb"):
        for name in ("again", "b-2"):  # sums depend on where the memory lies
            assert last[f"val/{name}/{key}"] == pytest.approx(last[f"val/{key}"], rel=1e-5)
    assert last["val/ppl"] == pytest.approx(math.exp(last["val/loss"]), rel=1e-5)
    assert last["val/bpb"] == pytest.approx(last["val/loss"] / math.log(2), rel=1e-5)
    assert list(summary["shown"]) == [
        "val/loss",
        "val/ppl",
        "val/bpb",
        "val/again/loss",
        "val/b-2/loss",
    ]
    assert summary["monitor"] == "val/loss"


def test_a_validation_part_that_was_edited_is_refused_on_resume(overrides, small_text, tmp_path):
    """The training split is the same, so the loader of a resumed run has nothing to object to."""
    file = tmp_path / "story.txt"

    def task(text):
        file.write_text(text, encoding="utf-8")
        path = f"data.path={file}"
        return build_task(compose("language", [*overrides["language"], "data=text", path])[0])

    text = small_text.read_text(encoding="utf-8")
    first, second = task(text), task(text[:-20] + text[-20:].swapcase())
    assert first.train.fingerprint() == second.train.fingerprint()
    folder = tmp_path / "run"
    folder.mkdir()
    plan = SimpleNamespace(folder=folder, checkpoint=folder / "last.ckpt")
    check_files(plan, first.files)  # a run of before there was such a file
    for name, content in first.files.items():
        (folder / name).write_text(content, encoding="utf-8")
    check_files(plan, first.files)
    with pytest.raises(PolyvisionError, match=r"its validation_data\.json is not what the data"):
        check_files(plan, second.files)


def test_a_named_validation_set_that_was_prepared_again_is_refused_on_resume(
    overrides, shards, small_text, tmp_path, capsys
):
    file, prepared = tmp_path / "story.txt", tmp_path / "prepared"

    def files(text):
        file.write_text(text, encoding="utf-8")
        arguments = ["--tokenizer", "bytes", "--out", str(prepared), "--overwrite"]
        main(["prepare-text", str(file), *arguments])
        path = f"data.val.story={prepared}"
        return build_task(compose("language", [*overrides["language"], *shards, path])[0]).files

    text = small_text.read_text(encoding="utf-8")
    first, second = files(text), files(text.swapcase())
    plan = SimpleNamespace(folder=tmp_path, checkpoint=tmp_path / "last.ckpt")
    for name, content in first.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    check_files(plan, first)
    with pytest.raises(PolyvisionError, match=r"its validation_data\.json is not what the data"):
        check_files(plan, second)


def test_bits_per_byte_count_the_bytes_of_the_targets(overrides, shards):
    (config,) = compose("language", [*overrides["language"], *shards])
    task = build_task(config)
    module = task.module(task.model, config.recipe, seed=0, total_steps=1, epoch_steps=1)
    module.byte_lengths = torch.arange(256)
    inputs, targets = (part[None] for part in task.val[0])
    totals = {k: float(v.detach()) for k, v in module.count((inputs, targets)).items()}
    assert totals["bytes"] == float(targets.sum())
    assert module.metrics(totals)["val/bpb"] == pytest.approx(
        totals["nats"] / math.log(2) / float(targets.sum())
    )
    assert "byte_lengths" not in module.state_dict()


def test_the_z_loss_of_the_recipe_counts_in_training_only(overrides, shards):
    (config,) = compose("language", [*overrides["language"], *shards, "recipe.z_loss=0.25"])
    task = build_task(config)
    module = task.module(task.model, config.recipe, seed=0, total_steps=1, epoch_steps=1)
    batch = inputs, targets = tuple(part[None] for part in task.val[0])
    logits = task.model(inputs)[0]
    plain = torch.nn.functional.cross_entropy(logits, targets[0])
    penalty = logits.logsumexp(-1).square().mean()
    torch.testing.assert_close(module.loss(batch), plain + 0.25 * penalty)
    totals = module.count(batch)
    torch.testing.assert_close(totals["nats"] / totals["tokens"], plain)


def test_a_stopped_run_goes_on_with_the_same_batches(train, shards, tmp_path):
    more = [*shards, "trainer.max_epochs=1", "trainer.val_every_n_steps=4"]
    whole = train("language", *more, "trainer.max_steps=12", "seed=1")
    first = tmp_path / "runs/language/shards/lm_tiny/polynorm/seed1"
    losses = [r["train/loss"] for r in metrics(first) if "train/loss" in r]
    assert len(losses) == 12
    checkpoint = torch.load(first / "checkpoints" / "last.ckpt", weights_only=True)
    state = checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"][0]
    assert state["done"] == 12 * 8
    assert whole["steps"] == 12


def test_the_context_of_the_data_may_be_shorter_but_not_longer(overrides, shards):
    (config,) = compose("language", [*overrides["language"], *shards, "data.context=16"])
    task = build_task(config)
    assert task.val[0][0].shape == task.train.sample(0, 0)[0].shape == (16,)
    assert task.tokens_per_sample == 16
    (config,) = compose("language", [*overrides["language"], *shards, "data.context=64"])
    with pytest.raises(ValueError, match=r"data.context=64 is longer than the model's"):
        build_task(config)


@pytest.mark.parametrize("form", ["data.mix.book={}", "data.mix={{book: {}}}"])
def test_names_may_be_added_to_open_groups(form, overrides, corpus):
    common = [*overrides["language"], "data=shards", f"data.path={corpus.parent}"]
    (config,) = compose("language", [*common, "data.tokenizer=null", form.format("2")])
    assert config.data.mix == {"book": 2.0}
    assert len(build_task(config).train) > 10
    with pytest.raises(ValueError, match=re.escape("data.mix.book must be greater than 0")):
        compose("language", [*common, form.format("-1")])
    with pytest.raises(ValueError, match=re.escape("data.mix.book must be a number, got 'x'")):
        compose("language", [*common, form.format("x")])


def test_corpora_are_read_alike_by_the_trainer_and_by_hand(overrides, shards, corpus):
    (config,) = compose("language", [*overrides["language"], *shards])
    task = build_task(config)
    part = Corpus(corpus, "x").parts["val"]
    row = np.concatenate([part.read(i, 0, s.header.tokens) for i, s in enumerate(part.shards)])
    assert task.val[1][1].tolist() == row[33:65].tolist()
