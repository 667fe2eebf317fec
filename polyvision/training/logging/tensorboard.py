"""TensorBoard: the events of a run, its row in the hparams tab, its text card, and overlay charts.

Everything that names or describes a run is written when it starts, so that a killed run has it too:
the hparams tab takes the metrics from the scalars themselves. Only how the run ended comes at the
end. TensorBoard keeps the first end it reads, so that one has a file of its own, which a resume
drops.

TensorBoard sorts groups of tags by name and opens the first two. So some groups have another name
there than in metrics.jsonl, and what opens is ``train`` and ``val``; coefficients come last.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.plugins.hparams import metadata
from tensorboard.plugins.hparams.api_pb2 import Status
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo
from torch.utils.tensorboard.summary import hparams
from torch.utils.tensorboard.writer import SummaryWriter

__all__ = ["Board", "TagWriter", "overlay_layout", "run_card", "tag_in_tensorboard"]

_END_SUFFIX = ".end"

# Group of tags in metrics.jsonl -> its name in TensorBoard, after "val" and "val_ema". Event files
# of earlier versions have the names on the left.
_GROUPS = {
    "analysis": "x_analysis",
    "optim": "x_optim",
    "perf": "x_perf",
    "router": "x_router",
    "act": "z_act",
}

# Charts that every run has, whatever its task: title -> tag.
_SHARED = {
    "training loss": "train/loss",
    "gradient norm": "optim/grad_norm",
    "learning rate": "optim/lr",
    "samples per second": "perf/samples_per_s",
}


def tag_in_tensorboard(tag: str) -> str:
    """Return the name that a tag of metrics.jsonl has in TensorBoard: ``act/x`` is ``z_act/x``."""
    group, slash, rest = tag.partition("/")
    return _GROUPS.get(group, group) + slash + rest


class TagWriter(SummaryWriter):
    """Writes scalars, images, figures and histograms under their names in TensorBoard."""

    def add_scalar(self, tag: str, *args: Any, **kwargs: Any) -> None:
        """Write a number."""
        super().add_scalar(tag_in_tensorboard(tag), *args, **kwargs)

    def add_image(self, tag: str, *args: Any, **kwargs: Any) -> None:
        """Write an image; ``add_figure`` ends here too."""
        super().add_image(tag_in_tensorboard(tag), *args, **kwargs)

    def add_histogram(self, tag: str, *args: Any, **kwargs: Any) -> None:
        """Write the distribution of values."""
        super().add_histogram(tag_in_tensorboard(tag), *args, **kwargs)


class Board(TensorBoardLogger):
    """TensorBoard events straight in the run folder.

    Args:
        folder: the run folder.
        purge_step: hide events from this step on, which an earlier, killed process wrote.
    """

    def __init__(self, folder: Path, purge_step: int | None) -> None:
        super().__init__(
            folder.parent,
            name="",
            version=folder.name,
            default_hp_metric=False,
            purge_step=purge_step,
        )
        self.folder = folder

    @property
    @rank_zero_experiment
    def experiment(self) -> SummaryWriter:
        """The writer of the first rank; the others have one that does nothing."""
        if self._experiment is None:
            self._experiment = TagWriter(str(self.folder), **self._kwargs)
        return self._experiment

    def save(self) -> None:
        """Flush; Lightning's own copy of the settings is not written: config.yaml has them."""
        self.experiment.flush()

    def describe(
        self, settings: Mapping[str, Any], metrics: Iterable[str], card: str, step: int
    ) -> None:
        """Write the run's row of the hparams tab and its text card; call it once, at the start.

        Args:
            settings: name -> text or number, the columns of the hparams tab.
            metrics: tags of scalars whose last values the tab shows.
            card: Markdown.
            step: the step that the run starts from.
        """
        for end in self.folder.glob(f"events.out.tfevents*{_END_SUFFIX}"):
            end.unlink()
        experiment, start, _ = hparams(  # type: ignore[no-untyped-call]
            {name: _utf8(value) for name, value in settings.items()},
            dict.fromkeys(map(tag_in_tensorboard, metrics), 0.0),
        )
        writer = self.experiment
        for summary in (experiment, start):
            writer.file_writer.add_summary(summary)
        writer.add_text("run", _utf8(card), step)
        writer.flush()

    def end(self, success: bool) -> None:
        """Tell the hparams tab how the run ended."""
        status = "STATUS_SUCCESS" if success else "STATUS_FAILURE"
        info = SessionEndInfo(status=Status.Value(status))
        content = HParamsPluginData(session_end_info=info, version=metadata.PLUGIN_DATA_VERSION)
        plugin = SummaryMetadata.PluginData(
            plugin_name=metadata.PLUGIN_NAME, content=content.SerializeToString()
        )
        value = Summary.Value(
            tag=metadata.SESSION_END_INFO_TAG, metadata=SummaryMetadata(plugin_data=plugin)
        )
        with SummaryWriter(str(self.folder), filename_suffix=_END_SUFFIX) as writer:
            writer.file_writer.add_summary(Summary(value=[value]))


def _utf8(value: Any) -> Any:
    """Return text as TensorBoard takes it; bytes that the locale cannot read are half pairs."""
    if not isinstance(value, str):
        return value
    return value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def overlay_layout(
    shown: Sequence[str], coefficients: Iterable[str]
) -> dict[str, dict[str, list[Any]]]:
    """Return the layout of the custom-scalars tab: one chart per tag, over all runs.

    TensorBoard merges the layouts of all runs, but adds charts only to categories of the first run.
    So every run has the same categories, be they empty.

    Args:
        shown: tags of the validation metrics.
        coefficients: names of activation coefficients, ``weight_1``; one chart holds all sites.
    """
    tags = _SHARED | {tag: tag for tag in shown}
    return {
        "training": {title: _chart(re.escape(tag)) for title, tag in tags.items()},
        "coefficients": {name: _chart(f"act/.*/{name}") for name in coefficients},
    }


def _chart(pattern: str) -> list[Any]:
    """Return a chart of the tags of a pattern, also as earlier versions named their groups."""
    shown = tag_in_tensorboard(pattern)
    return ["Multiline", [f"({shown}|{pattern})$" if shown != pattern else f"{pattern}$"]]


def run_card(environment: Mapping[str, Any], plan: Iterable[tuple[str, str]]) -> str:
    """Describe a run in Markdown: its command, its plan and where it runs.

    Args:
        environment: the content of ``environment.json``.
        plan: labelled lines.
    """
    rest = {key: value for key, value in environment.items() if key != "command"}
    rows = [*plan, *((key, _text(value)) for key, value in rest.items())]
    table = "\n".join(f"| {label} | {text.replace('|', '&#124;')} |" for label, text in rows)
    return f"    {shlex.join(environment['command'])}\n\n| | |\n|---|---|\n{table}\n"


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {inner}" for key, inner in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "unknown" if value is None else str(value)
