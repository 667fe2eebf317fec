"""docs/vision.md: its table of experiments is what the files of ``configs/experiment`` say."""

from pathlib import Path

import pytest
import yaml

from polyvision import configs
from polyvision.training.config.compose import compose

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "vision.md").read_text(encoding="utf-8")
FOLDER = Path(configs.__file__).parent / "experiment"
FILES = {
    path.stem: path.read_text(encoding="utf-8")
    for path in sorted(FOLDER.glob("*.yaml"))
    if yaml.safe_load(path.read_text(encoding="utf-8"))["experiment"]["task"] == "vision"
}


def line(name):
    (config,) = compose("vision", [f"experiment={name}", "data.root=images"])
    data, target = config.data, config.experiment.target
    note = FILES[name].splitlines()[1].removeprefix("# ")
    pixels = f"{data.image_size}" + (f", {data.test_size} in test" if data.test_size else "")
    what = f"`{config.model.name}`, `{data.name}`, `{config.recipe.name}`"
    value, source = "none", ""
    if target:
        value = ", ".join(f"{act} {number:.4f}" for act, number in target.value.items())
        source = target.source
    return f"| `{name}` | {what} | {pixels} | {value} | {source} | {note} |".replace("|  |", "| |")


@pytest.mark.parametrize("name", FILES)
def test_the_line_of(name):
    assert line(name) in PAGE.splitlines()


def test_every_experiment_is_in_the_table_once():
    rows = [row for row in PAGE.splitlines() if row.count("|") == 7]
    assert len(rows) == len(FILES) + 2  # head and rule
