"""Groups by activation, values of runs, and differences paired by seed."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

from scipy.special import stdtrit

from polyvision.analysis.compare.reading import Run
from polyvision.analysis.metrics import higher_is_better
from polyvision.errors import PolyvisionError, unknown

__all__ = [
    "TRAIN_LOSS",
    "Difference",
    "Groups",
    "baseline_of",
    "best",
    "common_step",
    "final",
    "group_runs",
    "mean",
    "metrics_of",
    "mid_rate",
    "paired_difference",
]

Groups = Mapping[str, Mapping[int, Run]]
TRAIN_LOSS = "train/loss"


@dataclasses.dataclass(frozen=True)
class Difference:
    """An activation minus the baseline, over the seeds that both have.

    Attributes:
        seeds: the seeds, ascending.
        values: one difference for each.
    """

    seeds: tuple[int, ...]
    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The mean difference."""
        return statistics.fmean(self.values)

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % confidence interval of the mean; None with fewer than two different values.

        mean -+ t s / sqrt(n), with s the standard deviation of the n differences and t the 97.5 %
        quantile of Student's distribution with n - 1 degrees of freedom (Student 1908,
        https://doi.org/10.1093/biomet/6.1.1). It holds if the differences are normal.
        Accuracies of small sets come in few values: equal differences would give no width at all.
        """
        n = len(self.values)
        std = statistics.stdev(self.values) if n > 1 else 0.0
        if std <= 1e-9 * max(map(abs, self.values), default=0.0):
            return None
        half = float(stdtrit(n - 1, 0.975)) * std / math.sqrt(n)
        return self.mean - half, self.mean + half


def group_runs(runs: Sequence[Run]) -> tuple[dict[str, dict[int, Run]], list[str]]:
    """Sort runs by activation and seed; of several with both the same, one that finished counts.

    If several finished, or none did, it is the last of them.

    Returns:
        activation -> seed -> run, and one sentence for each run left out.
    """
    groups: dict[str, dict[int, Run]] = {}
    notes = []
    for run in runs:
        seeds = groups.setdefault(run.act, {})
        other = seeds.get(run.seed)
        if other is None:
            seeds[run.seed] = run
            continue
        kept, dropped = (run, other) if run.finished >= other.finished else (other, run)
        seeds[run.seed] = kept
        notes.append(
            f"Left out: {dropped.folder} ({dropped.status}), since {kept.folder} ({kept.status}) "
            f"has the same activation and seed."
        )
    return {act: dict(sorted(seeds.items())) for act, seeds in groups.items()}, notes


def baseline_of(groups: Groups, asked: str | None) -> str:
    """Return the activation that the others are compared with: ``asked``, ReLU, or the first.

    Raises:
        PolyvisionError: no run has the activation ``asked``.
    """
    if asked is not None and asked not in groups:
        raise unknown("baseline", asked, groups)
    return asked or ("relu" if "relu" in groups else next(iter(groups)))


def metrics_of(runs: Sequence[Run]) -> list[str]:
    """Return the metrics to compare: the monitored one first, then the other validation metrics."""
    tags = dict.fromkeys(run.monitor for run in runs)
    if len(tags) > 1:
        raise PolyvisionError(
            f"these runs are judged by different metrics ({', '.join(tags)}): compare runs of one "
            f"task"
        )
    tags |= dict.fromkeys(tag for run in runs for tag in run.series if tag.startswith("val/"))
    return [*tags, TRAIN_LOSS]


def final(run: Run, tag: str, step: int | None = None) -> float | None:
    """Return the last value of a metric, or the last one up to ``step``.

    The training loss, which is that of single steps, is the mean over the last tenth of them.
    """
    values = _until(run, tag, step)
    if not values:
        return None
    last = max(values)
    if tag == TRAIN_LOSS:
        return mean([value for at, value in values.items() if at > 0.9 * last or at == last])
    return values[last]


def mean(values: Sequence[float]) -> float:
    """Return the mean; with a value that is not finite it is not finite, and never an error."""
    return statistics.fmean(values) if all(map(math.isfinite, values)) else sum(values)


def best(run: Run, tag: str, step: int | None = None) -> float | None:
    """Return the best finite value of a metric over all validations (up to ``step``).

    None where there is no value, or the direction of the metric is not known.
    """
    upwards = higher_is_better(tag)
    if upwards is None:
        return None
    values = [value for value in _until(run, tag, step).values() if math.isfinite(value)]
    return (max if upwards else min)(values, default=None)


def _until(run: Run, tag: str, step: int | None) -> dict[int, float]:
    values = run.series.get(tag, {})
    return {at: value for at, value in values.items() if step is None or at <= step}


def mid_rate(run: Run, tag: str) -> float | None:
    """Return the median of the measurements of a rate; None if there are none."""
    values = run.series.get(tag, {})
    return statistics.median(values.values()) if values else None


def common_step(runs: Sequence[Run]) -> int:
    """Return the last step at which every run was validated.

    Raises:
        PolyvisionError: there is none.
    """
    validated = [set(run.series.get(run.monitor, {})) for run in runs]
    shared = set.intersection(*validated)
    if not shared:
        ends = zip(runs, validated, strict=True)
        steps = ", ".join(f"{run.name} last at {max(each, default='none')}" for run, each in ends)
        raise PolyvisionError(f"--common-step: no step at which every run was validated: {steps}")
    return max(shared)


def paired_difference(values: Mapping[int, float], baseline: Mapping[int, float]) -> Difference:
    """Subtract the baseline's value from that of the same seed, where both are finite.

    Args:
        values: seed -> value of an activation.
        baseline: seed -> value of the baseline.
    """
    shared = sorted(values.keys() & baseline.keys())
    seeds = tuple(s for s in shared if math.isfinite(values[s]) and math.isfinite(baseline[s]))
    return Difference(seeds, tuple(values[seed] - baseline[seed] for seed in seeds))
