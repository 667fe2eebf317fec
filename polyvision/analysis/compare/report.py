"""The tables and learning curves of a comparison, and what must be said beside them."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from polyvision.analysis.compare.pairing import (
    TRAIN_LOSS,
    Difference,
    Groups,
    best,
    final,
    mean,
    mid_rate,
    paired_difference,
)
from polyvision.analysis.compare.reading import Run, Series
from polyvision.analysis.document import Section, png
from polyvision.analysis.metrics import higher_is_better

__all__ = [
    "Comparison",
    "DifferenceRow",
    "curves_figure",
    "difference_words",
    "mean_and_band",
    "smooth",
    "spread",
]

_COLOURS = ("tab:gray", "tab:blue", "tab:red", "tab:green", "tab:purple", "tab:orange", "tab:cyan")
_STYLES = ("-", "--", ":", "-.")  # once all colours are taken
# A line of more points is smoothed over one part in this many.
_POINTS = 100
Measure = Callable[[Run], float | None]


@dataclasses.dataclass(frozen=True)
class DifferenceRow:
    """An activation beside the baseline in one metric."""

    act: str
    metric: str
    difference: Difference


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Runs of like settings, and how they are to be compared.

    Attributes:
        groups: activation -> seed -> run; the others are compared with the first activation.
        metrics: tags, the monitored one first.
        step: compare all runs at this step; None: finished runs at their end.
        notes: what was found before, one sentence each.
    """

    groups: Groups
    metrics: list[str]
    step: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def baseline(self) -> str:
        """The activation that the others are compared with."""
        return next(iter(self.groups))

    @cached_property
    def counted(self) -> Groups:
        """The runs that means and differences rest on."""
        everything = self.step is not None
        return {
            act: {seed: run for seed, run in seeds.items() if everything or run.finished}
            for act, seeds in self.groups.items()
        }

    @cached_property
    def measures(self) -> dict[str, tuple[str, Measure]]:
        """Label -> (tag, how it is taken from a run): final values, then best ones."""
        end = "last" if self.step is None else f"at step {self.step:,}"
        made: dict[str, tuple[str, Measure]] = {}
        for tag in self.metrics:
            what = "mean of the last tenth" if tag == TRAIN_LOSS else end
            made[f"{tag} ({what})"] = (tag, partial(final, tag=tag, step=self.step))
        for tag in self.metrics:
            if tag != TRAIN_LOSS and higher_is_better(tag) is not None:
                made[f"{tag} (best)"] = (tag, partial(best, tag=tag, step=self.step))
        return made

    def values(self, measure: Measure) -> dict[str, dict[int, float]]:
        """Return activation -> seed -> value, of the runs that count and have one."""
        return {act: _present(seeds, measure) for act, seeds in self.counted.items()}

    def differences(self) -> list[DifferenceRow]:
        """Return every activation beside the baseline, in every measure."""
        rows = []
        for label, (_, measure) in self.measures.items():
            values = self.values(measure)
            for act in values:
                if act != self.baseline:
                    difference = paired_difference(values[act], values[self.baseline])
                    rows.append(DifferenceRow(act, label, difference))
        return rows

    def sections(self) -> list[Section]:
        """Return the report."""
        notes = (*self.notes, *self._omissions())
        return [
            Section("Read this first", items=notes or ("All runs finished, and all seeds pair.",)),
            self._metric_section(),
            self._difference_section(),
            self._cost_section(),
            self._curve_section(),
            self._run_section(),
        ]

    def _omissions(self) -> list[str]:
        """Say which runs have not finished, and which seeds do not pair."""
        notes = []
        everything = [run for seeds in self.groups.values() for run in seeds.values()]
        for run in everything:
            if not run.finished:
                part = "Not in any mean or difference" if self.step is None else "Not at its end"
                why = f" ({run.error})" if run.error else ""
                notes.append(
                    f"{part}: {run.name} is {run.status} at step {run.step:,} of "
                    f"{run.total_steps:,}{why}."
                )
            elif final(run, self.metrics[0]) is None:
                notes.append(f"{run.name} is finished, but metrics.jsonl has no {self.metrics[0]}.")
            if run.unreadable_lines:
                count = run.unreadable_lines
                notes.append(f"{run.name}: {count} lines of metrics.jsonl cannot be read.")
        if self.step is None and not any(self.counted.values()):
            notes.append(
                "No run has finished: --common-step compares them at the last step that they share."
            )
        if self.step is not None:
            notes.append(
                f"All values are those at step {self.step:,}, the last at which every run was "
                f"validated; best ones are the best up to there."
            )
        notes += [
            f"{tag}: it is not known which way this metric improves, so it has no best value."
            for tag in self.metrics
            if higher_is_better(tag) is None
        ]
        seeds = sorted({run.seed for run in everything})
        for act, own in self.counted.items():
            missing = [str(seed) for seed in seeds if seed not in own]
            if missing:
                kind = "run" if self.step is not None else "finished run"
                notes.append(f"No {kind} of {act} with seed {', '.join(missing)}: no pair there.")
        for label, (_, measure) in self.measures.items():
            for act, values in self.values(measure).items():
                broken = [str(seed) for seed, v in values.items() if not math.isfinite(v)]
                if broken:
                    notes.append(
                        f"{label} of {act}, seed {', '.join(broken)}, is not finite: it is in no "
                        f"mean and no difference."
                    )
        return notes

    def _metric_section(self) -> Section:
        acts = list(self.counted)
        table = [("metric", *acts)]
        for label, (_, measure) in self.measures.items():
            values = self.values(measure)
            table.append((label, *(spread(values[act].values()) for act in acts)))
        return Section(
            "Metrics",
            (
                "Mean and standard deviation over the seeds, and how many there are. The best of "
                "many validations is a lucky one: compare last values where you can.",
            ),
            table=tuple(table),
        )

    def _difference_section(self) -> Section:
        header = ("activation", "metric", "difference", "95 % interval", "pairs", "says")
        rows = [header]
        for row in self.differences():
            tag = self.measures[row.metric][0]
            rows.append((row.act, row.metric, *_difference_cells(row.difference, tag)))
        return Section(
            f"Differences to {self.baseline}",
            (
                f"Each activation minus {self.baseline}, seed by seed; the interval is that of "
                f"Student's t over the pairs. Intervals hold one by one: among twenty, one misses "
                f"on average.",
            )
            + (() if len(rows) > 1 else (f"No other activation than {self.baseline} was given.",)),
            table=tuple(rows) if len(rows) > 1 else (),
        )

    def _cost_section(self) -> Section:
        rate_tag = "perf/samples_per_s"
        runs = [run for seeds in self.counted.values() for run in seeds.values()]
        if any("perf/tokens_per_s" in run.series for run in runs):
            rate_tag = "perf/tokens_per_s"
        rates = self.values(lambda run: mid_rate(run, rate_tag))
        peaks = self.values(lambda run: final(run, "perf/peak_memory_gib"))
        table = [
            (
                "activation",
                "parameters",
                "kept for backward, MiB a batch",
                "peak memory, GiB",
                rate_tag.removeprefix("perf/").replace("_per_s", " per second"),
                f"of {self.baseline}",
            )
        ]
        for act, seeds in self.groups.items():
            sizes = sorted({run.parameters for run in seeds.values()})
            kept = sorted({run.activation_bytes for run in seeds.values()})
            table.append(
                (
                    act,
                    " / ".join(f"{size:,}" for size in sizes),
                    " / ".join(f"{size / 2**20:.1f}" for size in kept),
                    spread(peaks[act].values(), "{:.2f}"),
                    spread(rates[act].values(), "{:,.0f}"),
                    _ratio(rates[act], rates[self.baseline]),
                )
            )
        return Section(
            "Cost",
            (
                "Bytes kept for the backward pass are computed, not measured. Peak memory is that "
                "of the tensors on a GPU, and of the whole process on a CPU. The rate of a run is "
                "the median of its measurements, and rates compare only on one quiet machine; the "
                "last column is the mean of the ratios, seed by seed.",
            ),
            table=tuple(table),
        )

    def _curve_section(self) -> Section:
        tags = list(dict.fromkeys([TRAIN_LOSS, "val/loss", self.metrics[0]]))
        return Section(
            "Learning curves",
            (
                "Thin lines are runs, thick ones the mean over the steps that all runs of the "
                "activation have, bands one standard deviation. Lines of more than 200 points are "
                "moving averages over a hundredth of them.",
            ),
            figure=("curves.png", png(curves_figure(self.groups, tags))),
        )

    def _run_section(self) -> Section:
        monitor = self.metrics[0]
        table = [
            ("activation", "seed", "status", "step", "resumed at")
            + (f"{monitor} last", f"{monitor} best", "folder")
        ]
        for act, seeds in self.groups.items():
            for seed, run in seeds.items():
                table.append(
                    (
                        act,
                        str(seed),
                        run.status,
                        f"{run.step:,} of {run.total_steps:,}",
                        ", ".join(map(str, run.resumed_at)) or "-",
                        _number(final(run, monitor)),
                        _number(best(run, monitor)),
                        str(run.folder),
                    )
                )
        return Section("Runs", table=tuple(table))


def _present(seeds: Mapping[int, Run], measure: Measure) -> dict[int, float]:
    values = {seed: measure(run) for seed, run in seeds.items()}
    return {seed: value for seed, value in values.items() if value is not None}


def spread(values: Iterable[float], form: str | None = None) -> str:
    """Write mean, standard deviation and count of the finite values; without a deviation for one.

    Args:
        values: one for each run.
        form: how a number is written, such as ``{:.2f}``; None: four decimals.
    """
    given = list(values)
    numbers = [value for value in given if math.isfinite(value)]
    runs = f"{len(given)} run{'s' if len(given) > 1 else ''}"
    if not numbers:
        return f"not finite ({runs})" if given else "-"
    if len(numbers) < len(given):
        runs = f"{len(numbers)} of {runs}, the rest not finite"
    write = _number if form is None else form.format
    if len(numbers) == 1:
        return f"{write(numbers[0])} ({runs})"
    std = statistics.stdev(numbers)
    return f"{write(statistics.fmean(numbers))} \u00b1 {write(std)} ({runs})"


def _number(value: float | None, sign: str = "") -> str:
    """Write four decimals, or four digits of large values."""
    if value is None:
        return "-"
    return f"{value:{sign}.4f}" if abs(value) < 100 else f"{value:{sign}.4g}"


def _difference_cells(difference: Difference, tag: str) -> tuple[str, str, str, str]:
    pairs = f"{len(difference.seeds)} ({_seed_words(difference.seeds)})"
    if not difference.seeds:
        return "-", "-", "none", "no seed in common"
    mean, interval = _number(difference.mean, "+"), difference.interval
    if interval is None:
        why = "one pair" if len(difference.seeds) == 1 else "equal differences"
        return mean, f"{why}: no interval", pairs, "not known"
    low, high = interval
    text = f"{_number(low, '+')} to {_number(high, '+')}"
    if not (low > 0 or high < 0):
        return mean, text, pairs, "not told apart"
    upwards = higher_is_better(tag)
    if upwards is None:
        return mean, text, pairs, "higher" if low > 0 else "lower"
    return mean, text, pairs, "better" if (low > 0) == upwards else "worse"


def difference_words(difference: Difference, tag: str) -> str:
    """Write a paired difference, its interval, and what both allow to say."""
    mean, interval, pairs, verdict = _difference_cells(difference, tag)
    return f"{mean} ({interval}; {pairs}): {verdict}"


def _seed_words(seeds: Sequence[int]) -> str:
    """Write ``seeds 0, 1``, and ``seeds 0 to 19`` for many in a row."""
    if len(seeds) > 3 and list(seeds) == list(range(seeds[0], seeds[-1] + 1)):
        return f"seeds {seeds[0]} to {seeds[-1]}"
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"


def _ratio(rates: Mapping[int, float], baseline: Mapping[int, float]) -> str:
    shared = [seed for seed in rates.keys() & baseline.keys() if baseline[seed] > 0]
    if not shared:
        return "-"
    return f"{mean([rates[seed] / baseline[seed] for seed in shared]):.2f}x"


def curves_figure(groups: Groups, tags: Sequence[str]) -> Figure:
    """Draw a panel per metric: runs as thin lines, means as thick ones, mean -+ std as a band.

    Args:
        groups: the runs, by activation and seed; the baseline comes first.
        tags: the metrics.
    """
    figure = Figure(figsize=(4.6 * len(tags), 3.8), layout="constrained")
    panels = figure.subplots(1, len(tags), squeeze=False)[0]
    for axes, tag in zip(panels, tags, strict=True):
        for i, (act, seeds) in enumerate(groups.items()):
            turn, colour = divmod(i, len(_COLOURS))
            style = _STYLES[turn % len(_STYLES)]
            _draw(axes, tag, act, list(seeds.values()), _COLOURS[colour], style)
        axes.set_xlabel("optimizer step")
        axes.set_title(tag, fontsize="medium")
        axes.grid(alpha=0.3)
    panels[0].legend(fontsize="small", ncols=1 + len(groups) // 9)
    return figure


def _draw(axes: Axes, tag: str, act: str, runs: Sequence[Run], colour: str, style: str) -> None:
    seen = (_finite(run.series.get(tag, {})) for run in runs)
    lines = [smooth(line) for line in seen if line]
    for line in lines:
        axes.plot(list(line), list(line.values()), color=colour, linewidth=0.6, alpha=0.6)
    steps, means, bands = mean_and_band(lines)
    label = f"{act} ({len(lines)} run{'s' if len(lines) != 1 else ''})"
    axes.plot(steps, means, style, color=colour, linewidth=1.8, label=label)
    if len(lines) > 1:
        low = [mean - band for mean, band in zip(means, bands, strict=True)]
        high = [mean + band for mean, band in zip(means, bands, strict=True)]
        axes.fill_between(steps, low, high, color=colour, alpha=0.2, linewidth=0)


def _finite(values: Series) -> Series:
    return {step: value for step, value in values.items() if math.isfinite(value)}


def mean_and_band(
    lines: Sequence[Series],
) -> tuple[list[int], list[float], list[float]]:
    """Return the steps that all lines have, the means there, and the standard deviations.

    Where a run has ended, the mean of the rest would jump: it ends there.
    """
    shared = sorted(set.intersection(*map(set, lines))) if lines else []
    values = [[line[step] for line in lines] for step in shared]
    bands = [statistics.stdev(each) if len(each) > 1 else 0.0 for each in values]
    return shared, [statistics.fmean(each) for each in values], bands


def smooth(values: Series) -> Series:
    """Return at each point the mean over the last hundredth of all; short lines stay the same."""
    window = max(1, len(values) // _POINTS)
    numbers = list(values.values())
    starts = (max(0, i + 1 - window) for i in range(len(numbers)))
    means = (statistics.fmean(numbers[start : i + 1]) for i, start in enumerate(starts))
    return dict(zip(values, means, strict=True))
