"""Silence for hints of Lightning that do not concern a user of this project."""

from __future__ import annotations

import logging
import warnings

__all__ = ["quiet"]


def quiet() -> None:
    """Leave them out, in this process."""
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*LeafSpec.*is deprecated.*")
    # TaskModule writes the metrics of training, also those of the last step of a short run.
    warnings.filterwarnings("ignore", message=".*smaller than the logging interval.*")
    # What validation logs are sums over all ranks already.
    warnings.filterwarnings("ignore", message=r".*recommended to use `self\.log.*sync_dist")
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)
