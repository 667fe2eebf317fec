"""Dataclasses from the plain values of YAML and JSON: types, bounds, defaults, did-you-mean."""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from polyvision.errors import PolyvisionError, unknown

__all__ = [
    "Bounds",
    "Count",
    "NonNegative",
    "Positive",
    "Share",
    "describe",
    "load",
    "misfits",
    "values_of",
    "with_defaults",
]

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Limits of a number: at least ``ge``, more than ``gt``, at most ``le``, less than ``lt``."""

    ge: float = -math.inf
    gt: float = -math.inf
    le: float = math.inf
    lt: float = math.inf

    @property
    def text(self) -> str:
        """The limits in words."""
        words = {"at least": self.ge, "more than": self.gt, "at most": self.le}
        words["less than"] = self.lt
        return " and ".join(f"{word} {v:g}" for word, v in words.items() if math.isfinite(v))

    def broken_by(self, value: float) -> str | None:
        """Return the rule that ``value`` breaks, or None."""
        rules = {
            f"at least {self.ge}": value >= self.ge,
            f"greater than {self.gt}": value > self.gt,
            f"at most {self.le}": value <= self.le,
            f"less than {self.lt}": value < self.lt,
        }
        if not math.isfinite(value):
            return "finite"
        return next((rule for rule, holds in rules.items() if not holds), None)


Count = Annotated[int, Bounds(ge=1)]
NonNegative = Annotated[float, Bounds(ge=0)]
Positive = Annotated[float, Bounds(gt=0)]
Share = Annotated[float, Bounds(ge=0, le=1)]


def load(cls: type[T], values: Mapping[str, Any], path: str, problems: list[str]) -> T | None:
    """Build the dataclass ``cls`` from plain values; append each misfit to ``problems``.

    Args:
        cls: a dataclass whose annotations say what fits; fields with a default may be left out.
        values: the values.
        path: their place, such as ``recipe``, for the texts; empty at the top.
        problems: receives one line for each value that does not fit.

    Returns:
        The instance, or None when these values added a problem.
    """
    before = len(problems)
    prefix = f"{path}." if path else ""
    hints = _hints(cls)
    for key in values:
        if key not in hints:
            problems.append(str(unknown("key", f"{prefix}{key}", [f"{prefix}{h}" for h in hints])))
    converted = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        name = field.name
        if name not in values:
            if field.default is field.default_factory is dataclasses.MISSING:
                problems.append(f"{prefix}{name} is missing")
            continue
        try:
            converted[name] = _convert(values[name], hints[name], f"{prefix}{name}", problems)
        except ValueError as error:
            problems.append(str(error))
    if len(problems) > before:
        return None
    try:
        return cls(**converted)
    except PolyvisionError as error:  # fields that do not fit together
        problems.append(str(error))
        return None


def misfits(instance: Any, path: str = "") -> list[str]:
    """Return a line for each field of a dataclass whose value does not fit its annotation."""
    problems: list[str] = []
    for name, hint in _hints(type(instance)).items():
        value = getattr(instance, name)
        try:
            converted = _convert(value, hint, f"{path}{name}", problems)
            if isinstance(value, float) and isinstance(converted, int):
                raise PolyvisionError(f"{path}{name} must be an integer, got {value!r}")
        except ValueError as error:
            problems.append(str(error))
    return problems


def values_of(cls: type[Any], source: Any) -> dict[str, Any]:
    """Return the fields of the dataclass ``cls`` with the values that ``source`` has for them."""
    return {field.name: getattr(source, field.name) for field in dataclasses.fields(cls)}


def with_defaults(cls: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` with the defaults of the dataclass ``cls`` for keys that they lack.

    Args:
        cls: a dataclass; fields that are dataclasses themselves are completed as well.
        values: plain values, not checked.
    """
    complete = dict(values)
    for field in dataclasses.fields(cls):
        value, inner = values.get(field.name), _dataclass_in(_hints(cls)[field.name])
        if isinstance(value, Mapping) and inner is not None:
            complete[field.name] = with_defaults(inner, value)
        elif field.name in values:
            continue
        elif field.default is not dataclasses.MISSING:
            complete[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            made = field.default_factory()
            complete[field.name] = dataclasses.asdict(made) if inner else made
    return complete


def _hints(cls: type[Any]) -> dict[str, Any]:
    return get_type_hints(cls, include_extras=True)


def _dataclass_in(hint: Any) -> type[Any] | None:
    """Return the dataclass that a type is, or allows beside None."""
    kinds = [hint, *get_args(hint)]
    return next((k for k in kinds if isinstance(k, type) and dataclasses.is_dataclass(k)), None)


def _convert(value: Any, hint: Any, path: str, problems: list[str]) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if value == "???":
        raise ValueError(f"{path} must be given: add {path}=<value>")
    if origin in (Union, types.UnionType):
        return _convert_union(value, arguments, path, problems)
    if origin is Annotated:
        converted = _convert(value, arguments[0], path, problems)
        rule = arguments[1].broken_by(converted)
        if rule is not None:
            raise ValueError(f"{path} must be {rule}, got {value!r}")
        return converted
    if origin is Literal:
        if value not in arguments:
            raise unknown(path, str(value), map(str, arguments))
        return value
    if origin is list and isinstance(value, list):
        return [_convert(v, arguments[0], f"{path}[{i}]", problems) for i, v in enumerate(value)]
    if isinstance(value, Mapping):
        if origin in (dict, Mapping):
            return {
                str(k): v if arguments[1] is Any else _convert(v, arguments[1], f"{path}.{k}", [])
                for k, v in value.items()
            }
        if dataclasses.is_dataclass(hint):
            return load(hint, value, path, problems)  # type: ignore[arg-type]
    if not isinstance(value, bool):
        if hint is float and isinstance(value, int):
            return float(value)
        if hint is int and isinstance(value, float) and value.is_integer():
            return int(value)  # such as 2.5e9 tokens
        if hint is str and isinstance(value, int | float):
            return str(value)
    fits = isinstance(hint, type) and isinstance(value, hint)
    if fits and (hint is bool or not isinstance(value, bool)):
        return value
    raise ValueError(f"{path} must be {describe(hint)}, got {value!r}")


def _convert_union(value: Any, arguments: tuple[Any, ...], path: str, problems: list[str]) -> Any:
    if value is None and type(None) in arguments:
        return None
    options = [a for a in arguments if a is not type(None)]
    for option in options[:-1]:
        try:
            return _convert(value, option, path, [])
        except ValueError:
            continue
    try:
        return _convert(value, options[-1], path, problems)
    except ValueError as error:
        if len(options) == 1:
            raise
        text = " or ".join(describe(o) for o in arguments)
        raise ValueError(f"{path} must be {text}, got {value!r}") from error


def describe(hint: Any) -> str:
    """Say in words which values fit a type."""
    if get_origin(hint) is Annotated:
        kind, bounds = get_args(hint)
        return f"{describe(kind)} {bounds.text}"
    if get_origin(hint) is Literal:
        return " or ".join(repr(a) for a in get_args(hint))
    names = {int: "an integer", float: "a number", str: "text", bool: "true or false"}
    names |= {list: "a list", dict: "a mapping", Mapping: "a mapping", type(None): "null"}
    return names.get(get_origin(hint) or hint, "a group of keys")
