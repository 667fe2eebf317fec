"""The processes of a distributed run: what ends it is the first error of any of them.

When one of them ends, the others fail too, in words about a lost connection, or wait for it without
an end. So a further rank leaves its error in the run folder instead of printing it, and the first
rank says what came first. Lightning would kill the first rank when another one ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

# Its functions take the process group that exists at its import as their default, and DDP imports
# it. Imported here, before there is a group, it keeps none alive after `leave_group`.
import torch.distributed.nn.functional  # noqa: F401
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

from polyvision.errors import PolyvisionError
from polyvision.training.run.folder import FOLDER_VARIABLE, write_json
from polyvision.training.signals import describe_code

__all__ = [
    "RankError",
    "Ranks",
    "Watch",
    "end_with_the_first",
    "leave_error",
    "leave_group",
    "watched",
]

_POLL_SECONDS = 0.1
# For the first rank to come out of what it is doing when another one has ended.
_PATIENCE_SECONDS = 10.0
_PATIENCE_WITH_A_SAVE_SECONDS = 600.0


class RankError(PolyvisionError):
    """The error of another rank than the first one, which says it.

    Args:
        rank: whose error it is.
        text: its text.
        kind: the name of its class; None where the text begins with it or there was no error.
        code: the exit code that belongs to it.
        details: the traceback of an error that is no user's mistake.
    """

    def __init__(
        self, rank: int, text: str, kind: str | None = None, code: int = 1, details: str = ""
    ) -> None:
        super().__init__(f"rank {rank}: {text}")
        self.rank = rank
        self.kind = kind
        self.code = code
        self.details = details


class _Process(Protocol):
    """What ``Watch`` needs of a child process."""

    def poll(self) -> int | None:
        """Return the exit code, minus the signal that ended it, or None while it runs."""


@dataclasses.dataclass(frozen=True, order=True)
class _Failure:
    """An error and its place among those of all ranks; what ended a run comes first."""

    place: int
    time: float
    error: RankError = dataclasses.field(compare=False)


# A lost connection follows from the end of another process. Such an end without a word may follow
# from an error too: NCCL aborts.
_OWN, _SILENT, _LOST = range(3)


def _place(error: BaseException) -> int:
    if isinstance(error, PolyvisionError):
        return _OWN
    lost = isinstance(error, dist.DistError) or "gloo" in str(error) or "NCCL" in str(error)
    return _LOST if lost else _OWN


def _report_of(folder: Path, rank: int) -> Path:
    return folder / f".rank{rank}.error"


def leave_error(error: BaseException) -> None:
    """Leave the error of this rank, which is not the first, for that one to say."""
    user = isinstance(error, PolyvisionError)
    report = {
        "place": _place(error),
        "time": time.time(),
        "text": str(error) if user else " ".join(f"{type(error).__name__}: {error}".split()),
        "kind": type(error).__name__ if user else None,
        "code": 2 if user else 1,
        "details": "" if user else "".join(traceback.format_exception(error)),
    }
    folder = Path(os.environ[FOLDER_VARIABLE])
    with contextlib.suppress(OSError):  # the first rank sees at least that this one has ended
        write_json(_report_of(folder, int(os.environ["LOCAL_RANK"])), report)


def end_with_the_first() -> None:
    """End this rank, which is not the first, when that one is gone: it might wait for ever."""
    first = os.getppid()

    def follow() -> None:
        while os.getppid() == first:
            time.sleep(1)
        os._exit(1)

    if os.name == "posix":
        threading.Thread(target=follow, daemon=True).start()


def leave_group() -> None:
    """Destroy the process group of a finished run, so that gloo's threads end before the process.

    One that still frees a tensor while the interpreter shuts down aborts the process.
    """
    if dist.is_available() and dist.is_initialized():
        gc.collect()  # DDP holds the group, and reference cycles hold DDP
        dist.destroy_process_group()


class Watch:
    """The first rank's view of the others.

    Args:
        folder: the run folder.
        ended: called from another thread when a rank has ended and this one waits for it without
            an end.
        saving: tells whether a checkpoint is being written, which may take its time.
    """

    def __init__(
        self, folder: Path, ended: Callable[[RankError], None], saving: Callable[[], bool]
    ) -> None:
        self.folder = folder
        self._ended = ended
        self._saving = saving
        self._processes: list[_Process] = []
        self._silent_since: dict[int, float] = {}
        self._closed = threading.Event()
        self._forget()

    def begin(self, processes: Sequence[_Process]) -> None:
        """Watch these processes, of ranks 1, 2, ..., until ``close``."""
        self._processes = list(processes)
        threading.Thread(target=self._look, daemon=True).start()

    def close(self) -> None:
        """Watch no more."""
        self._closed.set()
        self._forget()

    def instead_of(self, error: BaseException) -> RankError | None:
        """Return what came before ``error`` of this rank, and so is what ended the run.

        If that is a lost connection, another rank has ended, and how will be seen in a moment.
        """
        place, now = _place(error), time.time()
        until = time.monotonic() + (_PATIENCE_SECONDS if place == _LOST else 0.0)
        while True:
            first = self._first()
            if first is not None and first.place < _LOST:
                break
            if time.monotonic() >= until:
                break
            time.sleep(_POLL_SECONDS)
        return (
            first.error if first is not None and (first.place, first.time) < (place, now) else None
        )

    def _look(self) -> None:
        while not self._closed.wait(_POLL_SECONDS):
            if self._first() is None:
                continue
            seen = time.monotonic()
            while not self._closed.wait(_POLL_SECONDS):
                patience = _PATIENCE_WITH_A_SAVE_SECONDS if self._saving() else _PATIENCE_SECONDS
                first = self._first()
                if first is not None and time.monotonic() - seen > patience:
                    self._ended(first.error)
                    return
            return

    def _first(self) -> _Failure | None:
        found = []
        for rank, process in enumerate(self._processes, start=1):
            code = process.poll()
            try:
                report: dict[str, Any] = json.loads(
                    _report_of(self.folder, rank).read_text(encoding="utf-8")
                )
            except FileNotFoundError:
                if not code:
                    continue
                how = describe_code(code if code > 0 else 128 - code)
                text = f"the process ended with {how}"
                since = self._silent_since.setdefault(rank, time.time())
                found.append(_Failure(_SILENT, since, RankError(rank, text)))
            else:
                place, when = report.pop("place"), report.pop("time")
                found.append(_Failure(place, when, RankError(rank, **report)))
        return min(found, default=None)

    def _forget(self) -> None:
        for report in self.folder.glob(".rank*.error"):
            with contextlib.suppress(OSError):
                report.unlink()


@contextlib.contextmanager
def watched(trainer: Trainer, watch: Watch) -> Iterator[None]:
    """Raise the first error of any rank in the first one, and leave no other rank behind."""
    launcher = trainer.strategy.launcher
    if not isinstance(launcher, _Launcher) or not trainer.is_global_zero:
        yield
        return
    launcher.started = watch.begin
    try:
        yield
    except Exception as error:
        other = watch.instead_of(error)
        launcher.kill(signal.SIGTERM if sys.platform == "win32" else signal.SIGKILL)
        if other is None:
            raise
        raise other from None
    finally:
        watch.close()


class Ranks(DDPStrategy):
    """Lightning's DDP with processes of this program, which ``watched`` watches."""

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self._launcher = _Launcher(self.cluster_environment, self.num_processes, self.num_nodes)


class _Launcher(_SubprocessScriptLauncher):
    """Lightning's launcher, whose own watch gets nothing to see."""

    started: Callable[[Sequence[_Process]], None] = staticmethod(lambda processes: None)
    _ranks: Sequence[Any] = ()

    def _call_children_scripts(self) -> None:
        super()._call_children_scripts()
        self._ranks, self.procs = self.procs, []
        self.started(self._ranks)

    def kill(self, signum: Any) -> None:
        """Send a signal to the further ranks."""
        for process in self._ranks:
            process.send_signal(signum)
