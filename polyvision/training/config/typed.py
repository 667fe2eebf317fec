"""Typed loading of configuration nodes: plain values into dataclasses, every misfit reported."""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Mapping
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from polyvision.errors import unknown

__all__ = ["Bounds", "describe", "load", "with_defaults"]

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


def load(cls: type[T], values: Mapping[str, Any], path: str, problems: list[str]) -> T | None:
    """Build the dataclass ``cls`` from plain values; append each misfit to ``problems``.

    Args:
        cls: a dataclass whose annotations say what fits.
        values: the configuration node.
        path: the node's place, such as ``recipe``, for the texts; empty at the top.
        problems: receives one line for each value that does not fit.

    Returns:
        The instance, or None when this node added a problem.
    """
    before = len(problems)
    prefix = f"{path}." if path else ""
    hints = get_type_hints(cls, include_extras=True)
    for key in values:
        if key not in hints:
            problems.append(str(unknown("key", f"{prefix}{key}", [f"{prefix}{h}" for h in hints])))
    converted = {}
    for name, hint in hints.items():
        if name not in values:
            problems.append(f"{prefix}{name} is missing")
            continue
        try:
            converted[name] = _convert(values[name], hint, f"{prefix}{name}", problems)
        except ValueError as error:
            problems.append(str(error))
    return cls(**converted) if len(problems) == before else None


def with_defaults(cls: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` with the defaults of the dataclass ``cls`` for keys that they lack.

    Args:
        cls: a dataclass; fields that are dataclasses themselves are completed as well.
        values: plain values, not checked.
    """
    complete = dict(values)
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        value, hint = values.get(field.name), hints[field.name]
        if field.name not in values:
            if field.default is not dataclasses.MISSING:
                complete[field.name] = field.default
            elif field.default_factory is not dataclasses.MISSING:
                complete[field.name] = field.default_factory()
        elif isinstance(value, Mapping) and dataclasses.is_dataclass(hint):
            complete[field.name] = with_defaults(cast(type[Any], hint), value)
    return complete


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
    if origin is dict and isinstance(value, Mapping):
        if arguments[1] is Any:
            return dict(value)
        return {
            str(k): _convert(v, arguments[1], f"{path}.{k}", problems) for k, v in value.items()
        }
    if dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        return load(hint, value, path, problems)  # type: ignore[arg-type]
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is int and isinstance(value, float) and value.is_integer():
        return int(value)  # such as 2.5e9 tokens
    if hint is str and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if (
        isinstance(hint, type)
        and isinstance(value, hint)
        and not (isinstance(value, bool) and hint is not bool)
    ):
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
    names |= {list: "a list", dict: "a mapping", type(None): "null"}
    return names.get(get_origin(hint) or hint, "a group of keys")
