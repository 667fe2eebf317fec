"""Activations from a user's own modules and files: ``plugins=[my_module, path/to/file.py]``."""

from __future__ import annotations

import importlib.util
import re
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from polyvision.activations.registry import FILE_PLUGIN
from polyvision.errors import PolyvisionError, first_line, looked_for

__all__ = ["KEY", "load_plugins", "module_of", "plugins_of"]

KEY = "plugins="
_HERE = str(Path(__file__).parents[1])


def plugins_of(words: Iterable[str]) -> list[str]:
    """Return the plugins that a command line names.

    Example:
        >>> plugins_of(["act=mine", "plugins=[my_module, 'acts/mine.py']"])
        ['my_module', 'acts/mine.py']
    """
    lists = [word.removeprefix(KEY).strip() for word in words if word.startswith(KEY)]
    parts = [part.strip() for text in lists for part in text.strip("[]").split(",")]
    return [part.strip("'\"") for part in parts if part not in ("", "null")]


def load_plugins(plugins: Iterable[str | Path]) -> None:
    """Import modules and files, which register activations by ``register_activation``.

    One that is loaded already is not loaded again. A module is also looked for in the current
    folder. This runs the code of the plugins: nothing loads one but the one who names it.

    Args:
        plugins: names of modules, ``my_package.acts``, or paths of files, ``path/to/mine.py``.

    Raises:
        PolyvisionError: there is no such module or file, or it fails when it is imported.
    """
    for plugin in map(str, plugins):
        if plugin.endswith(".py"):
            _load_file(plugin)
        elif re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", plugin):
            _load_module(plugin)
        else:
            raise PolyvisionError(
                f"plugins: {plugin!r} is neither a module (my_package.acts) nor a file "
                f"(path/to/mine.py)"
            )


def _load_module(name: str) -> None:
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)  # at the end: what is installed comes first
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise _failed(name, error) from error  # it is there, and imports another that is not
        raise PolyvisionError(
            f"plugins: there is no module {name!r}, neither installed nor in {here}: install the "
            f"package it belongs to, or give the path of a file, plugins=[path/to/{name}.py]"
        ) from error
    except (Exception, SystemExit) as error:  # whatever the code of a user raises
        raise _failed(name, error) from error


def _load_file(given: str) -> None:
    path = Path(given).expanduser().resolve()
    if not path.is_file():
        raise PolyvisionError(f"plugins: there is no file {given}{looked_for(given)}")
    if _loaded(path) is not None:
        return
    name = FILE_PLUGIN + re.sub(r"\W", "_", path.stem)
    if name in sys.modules:
        other = getattr(sys.modules[name], "__file__", None)
        raise PolyvisionError(f"plugins: {given} and {other} have the same name: rename one")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs, as an import does it
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever the code of a user raises
        del sys.modules[name]
        raise _failed(given, error) from error


def module_of(plugin: str) -> ModuleType:
    """Return the module of a plugin that is loaded."""
    found = _loaded(Path(plugin).expanduser().resolve()) if plugin.endswith(".py") else None
    return sys.modules[plugin] if found is None else found


def _loaded(path: Path) -> ModuleType | None:
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and file.endswith(path.name) and Path(file).resolve() == path:
            return module
    return None


def _failed(plugin: str, error: Exception | SystemExit) -> PolyvisionError:
    said = first_line(error)
    if isinstance(error, SyntaxError):
        said = error.msg  # its text names the place too
        place = f"{error.filename or plugin}, line {error.lineno or 1}"
    else:
        frames = traceback.extract_tb(error.__traceback__)
        theirs = [f for f in frames if not f.filename.startswith((_HERE, "<"))]
        last = (theirs or frames)[-1]
        place = f"{last.filename}, line {last.lineno}"
    what = "" if isinstance(error, PolyvisionError) else f"{type(error).__name__}: "
    return PolyvisionError(f"plugins: {plugin} cannot be loaded: {what}{said} ({place})")
