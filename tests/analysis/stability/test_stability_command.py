"""``polyvision stability``: the report it writes, and the mistakes it refuses."""

from __future__ import annotations

import dataclasses
import functools
import html
import json
import re
from pathlib import Path

import pytest
import torch

from polyvision.analysis.document import Section, as_html, as_markdown
from polyvision.analysis.stability import command
from polyvision.analysis.stability.contrast import (
    GRIDS,
    SETTINGS,
    run_grids,
    run_pairs,
    run_precisions,
)
from polyvision.analysis.stability.overflow import overflow_maps
from polyvision.cli import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every part of the report, from runs of a few steps."""
    settings = [
        dataclasses.replace(setting, recipe=dataclasses.replace(setting.recipe, steps=2))
        for setting in SETTINGS
        if setting.network == "mlp"
    ]
    base = dataclasses.replace(GRIDS[0].base, steps=2)
    grid = dataclasses.replace(GRIDS[0], values=(0.5, 1.0), rates=(1e-3,), base=base)
    small = {
        "overflow_maps": functools.partial(overflow_maps, range(-24, 16, 13)),
        "run_pairs": functools.partial(run_pairs, settings=settings),
        "run_grids": functools.partial(run_grids, grids=[grid]),
        "run_precisions": functools.partial(run_precisions, settings=settings),
    }
    out = tmp_path_factory.mktemp("lab") / "new" / "report"
    with pytest.MonkeyPatch.context() as patch:
        for name, function in small.items():
            patch.setattr(command, name, function)
        assert main(["stability", "--output", str(out), "--seeds", "2", "--device", "cpu"]) == 0
    return out


def test_json_holds_every_result(folder: Path) -> None:
    results = json.loads((folder / "stability.json").read_text())
    assert results.keys() == {"environment", "thresholds", "maps", *command.PARTS}
    # One network: two seeds; two gains; four precisions; three activations each.
    assert [len(results[part]) for part in command.PARTS[1:]] == [6, 6, 12]
    run = results["pairs"][1]
    assert (run["network"], run["activation"], run["seed"]) == ("mlp", "polyrelu", 0)
    assert run["losses"] == ["inf"] * 2 or run["losses"] == ["nan"] * 2
    assert run["scales"] == [65536.0, 32768.0]
    assert run["sighting"] == {"step": 1, "kind": "output", "layer": "layers.5"}
    assert (run["lost"], run["outcome"], run["skipped"]) == (1, "diverges", [1, 2])
    assert "losses" not in results["grid"][0]
    row = results["maps"][0]
    assert len(row["error"]) == len(row["non_finite"]) == len(range(-24, 16, 13))


def test_figures_and_markdown(folder: Path) -> None:
    text = re.sub(" +", " ", (folder / "report.md").read_text())  # tables are aligned
    figures = re.findall(r"!\[.*?\]\((.*?)\)", text)
    assert figures == ["maps.png", "curves.png", "grid.png"]
    assert all((folder / name).read_bytes().startswith(b"\x89PNG") for name in figures)
    assert "| mlp, gain 1, lr 0.001, clip 1 | polyrelu | 2 diverges | inf inf | 2 | 1 1 |" in text
    assert "| x^3 | x^3 = L | 40.3142 | 40.3125 | 40.34375 |" in text
    assert "fp32 - everything fp32" in text


def test_page_needs_no_other_file(folder: Path) -> None:
    page = (folder / "report.html").read_text()
    sources = re.findall(r'(?:src|href)="(.{10})', page)
    assert sources == ["data:image"] * 3
    assert page.count("<h2>") == 5
    assert "http" not in page
    assert page.count("<table>") == page.count("</table>") == 5


def test_markup_is_escaped() -> None:
    section = Section("a < b", ("x *y* & z",), table=(("h|1", "<i>"), ("act_a_b", "__init__")))
    assert "| h\\|1    | <i>      |" in as_markdown("t", "l", [section])
    page = as_html("t", "l", [section])
    assert "<h2>a &lt; b</h2>\n<p>x <em>y</em> &amp; z</p>" in page
    table = html.unescape("".join(re.findall(r"<t[hd]>.*</t[hd]>", page)))
    assert "<th>&lt;i&gt;</th>" in page
    assert table == "<th>h|1</th><th><i></th><td>act_a_b</td><td>__init__</td>"


def test_a_part_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(command, "overflow_maps", functools.partial(overflow_maps, [0]))
    assert main(["stability", "--parts", "maps", "--output", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"report: {tmp_path / 'report.html'}")
    assert re.search(r"\[ *\d+ s\] overflow maps: polynorm", err)
    text = (tmp_path / "report.md").read_text()
    assert re.findall("## (.*)", text) == ["Thresholds of fp16", "Overflow maps"]
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"report.md", "report.html", "stability.json", "maps.png"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seeds", "0"], "--seeds must be at least 1, got 0"),
        (["--output", "{file}"], "--output {file} cannot be a folder: File exists"),
        (["--output", "{file}/below"], "--output {file}/below cannot be a folder: Not a directory"),
    ],
)
def test_mistakes(arguments: list[str], message: str, tmp_path: Path, capsys) -> None:
    file = tmp_path / "file"
    file.touch()
    assert main(["stability", *(a.replace("{file}", str(file)) for a in arguments)]) == 2
    expected = f"polyvision: {message.replace('{file}', str(file))}\n"
    assert capsys.readouterr().err == expected


def test_no_gpu(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["stability", "--device", "cuda"]) == 2
    assert "--device cuda: no GPU is visible here; use cpu or auto" in capsys.readouterr().err
