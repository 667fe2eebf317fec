"""Silence for what libraries say that does not concern a user of this project, or is said again."""

from __future__ import annotations

import functools
import logging
import threading
import warnings
from collections.abc import Callable

__all__ = ["quiet"]


def quiet() -> None:
    """Leave it out, in this process."""
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*LeafSpec.*is deprecated.*")
    # TaskModule writes the metrics of training, also those of the last step of a short run.
    warnings.filterwarnings("ignore", message=".*smaller than the logging interval.*")
    # What validation logs are sums over all ranks already.
    warnings.filterwarnings("ignore", message=r".*recommended to use `self\.log.*sync_dist")
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)
    if getattr(threading.excepthook, "func", None) is not _of_thread:
        threading.excepthook = functools.partial(_of_thread, threading.excepthook)


def _of_thread(
    otherwise: Callable[[threading.ExceptHookArgs], object], failed: threading.ExceptHookArgs
) -> None:
    """Leave out a file that TensorBoard's thread cannot write: the main thread raises it next."""
    of_writer = type(failed.thread).__module__.startswith("tensorboard.")
    if not (of_writer and issubclass(failed.exc_type, OSError)):
        otherwise(failed)
