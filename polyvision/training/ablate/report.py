"""The report of an ablation: what was asked, what the paper says, what these runs say."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from polyvision.analysis.compare.command import compare, data_name, settings_line, tables
from polyvision.analysis.compare.pairing import TRAIN_LOSS
from polyvision.analysis.compare.reading import Run
from polyvision.analysis.compare.report import Comparison, difference_words, spread
from polyvision.analysis.document import Section, png, write_report
from polyvision.errors import PolyvisionError
from polyvision.training.ablate.plan import Planned
from polyvision.training.ablate.studies import Study

__all__ = ["coefficient_section", "report", "scaling_section"]

_COLOURS = ("tab:blue", "tab:red", "tab:green", "tab:purple", "tab:orange", "tab:cyan")


def report(
    study: Study, planned: Sequence[Planned], failed: Sequence[str], folder: Path, *, jobs: int
) -> str:
    """Compare the runs, write the report to ``folder``, and return its Markdown.

    Args:
        study: the study.
        planned: its runs.
        failed: a sentence for each run that failed.
        folder: where the report goes.
        jobs: how many runs went on at a time.

    Raises:
        PolyvisionError: no run got as far as its first step, or the folder cannot be written.
    """
    notes = [f"Failed: {line}." for line in failed]
    if jobs > 1:
        notes.append(f"{jobs} runs were trained at a time: their rates do not compare.")
    comparisons = _comparisons(planned, notes)
    first = next(iter(comparisons.values()))
    several = len(comparisons) > 1
    sections = [_answer_section(study, comparisons)]
    files: dict[str, str] = {}
    if study.sizes:
        sections.append(scaling_section(comparisons))
    if study.finding is None:
        sections.append(coefficient_section(first))
    for model, comparison in comparisons.items():
        mark = f"{model}-" if several else ""
        sections += [_marked(each, model) if several else each for each in comparison.sections()]
        files |= {f"{mark}{name}": text for name, text in tables(comparison).items()}
    acts = ", ".join(dict.fromkeys(each.config.act.label for each in planned))
    title = f"{study.title} ({study.source}): {acts} on {data_name(first)}"
    return write_report(folder, title, settings_line(first), sections, files)


def _comparisons(planned: Sequence[Planned], notes: Sequence[str]) -> dict[str, Comparison]:
    """Compare the runs of each model; what is missing is a note of the first."""
    found: dict[str, Comparison] = {}
    notes = [*notes]
    models: dict[str, list[Planned]] = {}
    for each in planned:
        models.setdefault(each.config.model.name, []).append(each)
    for model, runs in models.items():
        begun = [each for each in runs if (each.run.folder / "state.json").exists()]
        acts = {each.config.act.label for each in begun}
        for act in dict.fromkeys(each.config.act.label for each in runs):
            if act not in acts:
                notes.append(f"No run of {model} with {act} got as far as its first step.")
        if not begun:
            continue
        baseline = runs[0].config.act.label
        comparison = compare(
            [str(each.run.folder) for each in begun],
            baseline=baseline if baseline in acts else None,
        )
        found[model] = dataclasses.replace(comparison, notes=(*notes, *comparison.notes))
        notes = []
    if not found:
        raise PolyvisionError("\n".join(["no run got as far as its first step:", *notes]))
    return found


def _marked(section: Section, model: str) -> Section:
    """Name the model in a section that comes once for each."""
    figure = section.figure and (f"{model}-{section.figure[0]}", section.figure[1])
    return dataclasses.replace(section, title=f"{model}: {section.title}", figure=figure)


def _answer_section(study: Study, comparisons: Mapping[str, Comparison]) -> Section:
    """Set the question and the paper's finding beside what the paired differences allow to say."""
    paper = (
        "The paper draws no conclusion on this."
        if study.finding is None
        else f"The paper, at 1.3B parameters and without a number of runs: {study.finding}."
    )
    if study.sizes:
        paper = f"The paper, without a number of runs: {study.finding}."
    items = []
    for model, comparison in comparisons.items():
        shown = (TRAIN_LOSS, comparison.metrics[0])
        for row in comparison.differences():
            tag = comparison.measures[row.metric][0]
            if tag in shown and not row.metric.endswith("(best)"):
                words = difference_words(row.difference, tag)
                where = f"{model}, " if len(comparisons) > 1 else ""
                items.append(
                    f"{where}{row.act} against {comparison.baseline}, {row.metric}: {words}"
                )
    return Section(
        "The question",
        (
            f"{study.question} {paper}",
            "Below, differences are paired by seed, with their 95 % interval. Where the interval "
            "holds 0 there is no claim. A small model after few steps need not rank as a large one "
            "after many.",
        ),
        items=tuple(items),
    )


def scaling_section(comparisons: Mapping[str, Comparison]) -> Section:
    """Draw final training and validation loss over the number of parameters.

    Args:
        comparisons: model -> its runs.
    """
    first = next(iter(comparisons.values()))
    labels = [
        label
        for label, (tag, _) in first.measures.items()
        if tag in (TRAIN_LOSS, first.metrics[0]) and not label.endswith("(best)")
    ]
    acts = list(dict.fromkeys(act for each in comparisons.values() for act in each.groups))
    figure = Figure(figsize=(4.6 * len(labels), 3.8), layout="constrained")
    panels = figure.subplots(1, len(labels), squeeze=False)[0]
    rows = [("model", "activation", "parameters", *labels)]
    for model, comparison in comparisons.items():
        for act, seeds in comparison.groups.items():
            cells = (spread(_values(comparison, act, label)) for label in labels)
            rows.append((model, act, f"{next(iter(seeds.values())).parameters:,}", *cells))
    for axes, label in zip(panels, labels, strict=True):
        for act, colour in zip(acts, _COLOURS, strict=False):
            points = [
                (next(iter(each.groups[act].values())).parameters, _values(each, act, label))
                for each in comparisons.values()
                if act in each.groups and _values(each, act, label)
            ]
            for size, values in points:
                axes.plot([size] * len(values), values, ".", color=colour, markersize=4, alpha=0.6)
            means = [statistics.fmean(values) for _, values in points]
            axes.plot([size for size, _ in points], means, color=colour, linewidth=1.5, label=act)
        axes.set_xscale("log")
        axes.set_xlabel("parameters")
        axes.set_title(label, fontsize="medium")
        axes.grid(alpha=0.3, which="both")
    panels[0].legend(fontsize="small")
    return Section(
        "Scaling curves",
        ("Points are runs, lines go through the means. Parameters include the embeddings.",),
        table=tuple(rows),
        figure=("scaling.png", png(figure)),
    )


def _values(comparison: Comparison, act: str, label: str) -> list[float]:
    measure = comparison.measures[label][1]
    return list(comparison.values(measure).get(act, {}).values())


def coefficient_section(comparison: Comparison) -> Section:
    """Show where the coefficients of each site started and where they ended, over the seeds.

    Args:
        comparison: runs of activations with coefficients; the others are left out.
    """
    drawn: dict[str, dict[str, dict[str, list[tuple[float, float]]]]] = {}
    for act, seeds in comparison.counted.items():
        sites: dict[str, dict[str, list[tuple[float, float]]]] = {}
        for run in seeds.values():
            for (site, name), ends in _coefficients(run).items():
                sites.setdefault(site, {}).setdefault(name, []).append(ends)
        if sites:
            drawn[act] = sites
    names = sorted({n for sites in drawn.values() for site in sites.values() for n in site})
    names.sort(key=lambda name: name == "bias")
    rows = [("activation", "site", *(_symbol(name) for name in names))]
    for act, sites in drawn.items():
        start = {n: v[0][0] for site in sites.values() for n, v in site.items()}
        rows.append((act, "start", *(f"{start[n]:.4f}" if n in start else "-" for n in names)))
        for site, own in sites.items():
            cells = (spread([end for _, end in own[n]]) if n in own else "-" for n in names)
            rows.append((act, site, *cells))
    return Section(
        "Coefficients",
        (
            "For each site the values after training: mean and standard deviation over the seeds. "
            "a_i multiplies the power i, a_0 is the constant. The figure has the sites in the "
            "order of the network; dotted lines are the start.",
        ),
        table=tuple(rows) if drawn else (),
        figure=("coefficients.png", png(_coefficient_figure(drawn, names))) if drawn else None,
    )


def _coefficients(run: Run) -> dict[tuple[str, str], tuple[float, float]]:
    """Return (site, coefficient) -> first and last value."""
    found = {}
    for tag, values in run.series.items():
        if tag.startswith("act/") and values:
            site, _, name = tag.removeprefix("act/").rpartition("/")
            numbers = list(values.values())
            found[site, name] = numbers[0], numbers[-1]
    return found


def _symbol(name: str) -> str:
    return "a_0" if name == "bias" else name.replace("weight_", "a_")


def _coefficient_figure(
    drawn: Mapping[str, Mapping[str, Mapping[str, list[tuple[float, float]]]]], names: Sequence[str]
) -> Figure:
    figure = Figure(figsize=(3.6 * len(drawn), 3.4), layout="constrained")
    panels = figure.subplots(1, len(drawn), squeeze=False, sharey=True)[0]
    for axes, (act, sites) in zip(panels, drawn.items(), strict=True):
        for name, colour in zip(names, _COLOURS * len(names), strict=False):
            own = [(i, site[name]) for i, site in enumerate(sites.values(), 1) if name in site]
            if not own:
                continue
            places = [i for i, _ in own]
            ends = [[end for _, end in values] for _, values in own]
            axes.plot(
                places, [statistics.fmean(v) for v in ends], color=colour, label=_symbol(name)
            )
            for place, values in zip(places, ends, strict=True):
                axes.plot([place] * len(values), values, ".", color=colour, markersize=4, alpha=0.6)
            starts = [values[0][0] for _, values in own]
            axes.plot(places, starts, ":", color=colour, linewidth=0.9)
        axes.set_title(act, fontsize="medium")
        axes.set_xlabel("site")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    return figure
