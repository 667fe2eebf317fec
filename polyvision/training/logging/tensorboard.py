"""TensorBoard: the events of a run, its row in the hparams tab, its text card, and overlay charts.

Everything that names or describes a run is written when it starts, so that a killed run has it too:
the hparams tab takes the metrics from the scalars themselves. Only how the run ended comes at the
end. TensorBoard keeps the first end it reads, so that one has a file of its own, which a resume
drops.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.plugins.hparams import metadata
from tensorboard.plugins.hparams.api_pb2 import Status
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo
from torch.utils.tensorboard.summary import hparams
from torch.utils.tensorboard.writer import SummaryWriter

__all__ = ["Board", "overlay_layout", "run_card"]

_END_SUFFIX = ".end"

# Charts that every run has, whatever its task: title -> tag.
_SHARED = {
    "training loss": "train/loss",
    "gradient norm": "optim/grad_norm",
    "learning rate": "optim/lr",
    "samples per second": "perf/samples_per_s",
}


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
            {name: _utf8(value) for name, value in settings.items()}, dict.fromkeys(metrics, 0.0)
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
        "training": {title: ["Multiline", [f"{re.escape(t)}$"]] for title, t in tags.items()},
        "coefficients": {name: ["Multiline", [rf"act/.*/{name}$"]] for name in coefficients},
    }


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
