"""The examples in the docstrings do what they show."""

from __future__ import annotations

import doctest
import importlib

import pytest
import torch
from test_imports import MODULES


def examples() -> list[str]:
    """Return the modules whose source holds an example."""
    return [name for name, path in MODULES.items() if ">>> " in path.read_text(encoding="utf-8")]


def test_the_central_modules_have_examples() -> None:
    assert {"functional", "activations.polynomial", "activations.registry"} <= set(examples())


@pytest.mark.parametrize("name", examples())
def test_examples(name: str) -> None:
    module = importlib.import_module(f"polyvision.{name}".rstrip("."))
    result = doctest.testmod(module, extraglobs={"torch": torch})
    assert result.attempted > 0
    assert result.failed == 0
