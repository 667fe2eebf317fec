"""Choose sites by role, name pattern, module class or function."""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

from torch import nn

from polyvision.errors import PolyvisionError, did_you_mean
from polyvision.models.swap.report import ROLES, Kept, Site
from polyvision.models.swap.sites import KEPT_ROLES
from polyvision.models.trace.known_activations import FUNCTIONS

__all__ = ["Select", "choose"]

Select = str | type | Callable[..., Any]


def choose(
    model: nn.Module,
    sites: Sequence[Site],
    include: Select | Iterable[Select] | None,
    exclude: Select | Iterable[Select] | None,
) -> tuple[list[Site], list[Kept]]:
    """Return the sites to replace, and what stays with the reason.

    Raises:
        PolyvisionError: an entry matches no site, or nothing is chosen.
    """
    wanted, unwanted = _entries("include", include), _entries("exclude", exclude)
    for key, entries in (("include", wanted), ("exclude", unwanted)):
        for entry in entries or ():
            if not any(_matches(model, site, entry) for site in sites):
                raise _no_match(type(model).__name__, key, entry, sites)
    chosen, kept = [], []
    for site in sites:
        reason = _reason_to_keep(model, site, wanted, unwanted)
        if reason is None:
            chosen.append(site)
        else:
            kept.append(site.kept(reason))
    if not chosen:
        seen = f"it has {len(sites)}, and all of them stay" if sites else "it has none"
        raise PolyvisionError(f"{type(model).__name__}: no activation to replace: {seen}.")
    return chosen, kept


def _reason_to_keep(
    model: nn.Module,
    site: Site,
    wanted: Sequence[Select] | None,
    unwanted: Sequence[Select] | None,
) -> str | None:
    if any(_matches(model, site, entry) for entry in unwanted or ()):
        return "excluded"
    if wanted is None:
        return KEPT_ROLES.get(site.role)
    if any(_matches(model, site, entry) and _reaches(site, entry) for entry in wanted):
        return None
    return KEPT_ROLES.get(site.role, "not included")


def _reaches(site: Site, entry: Select) -> bool:
    """Tell whether ``entry`` means gates and the like too: a pattern of many names does not."""
    return site.role not in KEPT_ROLES or not (isinstance(entry, str) and set(entry) & set("*?["))


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


def _matches(model: nn.Module, site: Site, entry: Select) -> bool:
    if isinstance(entry, str):
        return site.role == entry if entry in ROLES else fnmatch.fnmatchcase(site.name, entry)
    if site.source.module is None:
        return not inspect.isclass(entry) and FUNCTIONS.get(entry) == site.source.kind
    if not inspect.isclass(entry):
        return False
    return isinstance(model.get_submodule(site.source.module), entry)


def _no_match(model: str, key: str, entry: Select, sites: Sequence[Site]) -> PolyvisionError:
    if not isinstance(entry, str):
        kinds = sorted({site.was for site in sites})
        return PolyvisionError(
            f"{key}: {model} has no activation that is {entry.__name__}; "
            f"it has {', '.join(kinds) or 'none'}"
        )
    roles = [role for role in ROLES if any(site.role == role for site in sites)]
    names = [site.name for site in sites]
    shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
    return PolyvisionError(
        f"{key}: no activation of {model} matches {entry!r}.{did_you_mean(entry, roles + names)} "
        f"Its roles: {', '.join(roles)}; its names: {shown}"
    )
