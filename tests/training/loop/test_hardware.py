"""Which device a run takes on machines that this one is not."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from polyvision.errors import PolyvisionError
from polyvision.training.config.compose import compose
from polyvision.training.loop.devices import resolve_hardware


def config(accelerator):
    (made,) = compose("language", [])
    return dataclasses.replace(
        made, trainer=dataclasses.replace(made.trainer, accelerator=accelerator)
    )


@pytest.fixture
def _apple(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)


@pytest.mark.usefixtures("_apple")
def test_a_gpu_without_float64_is_refused_before_training():
    with pytest.raises(PolyvisionError, match=r"trainer\.accelerator=gpu: .*MPS.*use cpu or auto"):
        resolve_hardware(config("gpu"))
    assert resolve_hardware(config("auto")).accelerator == "cpu"
    assert resolve_hardware(config("cpu")).devices == 1


def test_no_gpu_at_all(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(PolyvisionError, match="no GPU is visible here"):
        resolve_hardware(config("gpu"))
