"""The registry of activations: one decorator adds one, everything else is derived from it."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import inspect
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from torch import nn

from polyvision.errors import PolyvisionError, first_line, unknown

__all__ = [
    "ENTRY_POINTS",
    "FILE_PLUGIN",
    "ActivationInfo",
    "Kind",
    "activation_info",
    "activation_kind",
    "activation_modules",
    "activation_names",
    "activation_origin",
    "create_activation",
    "is_activation",
    "own_activation",
    "register_activation",
]

Kind = Literal["pointwise", "normalising", "gated", "stochastic", "mixture"]
Factory = TypeVar("Factory", bound=Callable[..., nn.Module])

# Set by the place an activation is put into, never by a configuration.
_SITE_KEYWORDS = frozenset({"inplace", "dim", "features", "groups", "device", "dtype"})


@dataclasses.dataclass(frozen=True)
class ActivationInfo:
    """What the registry knows of one activation.

    Attributes:
        name: the name used in ``act=`` and ``create_activation``.
        kind: ``pointwise`` (each element alone), ``normalising`` (needs a feature ``dim``),
            ``gated`` (two inputs, FFN only), ``stochastic``, or ``mixture`` (weighs functions by
            the token that enters the FFN; FFN only); with the default options, where it
            depends on them.
        source: author, year and link.
        formula: one line of plain text.
        factory: class or function that builds the module.
        options: a dataclass whose fields are the keywords a user may set, with their defaults.
        module: name of the module that registered it.
        kind_of: the kind as a function of the options, where it depends on them.
        surrogate: it is trained with another derivative than its own.
    """

    name: str
    kind: Kind
    source: str
    formula: str
    factory: Callable[..., nn.Module]
    options: type[Any]
    module: str
    kind_of: Callable[[Mapping[str, Any]], Kind] | None = None
    surrogate: bool = False

    def kind_with(self, options: Mapping[str, Any]) -> Kind:
        """Return the kind with these options; defaults stand for those that are not given."""
        if self.kind_of is None:
            return self.kind
        return self.kind_of(dataclasses.asdict(self.options()) | dict(options))

    def needs_dim(self, options: Mapping[str, Any]) -> bool:
        """Tell whether the feature dimension must be known: to normalise, or for channels."""
        return self.kind_with(options) == "normalising" or options.get("num_parameters", 1) != 1


ENTRY_POINTS = "polyvision.activations"  # the group of installed packages that register some
FILE_PLUGIN = "polyvision_plugin_"  # begins the name of a module that is a file given by its path

_REGISTRY: dict[str, ActivationInfo] = {}
_FAILED: dict[str, str] = {}  # plugin of an installed package -> why it could not be loaded
_MARK = "_polyvision_activation"  # attribute of a module made here: its registered name


def register_activation(
    name: str,
    *,
    kind: Kind | Callable[[Mapping[str, Any]], Kind],
    source: str,
    formula: str,
    surrogate: bool = False,
) -> Callable[[Factory], Factory]:
    """Register a module class or factory under ``name``; the only step needed to add an activation.

    Every keyword of ``factory`` needs a type and a default; ``act.<keyword>=`` is made from them.
    Where the kind depends on the options, ``kind`` is a function of all of them that returns it.
    ``surrogate`` says that it is trained with another derivative than its own.

    Raises:
        ValueError: the name is taken, the kind is not one of the five, or a keyword lacks its type
            or default.
    """
    if not callable(kind) and kind not in get_args(Kind):
        raise unknown("activation kind", kind, get_args(Kind))
    module = str(sys._getframe(1).f_globals.get("__name__"))

    def decorate(factory: Factory) -> Factory:
        if name in _REGISTRY:
            raise PolyvisionError(f"an activation named {name!r} is registered already")
        options = _options_of(name, factory)
        kind_of = kind if callable(kind) else None
        fixed = kind if not callable(kind) else kind(dataclasses.asdict(options()))
        _REGISTRY[name] = ActivationInfo(
            name, fixed, source, formula, factory, options, module, kind_of, surrogate
        )
        return factory

    return decorate


def _keywords(factory: Callable[..., nn.Module]) -> dict[str, inspect.Parameter]:
    """Return the parameters of ``factory`` that can be given by name."""
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(factory).parameters
    return {name: p for name, p in parameters.items() if p.kind in by_name}


def _options_of(name: str, factory: Callable[..., nn.Module]) -> type[Any]:
    """Make a dataclass of the keywords of ``factory`` that describe the function itself."""
    hints = get_type_hints(factory.__init__ if inspect.isclass(factory) else factory)
    fields = []
    for keyword, parameter in _keywords(factory).items():
        if keyword in _SITE_KEYWORDS:
            continue
        if keyword not in hints or parameter.default is inspect.Parameter.empty:
            raise PolyvisionError(
                f"activation {name!r}: keyword {keyword!r} needs a type annotation and a default, "
                f"since act.{keyword}= in a configuration is made from them"
            )
        hint = _configurable(hints[keyword])
        fields.append((keyword, hint, dataclasses.field(default=parameter.default)))
    return dataclasses.make_dataclass(f"{name}_options", fields, frozen=True)


def _configurable(hint: Any) -> Any:
    """Return a type without the functions in it, which only a program can pass."""
    if get_origin(hint) not in (Union, types.UnionType):
        return hint
    return Union[tuple(h for h in get_args(hint) if get_origin(h) is not Callable)]  # noqa: UP007


@functools.cache
def _load_installed() -> None:
    """Load the activations of installed packages, when a name is first asked for."""
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        try:
            entry.load()
        except Exception as error:  # whatever the code of a package raises
            package = entry.dist.name if entry.dist else entry.module
            _FAILED[entry.name] = f"{package} ({type(error).__name__}: {first_line(error)})"


def activation_names(*kinds: Kind) -> list[str]:
    """Return the registered names, sorted; only those of ``kinds`` when any are given."""
    _load_installed()
    return sorted(n for n, info in _REGISTRY.items() if not kinds or info.kind in kinds)


def activation_info(name: str) -> ActivationInfo:
    """Return the record of ``name``.

    Raises:
        ValueError: no such activation; the text lists the valid names.
    """
    _load_installed()
    try:
        return _REGISTRY[name]
    except KeyError:
        raise PolyvisionError(
            f"{unknown('activation', name, _REGISTRY)}{own_activation()}"
        ) from None


def own_activation() -> str:
    """Return the advice for a name that is not registered."""
    broken = "".join(f" The installed {what} cannot be loaded." for what in _FAILED.values())
    return f" One of your own needs plugins=[<module or file.py>], or its import in Python.{broken}"


def activation_origin(name: str) -> str | None:
    """Return the module of a user that registered an activation; for a script or file, its path.

    None for one of this project, which is always there.
    """
    module = activation_info(name).module
    if module.split(".")[0] == "polyvision":
        return None
    if module == "__main__":
        return str(getattr(sys.modules["__main__"], "__file__", None) or "an interactive session")
    if module.startswith(FILE_PLUGIN):
        return str(sys.modules[module].__file__)
    return module


def create_activation(name: str, **keywords: Any) -> nn.Module:
    """Build the activation ``name`` with the keywords of its constructor.

    Raises:
        ValueError: unknown name or keyword, or a value that the constructor refuses.

    Example:
        >>> create_activation("polynorm", order=2)
        PolyNorm(order=2, eps=1e-06, dim=-1)
    """
    info = activation_info(name)
    valid = _keywords(info.factory)
    for keyword in keywords:
        if keyword not in valid:
            raise unknown(f"keyword of activation {name!r}", keyword, valid)
    module = info.factory(**keywords)
    setattr(module, _MARK, name)
    return module


def is_activation(module: nn.Module) -> bool:
    """Tell whether ``module`` was made by ``create_activation`` or is of a registered class.

    A class of torch that is registered does not count by itself: a network may have modules of its
    own of that class.
    """
    factories: list[Any] = [info.factory for info in _REGISTRY.values()]
    classes = [f for f in factories if inspect.isclass(f) and f.__module__.split(".")[0] != "torch"]
    return hasattr(module, _MARK) or isinstance(module, tuple(classes))


def activation_kind(module: nn.Module) -> Kind | None:
    """Return the kind of an activation; None if it is neither made here nor of a registered class.

    Example:
        >>> activation_kind(create_activation("swiglu")), activation_kind(nn.Linear(2, 2))
        ('gated', None)
    """
    named = getattr(module, _MARK, None)
    if named in _REGISTRY:
        return _REGISTRY[named].kind
    for info in _REGISTRY.values():
        if inspect.isclass(info.factory) and isinstance(module, info.factory):
            return info.kind
    return None


def activation_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the activations inside ``model`` by their dotted names.

    One inside another, such as the base of a PolyCom, is part of that other one.
    """
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = "" in found or name.startswith(tuple(f"{outer}." for outer in found))
        if is_activation(module) and not inside:
            found[name] = module
    return found
