"""What every analysis returns, and how it reaches JSON, PNG, TensorBoard and the terminal."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.image import imread

from polyvision.analysis.document import png
from polyvision.errors import PolyvisionError

__all__ = ["Result", "text_table"]


@dataclasses.dataclass(frozen=True)
class Result:
    """One analysis of one model at one moment.

    Attributes:
        kind: ``rank``, ``similarity``, ``cost`` or ``health``; names the files and tags.
        scalars: value by the rest of its tag; ``analysis/<kind>/`` goes before it.
        data: everything, as plain values.
        figure: what the PNG shows.
        text: a table for people.
    """

    kind: str
    scalars: dict[str, float]
    data: dict[str, Any]
    figure: Figure
    text: str

    @functools.cached_property
    def png(self) -> bytes:
        """The figure; drawing it takes most of the time of a small analysis, so once must do."""
        return png(self.figure, dpi=110)

    def tags(self) -> dict[str, float]:
        """Return the finite scalars under their whole tags."""
        finite = {name: value for name, value in self.scalars.items() if math.isfinite(value)}
        return {f"analysis/{self.kind}/{name}": value for name, value in finite.items()}

    def save(self, folder: Path, name: str | None = None) -> list[Path]:
        """Write ``<name>.json`` and ``<name>.png``; the name is the kind if none is given.

        Raises:
            PolyvisionError: the folder cannot be made or written.
        """
        stem = name or self.kind
        paths = [folder / f"{stem}.json", folder / f"{stem}.png"]
        content = {"kind": self.kind, "scalars": self.scalars, **self.data}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            paths[0].write_text(json.dumps(_plain(content), indent=1) + "\n", encoding="utf-8")
            paths[1].write_bytes(self.png)
        except OSError as error:
            raise PolyvisionError(f"cannot write to {folder}: {error.strerror}") from error
        return paths

    def log(self, writer: Any, step: int) -> None:
        """Write scalars and figure to a TensorBoard ``SummaryWriter``."""
        pixels = imread(io.BytesIO(self.png))  # (height, width, 4), from 0 to 1
        for tag, value in self.tags().items():
            writer.add_scalar(tag, value, step)
        writer.add_image(f"analysis/{self.kind}", pixels, step, dataformats="HWC")


def text_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Align rows under a header; numbers get four significant digits."""
    lines = [list(header), *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join(
        "  ".join(
            text.ljust(width) if i == 0 else text.rjust(width)
            for i, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _plain(value: Any) -> Any:
    """Round fractions to six digits; JSON has neither infinity nor nan: these become null."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return int(value) if value.is_integer() else float(f"{value:.6g}")
    return value
