"""The moving average of weights against its recurrence, and beside the weights of a run."""

import json

import pytest
import torch
from torch import nn

from polyvision.training.loop.averaging import WeightAverage, averaged_tag


@pytest.mark.parametrize("warmup", [False, True])
def test_the_average_follows_its_recurrence(warmup):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    average = WeightAverage(model, 0.9, warmup=warmup)
    expected = None
    for step in range(1, 30):
        with torch.no_grad():
            model[0].weight.normal_()
            model[1].running_mean.normal_()
        values = torch.cat([model[0].weight.flatten(), model[1].running_mean]).double()
        average.update(model, step)
        if step < 2:
            expected = values
            continue
        decay = min(0.9, 1 - step ** (-2 / 3)) if warmup else 0.9
        expected = decay * expected + (1 - decay) * values
    state = average.state_dict()
    found = torch.cat([state["model.0.weight"].flatten(), state["model.1.running_mean"]])
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    assert not average.model.training


def test_a_run_validates_both_and_best_follows_the_average(train, tmp_path, capsys):
    more = ["recipe.ema_decay=0.9", "trainer.max_epochs=2", "model.name=test_resnet"]
    summary = train("vision", *more)
    (folder,) = tmp_path.glob("runs/*/*/*/*/seed0")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    raw, averaged = ([r[t] for r in rows if t in r] for t in ("val/acc1", "val_ema/acc1"))
    assert len(raw) == len(averaged) == 2
    assert summary["monitor"] == "val_ema/acc1"
    assert summary["best"] == max(averaged)
    assert "best val_ema/acc1" in capsys.readouterr().out
    state = torch.load(folder / "checkpoints" / "best.ckpt", weights_only=True)
    assert set(state["ema"]) == set(state["state_dict"])
    assert any(not torch.equal(v, state["state_dict"][k]) for k, v in state["ema"].items())


def test_tags():
    assert averaged_tag("val/acc1") == "val_ema/acc1"
