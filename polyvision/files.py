"""Where files of the user lie that more than one package needs."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cache_folder"]


def cache_folder() -> Path:
    """Return ``$POLYVISION_CACHE``, else ``polyvision`` in ``$XDG_CACHE_HOME`` or ``~/.cache``.

    A leading ``~`` in a variable is the home folder: a shell expands it in ``X=~/c command``, but
    not inside quotes, nor do files of environment variables.
    """
    own = os.environ.get("POLYVISION_CACHE")
    if own:
        return Path(os.path.expanduser(own))
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expanduser(base)) / "polyvision"
