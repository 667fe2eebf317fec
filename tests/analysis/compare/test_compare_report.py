"""What a comparison says: what is missing is said, and nothing is averaged over it."""

import csv
import json
import re

import pytest

from polyvision.analysis.compare.command import compare
from polyvision.cli import main


@pytest.fixture
def report(tmp_path, capsys):
    """Run ``polyvision compare`` on all runs; returns what it printed."""

    def make(*more, code=0):
        arguments = ["compare", str(tmp_path / "runs"), "--output", str(tmp_path / "out"), *more]
        assert main(arguments) == code
        captured = capsys.readouterr()
        return captured.out if code == 0 else captured.err

    return make


@pytest.fixture
def rows(tmp_path):
    def read(name):
        with (tmp_path / "out" / name).open() as file:
            return list(csv.DictReader(file))

    return read


@pytest.fixture
def pairs(write_run):
    """Three seeds of two activations; differences of the last accuracy: 0.1, 0.2, 0.3."""
    for seed in range(3):
        write_run("polynorm", seed, (0.9, 0.6 + 0.1 * seed + 0.01 * seed))
        write_run("relu", seed, (0.4, 0.5 + 0.01 * seed))


def cells(printed, start):
    """The cells of the first table row that begins so."""
    line = next(line for line in printed.splitlines() if line.startswith(f"| {start}"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_means_and_paired_differences(pairs, report, rows):
    printed = report()
    assert cells(printed, "metric") == ["metric", "relu", "polynorm"]
    assert cells(printed, "val/acc1 (last)") == [
        "val/acc1 (last)",
        "0.5100 ± 0.0100 (3 runs)",
        "0.7100 ± 0.1100 (3 runs)",
    ]
    assert cells(printed, "val/acc1 (best)")[1:] == [
        "0.5100 ± 0.0100 (3 runs)",
        "0.9000 ± 0.0000 (3 runs)",
    ]
    # t(0.975, 2) = 4.3027: 0.2 -+ 4.3027 * 0.1 / sqrt(3)
    last = cells(printed, "polynorm   | val/acc1 (last)")
    assert last[2:] == ["+0.2000", "-0.0484 to +0.4484", "3 (seeds 0, 1, 2)", "not told apart"]
    worse = cells(printed, "polynorm   | val/loss (last)")
    assert worse[2:4] == ["-0.2000", "-0.4484 to +0.0484"]
    best = cells(printed, "polynorm   | val/acc1 (best)")
    assert best[-1] == "better"
    (row,) = [r for r in rows("differences.csv") if r["metric"] == "val/acc1 (last)"]
    assert float(row["difference"]) == pytest.approx(0.2)
    assert float(row["low"]) == pytest.approx(-0.04841, abs=1e-5)
    assert row["seeds"] == "0 1 2"
    run = next(r for r in rows("runs.csv") if (r["activation"], r["seed"]) == ("polynorm", "2"))
    assert float(run["val/acc1 (last)"]) == pytest.approx(0.82)
    assert run["counted"] == "True"


def test_direction_follows_the_metric(write_run, report):
    for seed, gain in enumerate((0.2, 0.21, 0.2)):
        write_run("relu", seed, (0.4, 0.5))
        write_run("polynorm", seed, (0.4, 0.5 + gain))
    printed = report()
    assert cells(printed, "polynorm   | val/acc1 (last)")[-1] == "better"
    assert cells(printed, "polynorm   | val/loss (last)")[-1] == "better"
    printed = report("--baseline", "polynorm")
    assert cells(printed, "relu       | val/acc1 (last)")[-1] == "worse"
    assert cells(printed, "relu       | val/loss (last)")[-1] == "worse"


def test_the_name_of_a_validation_set_has_no_direction(write_run, report):
    """``vaccines`` contains ``acc``, and ``loss`` may be the name of a set."""
    for seed, gain in enumerate((0.2, 0.21, 0.2)):
        for act, values in (("relu", (0.9, 1.5)), ("polynorm", (0.8, 1.5 - gain))):
            folder = write_run(act, seed)
            with (folder / "metrics.jsonl").open("a") as file:
                for step, value in zip((2, 4), values, strict=True):
                    row = {"step": step, "val/vaccines/loss": value, "val/loss/acc1": value}
                    row |= {"val/soot_acc/f1": value, "val/vaccines/bpb": value}
                    file.write(json.dumps(row) + "\n")
    printed = report()
    for name, best, says in (
        ("val/vaccines/loss", "0.9000", "better"),
        ("val/vaccines/bpb", "0.9000", "better"),
        ("val/loss/acc1", "1.5000", "worse"),
    ):
        assert cells(printed, f"{name} (best)")[1].startswith(best), name
        assert cells(printed, f"polynorm   | {name} (last)")[-1] == says, name
    assert cells(printed, "polynorm   | val/soot_acc/f1 (last)")[-1] == "lower"
    assert "val/soot_acc/f1 (best)" not in printed
    assert "- val/soot_acc/f1: it is not known which way this metric improves" in printed


def test_one_pair_has_no_interval(write_run, report):
    write_run("relu", 0)
    write_run("polynorm", 0, (0.5, 0.9))
    row = cells(report(), "polynorm   | val/acc1 (last)")
    assert row[2:] == ["+0.1000", "one pair: no interval", "1 (seed 0)", "not known"]


def test_equal_differences_have_no_interval(write_run, report):
    for seed in range(2):
        write_run("relu", seed)
        write_run("polynorm", seed, (0.5, 0.9))
    row = cells(report(), "polynorm   | val/acc1 (last)")
    assert row[3:] == ["equal differences: no interval", "2 (seeds 0, 1)", "not known"]


def test_a_missing_seed_is_said_and_does_not_pair(pairs, write_run, report):
    write_run("gelu", 1)
    write_run("gelu", 5)
    printed = report()
    assert "- No finished run of gelu with seed 0, 2: no pair there." in printed
    assert "- No finished run of relu with seed 5: no pair there." in printed
    assert cells(printed, "gelu       | val/acc1 (last)")[4] == "1 (seed 1)"


@pytest.mark.parametrize("status", ["failed", "interrupted", "running", "killed"])
def test_an_unfinished_run_is_said_and_not_averaged(write_run, report, status):
    for seed in range(3):
        write_run("relu", seed)
        write_run("polynorm", seed, (0.5, 0.9))
    state = {"state": status, "error": "NonFiniteError: step 2" if status == "failed" else None}
    write_run("polynorm", 3, (0.1,), steps=(2,), state=state, tail='{"step": 3, "trai')
    write_run("relu", 3)
    printed = report()
    why = r" \(NonFiniteError: step 2\)" if status == "failed" else ""
    said = rf"- Not in any mean or difference: polynorm/seed3 is {status} at step 2 of 4{why}\."
    assert re.search(said, printed)
    assert "No finished run of polynorm with seed 3" in printed
    assert cells(printed, "val/acc1 (last)")[2] == "0.9000 ± 0.0000 (3 runs)"
    assert cells(printed, "polynorm   | 3")[2:4] == [status, "2 of 4"]


def test_common_step_counts_unfinished_runs_where_all_have_been(write_run, report):
    write_run("relu", 0)
    write_run("polynorm", 0, (0.7,), steps=(2,), state={"state": "interrupted"})
    printed = report("--common-step")
    assert "All values are those at step 2," in printed
    assert "Not at its end: polynorm/seed0 is interrupted at step 2 of 4" in printed
    assert cells(printed, "polynorm   | val/acc1 (at step 2)")[2] == "+0.2000"
    assert cells(printed, "polynorm   | val/acc1 (best)")[2] == "+0.2000"  # not relu's 0.8 later


def test_other_step_counts_are_refused_or_said(write_run, report):
    write_run("relu", 0)
    longer = {"trainer__max_steps": 6, "state": {"total_steps": 6}}
    write_run("polynorm", 0, (0.5, 0.8, 0.9), steps=(2, 4, 6), **longer)
    error = report(code=2)
    assert error.startswith("polyvision: the settings of these runs differ")
    assert "steps: 6 in polynorm/seed0, 4 in relu/seed0" in error
    printed = report("--allow", "trainer.max_steps,steps")
    assert "- Settings differ, as allowed: steps: 6 in polynorm/seed0, 4 in relu/seed0." in printed


def test_another_recipe_is_refused(write_run, report):
    write_run("relu", 0)
    write_run("polynorm", 0, recipe__lr=0.5)
    assert "recipe.lr: 0.5 in polynorm/seed0, 0.1 in relu/seed0" in report(code=2)


def test_a_value_that_is_not_finite_is_said_and_not_averaged(write_run, report):
    for seed, value in enumerate((float("nan"), float("inf"), 0.9)):
        write_run("relu", seed)
        write_run("polynorm", seed, (0.5, value))
    printed = report()
    assert (
        "- val/acc1 (last) of polynorm, seed 0, 1, is not finite: it is in no mean and no "
        "difference." in printed
    )
    assert cells(printed, "val/acc1 (last)")[2] == "0.9000 (1 of 3 runs, the rest not finite)"
    assert cells(printed, "val/acc1 (best)")[2] == "0.6333 \u00b1 0.2309 (3 runs)"
    assert cells(printed, "polynorm   | val/acc1 (last)")[2] == "+0.1000"


def test_a_metric_that_is_never_finite(write_run, report):
    write_run("relu", 0)
    write_run("polynorm", 0, (float("nan"), float("nan")))
    assert cells(report(), "val/acc1 (last)")[2] == "not finite (1 run)"


def test_a_finished_run_without_metrics_is_said(write_run, report):
    write_run("relu", 0)
    (write_run("polynorm", 0) / "metrics.jsonl").unlink()
    printed = report()
    assert "- polynorm/seed0 is finished, but metrics.jsonl has no val/acc1." in printed
    assert cells(printed, "polynorm   | val/acc1 (last)")[5] == "no seed in common"


def test_without_a_finished_run_the_way_out_is_named(write_run, report):
    write_run("relu", 0, state={"state": "running"})
    assert "- No run has finished: --common-step compares them" in report()


def test_many_activations_and_seeds(write_run, report):
    for act in (f"act{i}" for i in range(10)):
        for seed in range(4):
            write_run(act, seed, (0.5, 0.6 + 0.01 * seed))
    assert "| 4 (seeds 0 to 3) |" in report()


def test_resumes_and_unreadable_lines_are_said(write_run, report):
    folder = write_run("relu", 0, state={"resumed_at": [2, 3]})
    path = folder / "metrics.jsonl"
    path.write_text("noise\n" + path.read_text())
    printed = report()
    assert "- relu/seed0: 1 lines of metrics.jsonl cannot be read." in printed
    assert cells(printed, "relu       | 0")[4] == "2, 3"
    assert "No other activation than relu was given." in printed


def test_costs(pairs, report):
    row = cells(report(), "polynorm   | 1,008")
    assert row == ["polynorm", "1,008", "1.0", "-", "103 ± 0 (3 runs)", "1.00x"]


def test_files_are_whole_and_the_page_needs_no_other(pairs, report, tmp_path):
    printed = report()
    out = tmp_path / "out"
    names = {"report.md", "report.html", "runs.csv", "differences.csv", "curves.png"}
    assert {path.name for path in out.iterdir()} == names
    assert printed.startswith((out / "report.md").read_text())
    page = (out / "report.html").read_text()
    assert re.findall(r'(?:src|href)="([^"]{22})', page) == ["data:image/png;base64,"]
    assert "http" not in page
    assert page.count("<table>") == page.count("</table>") == 4
    assert (out / "curves.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_an_output_that_cannot_be_written_is_named(pairs, report, tmp_path):
    (tmp_path / "out").touch()
    assert "--output: cannot write" in report(code=2)


def test_an_activation_with_no_finished_run_still_shows(write_run, report):
    write_run("relu", 0)
    write_run("polynorm", 0, (), state={"state": "running"})
    printed = report()
    assert cells(printed, "val/acc1 (last)")[1:] == ["0.8000 (1 run)", "-"]
    assert cells(printed, "polynorm   | val/acc1 (last)")[4:] == ["none", "no seed in common"]
    assert cells(printed, "polynorm   | 0")[2:4] == ["running", "0 of 4"]


def test_it_serves_in_a_program(pairs, tmp_path):
    comparison = compare([str(tmp_path / "runs")], baseline="polynorm")
    assert list(comparison.groups) == ["polynorm", "relu"]
    (row,) = [r for r in comparison.differences() if r.metric == "val/acc1 (last)"]
    assert (row.act, row.difference.seeds) == ("relu", (0, 1, 2))
