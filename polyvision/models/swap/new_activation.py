"""What a swap puts into every site: an activation by name, or what a class or function builds."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from polyvision.activations import activation_info, activation_names, create_activation
from polyvision.activations.registry import Kind
from polyvision.errors import PolyvisionError, first_line, unknown
from polyvision.models.swap.report import Site

__all__ = ["NewActivation", "check_activation", "new_activation"]


@dataclasses.dataclass(frozen=True)
class NewActivation:
    """What to put into every site: its name for messages, and how it is built."""

    name: str
    kind: Kind
    build: Callable[..., nn.Module]
    accepts: frozenset[str]  # keywords, among them those that only the site knows
    needs_dim: bool

    def at(self, site: Site) -> nn.Module:
        """Build the activation of one site."""
        keywords: dict[str, Any] = {}
        if self.needs_dim:
            if site.dim is None:
                raise PolyvisionError(
                    f"activation site {site.name!r} {site.no_dim}; exclude it or choose a "
                    "pointwise activation with one set of parameters"
                )
            keywords["dim"] = site.dim
        like: dict[str, Any] = {"device": site.seen[0].device}
        if site.seen[0].dtype.is_floating_point:
            like["dtype"] = site.seen[0].dtype
        keywords |= {key: value for key, value in like.items() if key in self.accepts}
        return self.build(**keywords).to(**like)


def new_activation(
    act: str | Callable[..., nn.Module], options: Mapping[str, Any], *, place: str
) -> NewActivation:
    """Find the activation that a name, a class or a function means."""
    named = act if isinstance(act, str) else None
    for name in activation_names():
        if activation_info(name).factory is act:
            named = name
    if named is not None:
        check_activation(named, options, place=place)
        info = activation_info(named)
        build = partial(create_activation, named, **options)
        kind, accepts = info.kind_with(options), _keywords(info.factory)
        return NewActivation(named, kind, build, accepts, info.needs_dim(options))
    valid = ", ".join(activation_names("pointwise", "normalising", "stochastic"))
    wanted = f"a name ({valid}), or a class or function that builds a new module at each call"
    if isinstance(act, nn.Module) or not callable(act):
        raise PolyvisionError(f"act must be {wanted}, got {' '.join(repr(act).split())}")
    called = getattr(act, "__name__", type(act).__name__)
    try:
        made, other = act(**options), act(**options)
    except Exception as error:  # whatever a foreign constructor raises
        text = f"{called}({', '.join(options)}) failed: {first_line(error)}"
        raise PolyvisionError(f"{text}. act must be {wanted}") from error
    if not isinstance(made, nn.Module) or made is other:
        built = "the same module twice" if isinstance(made, nn.Module) else repr(made)
        raise PolyvisionError(f"act must be {wanted}, but {called}() gives {built}")
    accepts, kind = _keywords(act), _kind_of(made, place)
    if kind == "normalising" and "dim" not in accepts:
        raise PolyvisionError(
            f"{called}() builds a {type(made).__name__}, which needs the feature dimension of its "
            "site: pass the class, or a function that takes dim"
        )
    build = partial(act, **options)
    return NewActivation(type(made).__name__, kind, build, accepts, kind == "normalising")


def _kind_of(module: nn.Module, place: str) -> Kind:
    """Return the kind of the registered class of ``module``; any other counts as pointwise."""
    for info in map(activation_info, activation_names()):
        if inspect.isclass(info.factory) and isinstance(module, info.factory):
            check_activation(info.name, {}, place=place)
            return info.kind
    return "pointwise"


def _keywords(factory: Callable[..., nn.Module]) -> frozenset[str]:
    try:
        return frozenset(inspect.signature(factory).parameters)
    except ValueError:  # some functions of C have none
        return frozenset()


def check_activation(act: str, options: Mapping[str, Any], *, place: str) -> None:
    """Check the name and the names of the options.

    Raises:
        PolyvisionError: unknown, or one that fits no site of one input.
    """
    info = activation_info(act)
    needs = {
        "gated": "is gated: it needs two inputs",
        "mixture": "is a mixture: it needs the token too",
    }
    if info.kind in needs:
        valid = activation_names("pointwise", "normalising", "stochastic")
        raise PolyvisionError(
            f"{act} {needs[info.kind]} and fits the feed-forward network of a language "
            f"model only. For {place} choose one of: {', '.join(valid)}."
        )
    fields = [field.name for field in dataclasses.fields(info.options)]
    for option in options:
        if option not in fields:
            raise unknown(f"option of activation {act!r}", option, fields)
