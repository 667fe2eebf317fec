"""Training images that were left out because they cannot be read, counted over all processes."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from pathlib import Path

import torch

from polyvision.data.images.decode import UnreadableImageError, decode_image
from polyvision.data.images.source import Source
from polyvision.errors import PolyvisionError

__all__ = ["SkippedImages"]

_log = logging.getLogger(__name__)


class SkippedImages:
    """The unreadable images of a training set: each counts once, and too many are an error.

    The loader processes of one training process share them. A file makes them known to the
    training processes of the other devices, and to a run that is resumed.

    Args:
        source: the images.
        limit: how many may be skipped.
    """

    def __init__(self, source: Source, limit: int) -> None:
        self.source = source
        self.limit = limit
        self.file: Path | None = None
        self._skipped = torch.zeros(len(source), dtype=torch.bool)
        self._skipped.share_memory_()  # type: ignore[no-untyped-call]

    def keep_in(self, file: Path) -> None:
        """Share what is skipped through ``file``, one line of JSON for each image.

        Before workers start: they would not hear of it.
        """
        self.file = file

    def forget_repaired(self) -> None:
        """Take images that can be read again off the list of an earlier part of the run.

        By one process, before others use the file.
        """
        listed = self._read()
        if self.file is None or not listed or self.source.labels() is None:  # not to be read here
            return
        self.file.unlink()
        for index in listed:
            try:
                decode_image(self.source.read(index)[0])
            except (UnreadableImageError, OSError) as error:
                self._write(index, error)

    def add(self, index: int, error: Exception) -> None:
        """Count an image.

        Raises:
            PolyvisionError: there are more than the limit, in all processes together.
        """
        if self._skipped[index]:
            return
        self._skipped[index] = True
        if index not in self._read():
            self._write(index, error)
        known = self._indices()
        name = self.source.name(index)
        if len(known) > self.limit:
            where = f" ({self.file} lists them)" if self.file else ""
            raise PolyvisionError(
                f"{len(known)} training images cannot be read, more than max_unreadable="
                f"{self.limit}{where}; the last is {name}: {error}. Repair or remove them, or "
                "raise the limit."
            ) from error
        _log.warning("skipped unreadable training image %d: %s: %s", len(known), name, error)

    def names(self) -> list[str]:
        """Name the images skipped so far, in all processes, in the order of the data set."""
        return [self.source.name(index) for index in sorted(self._indices())]

    def _indices(self) -> set[int]:
        own = self._skipped.nonzero().flatten().tolist()
        return {*own, *self._read()}

    def _read(self) -> list[int]:
        if self.file is None:
            return []
        try:
            lines = self.file.read_text(encoding="utf-8").splitlines()
        except OSError:
            return []
        found = []
        for line in lines:
            with contextlib.suppress(ValueError, KeyError, TypeError):  # a line cut off by a kill
                found.append(int(json.loads(line)["index"]))
        return [index for index in found if 0 <= index < len(self._skipped)]

    def _write(self, index: int, error: Exception) -> None:
        if self.file is None:
            return
        entry = {"index": index, "image": self.source.name(index), "reason": str(error)}
        line = f"{json.dumps(entry)}\n".encode()
        # A full disk must not end training here: this process still counts the image.
        with contextlib.suppress(OSError):
            descriptor = os.open(self.file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                os.write(descriptor, line)  # in one piece: other processes append too
            finally:
                os.close(descriptor)
