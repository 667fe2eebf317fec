"""The direction of a metric: one table, read by best weights and by comparisons."""

import pytest

from polyvision.analysis.metrics import higher_is_better
from polyvision.training.loop.saving import Checkpoints
from polyvision.training.loop.stopping import Stopping
from polyvision.training.run.folder import Run


@pytest.mark.parametrize(
    ("tag", "upwards"),
    [
        ("val/acc1", True),
        ("val_ema/acc5", True),
        ("val/loss/acc1", True),
        ("val/loss", False),
        ("train/loss", False),
        ("val/vaccines/loss", False),
        ("val/acc/ppl", False),
        ("val_ema/acc1.v2/bpb", False),
        ("val/accuracy_of_loss", None),
        ("val/acc1/f1", None),
    ],
)
def test_only_the_last_part_of_a_tag_counts(tag, upwards):
    assert higher_is_better(tag) is upwards


@pytest.mark.parametrize(
    ("tag", "sign"), [("val/acc1", 1), ("val_ema/acc1", 1), ("val/loss", -1), ("val/acc/loss", -1)]
)
def test_the_best_weights_follow_it(tag, sign, tmp_path):
    assert Checkpoints(Run(tmp_path), tag, None, Stopping(), [1]).sign == sign


def test_weights_cannot_follow_a_metric_of_no_direction(tmp_path):
    with pytest.raises(AssertionError, match="val/f1 has no direction"):
        Checkpoints(Run(tmp_path), "val/f1", None, Stopping(), [1])
