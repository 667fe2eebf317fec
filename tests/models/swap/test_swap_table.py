"""docs/swap-table.md: every line is made again, and every family is in it."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
from timm.models._registry import _model_to_module

from benchmarks.swap_table import (
    HEADER,
    TRANSFORMERS,
    markdown,
    row,
    smallest_of_torchvision,
    versions,
)

ROOT = Path(__file__).resolve().parents[3]
PAGE = Path(ROOT, "docs", "swap-table.md").read_text(encoding="utf-8")
ROWS = [line for line in PAGE.splitlines() if line.startswith("|")][2:]
NAMES = [line.split("|")[1].strip() for line in ROWS]
LEFT, BACKWARD = HEADER.index("left over"), HEADER.index("backward")


def test_nothing_is_left_over_and_everything_trains() -> None:
    for line in ROWS:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert cells[LEFT] == "0", line
        assert cells[BACKWARD] in ("meta", "cpu"), line


def test_every_family_is_in_the_table() -> None:
    if f"timm {timm.__version__}" in PAGE:
        # Our own ResNet for small images is registered with timm where it is used.
        families = set(_model_to_module.values()) - {"small_resnet"}
        assert {_model_to_module.get(n) for n in NAMES} >= families
    assert set(NAMES) >= {f"transformers:{kind}" for kind in TRANSFORMERS}
    if versions().split(", transformers")[0] in PAGE:
        assert set(NAMES) >= set(smallest_of_torchvision())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "line"), list(zip(NAMES, ROWS, strict=True)))
def test_the_line_of(name: str, line: str) -> None:
    if name.startswith("transformers:"):
        pytest.importorskip("transformers")
    cells = row(name)
    assert cells[LEFT] == "0"
    assert cells[BACKWARD] in ("meta", "cpu")
    if versions() in PAGE:
        assert markdown(cells) == line
