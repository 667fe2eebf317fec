"""What a person reads after a run."""

from pathlib import Path

import pytest

from polyvision.training.logging.summary import format_summary
from polyvision.training.run.folder import Run


@pytest.mark.parametrize(
    ("task", "act", "overrides", "expected"),
    [
        ("vision", "polynorm", [], "python train_vision.py act=relu; "),
        ("language", "swiglu", ["act=swiglu"], "python train_lm.py act=polynorm; "),
        (
            "vision",
            "polyrelu-initbase",
            ["model=timm", "model.name=a b", "act=polyrelu", "act.init=base", "resume=auto"],
            "python train_vision.py model=timm 'model.name=a b' act=relu; ",
        ),
    ],
)
def test_the_summary_names_the_same_run_with_another_activation(task, act, overrides, expected):
    summary = {
        "settings": {"task": task, "act": act},
        "monitor": "val/loss",
        "best": 1.0,
        "shown": {},
        "seconds": 1,
        "samples_per_s": None,
        "unreadable": [],
    }
    run = Run(Path("runs/task/data/model/act/seed0"))
    text = format_summary(run, summary, overrides)
    assert f"  {expected}polyvision compare runs/task/data/model" in text
