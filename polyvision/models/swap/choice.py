"""Choose sites by role, name pattern, module class or function."""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

from torch import nn

from polyvision.errors import PolyvisionError, did_you_mean
from polyvision.models.swap.report import Kept
from polyvision.models.swap.sites import KEPT_ROLES, ROLES, Use
from polyvision.models.trace.functions import FUNCTIONS

__all__ = ["Select", "choose"]

Select = str | type | Callable[..., Any]


def choose(
    model: nn.Module,
    uses: Sequence[Use],
    include: Select | Iterable[Select] | None,
    exclude: Select | Iterable[Select] | None,
) -> tuple[list[Use], list[Kept]]:
    """Return the sites to replace, and what stays with the reason.

    Raises:
        PolyvisionError: an entry matches no site, or nothing is chosen.
    """
    wanted, unwanted = _entries("include", include), _entries("exclude", exclude)
    for key, entries in (("include", wanted), ("exclude", unwanted)):
        for entry in entries or ():
            if not any(_matches(model, use, entry) for use in uses):
                raise _no_match(type(model).__name__, key, entry, uses)
    chosen, kept = [], []
    for use in uses:
        reason = _reason_to_keep(model, use, wanted, unwanted)
        if reason is None:
            chosen.append(use)
        else:
            kept.append(Kept(use.name, use.kind, reason, use.role))
    if not chosen:
        seen = f"it has {len(uses)}, and all of them stay" if uses else "it has none"
        raise PolyvisionError(f"{type(model).__name__}: no activation to replace: {seen}.")
    return chosen, kept


def _reason_to_keep(
    model: nn.Module,
    use: Use,
    wanted: Sequence[Select] | None,
    unwanted: Sequence[Select] | None,
) -> str | None:
    if any(_matches(model, use, entry) for entry in unwanted or ()):
        return "excluded"
    if wanted is None:
        return KEPT_ROLES.get(use.role)
    if any(_matches(model, use, entry) and _reaches(use, entry) for entry in wanted):
        return None
    return KEPT_ROLES.get(use.role, "not included")


def _reaches(use: Use, entry: Select) -> bool:
    """Tell whether ``entry`` means gates and the like too: a pattern of many names does not."""
    return use.role not in KEPT_ROLES or not (isinstance(entry, str) and set(entry) & set("*?["))


def _entries(key: str, given: Select | Iterable[Select] | None) -> list[Select] | None:
    if given is None:
        return None
    is_many = isinstance(given, Iterable) and not isinstance(given, str | type)
    entries: list[Any] = list(cast(Iterable[Any], given)) if is_many else [given]
    for entry in entries:
        is_module = inspect.isclass(entry) and issubclass(entry, nn.Module)
        if not (isinstance(entry, str) or is_module or _is_function(entry)):
            raise PolyvisionError(
                f"{key}: {entry!r} is no role ({', '.join(ROLES)}), name pattern, module class or "
                "activation function of torch"
            )
    return entries


def _is_function(entry: Any) -> bool:
    try:
        return entry in FUNCTIONS
    except TypeError:  # not hashable
        return False


def _matches(model: nn.Module, use: Use, entry: Select) -> bool:
    target = use.targets[0]
    if isinstance(entry, str):
        return use.role == entry if entry in ROLES else fnmatch.fnmatchcase(use.name, entry)
    if target.module is None:
        return not inspect.isclass(entry) and FUNCTIONS.get(entry) == target.kind
    if not inspect.isclass(entry):
        return False
    return isinstance(model.get_submodule(target.module), entry)


def _no_match(model: str, key: str, entry: Select, uses: Sequence[Use]) -> PolyvisionError:
    if not isinstance(entry, str):
        kinds = sorted({use.kind for use in uses})
        return PolyvisionError(
            f"{key}: {model} has no activation that is {entry.__name__}; "
            f"it has {', '.join(kinds) or 'none'}"
        )
    roles = [role for role in ROLES if any(use.role == role for use in uses)]
    names = [use.name for use in uses]
    shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
    return PolyvisionError(
        f"{key}: no activation of {model} matches {entry!r}.{did_you_mean(entry, roles + names)} "
        f"Its roles: {', '.join(roles)}; its names: {shown}"
    )
