"""Checkpoint files that are whole or absent, and hold plain types only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from polyvision.files import whole_file
from polyvision.models.weights.files import read_tensor_file

__all__ = ["AtomicCheckpointIO", "rescale_progress"]


class AtomicCheckpointIO(TorchCheckpointIO):
    """Write beside the target, flush to the disk, then rename: a kill leaves the previous file."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        """Save ``checkpoint`` at ``path``."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with whole_file(target) as partial, partial.open("wb") as file:
                torch.save(checkpoint, file)  # a file, not its name, which would go into the file
        except (OSError, RuntimeError) as error:
            # torch closes the archive after a failed write, and that fails in words of its own.
            raise _first_cause(error, target) from error

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Callable[..., Any] | None = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load a checkpoint; never runs code from the file.

        Raises:
            PolyvisionError: the file is not a checkpoint, or is damaged.
        """
        loaded: dict[str, Any] = read_tensor_file(path, what="a checkpoint")
        return loaded


def rescale_progress(loops: dict[str, Any], then: int, now: int) -> None:
    """Rewrite Lightning's progress in a checkpoint for another number of passes in a step.

    The loader keeps its place in samples, which needs no change; Lightning counts passes.

    Args:
        loops: the checkpoint's entry ``loops``, which is changed.
        then: passes of an optimizer step when it was written.
        now: passes from now on.
    """
    progress = loops["fit_loop"]["epoch_loop.batch_progress"]
    for counts in (progress["total"], progress["current"]):
        for name, passes in counts.items():
            steps, rest = divmod(passes, then)
            assert not rest, "a checkpoint lies between two steps"
            counts[name] = steps * now


def _first_cause(error: Exception, target: Path) -> Exception:
    """Return the failed write behind ``error``, with the name of the file."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError):
            return OSError(cause.errno, cause.strerror, str(target))
        cause = cause.__context__
    return error
