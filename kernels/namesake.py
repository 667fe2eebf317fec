"""Steps aside for the package that owns the name ``kernels``.

This folder lies at the top of the repository, so a program started there finds it before an
installed package of that name. Libraries that look for that one, transformers among them, import
names from it that are not here, and some versions fail when they are missing.
"""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

__all__ = ["step_aside"]

_ROOT = Path(__file__).resolve().parent.parent


def step_aside() -> None:
    """Put the installed package ``kernels``, if there is one, in the place of this folder."""
    elsewhere = [entry for entry in sys.path if Path(entry).resolve() != _ROOT]
    spec = PathFinder.find_spec("kernels", elsewhere)
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["kernels"] = module  # the import in progress returns what is found here
        spec.loader.exec_module(module)
