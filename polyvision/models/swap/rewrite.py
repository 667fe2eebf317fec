"""Give a call in the source of a module's method an activation module of its own.

``F.relu(self.bn(x))`` in ``forward`` becomes ``self.relu(self.bn(x))``, and of three calls of
``self.relu`` the second becomes ``self.relu_2``. An activation written by hand is replaced whole:
``x * torch.sigmoid(x)`` becomes ``self.silu(x)``. Only that expression changes: control flow,
training-time branches and all other code stay what they are, so the result can be compiled,
exported and read in a traceback. The module keeps its class by name and ``isinstance``: as in FSDP2
(Zhao et al. 2023, https://arxiv.org/abs/2304.11277), its class becomes a subclass made on the spot,
which pickles as its base and the new source.
"""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import itertools
import linecache
from collections.abc import Callable, Mapping
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from polyvision.models.swap.editor import Editor, key_of_node, key_of_place
from polyvision.models.swap.source import FUTURES, CannotRewrite, definition_of, tree_of, with_inner
from polyvision.models.trace.target import Target

__all__ = ["CannotRewrite", "attribute_for", "rewritten_class", "source_of"]

_SERIAL = itertools.count()
_KNOWN: dict[tuple[Any, ...], type[nn.Module]] = {}
_LIKE_OLD = "polyvision_like_old"


class _Rewritten:
    """Marks the classes made here, and pickles their objects."""

    polyvision_base: type[nn.Module]
    polyvision_sources: Mapping[str, str]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        sources = tuple(self.polyvision_sources.items())
        return _restore, (self.polyvision_base, sources), self.__getstate__()


def _restore(base: type[nn.Module], sources: tuple[tuple[str, str], ...]) -> nn.Module:
    cls = _subclass(base, dict(sources))
    return cls.__new__(cls)


def _base_class(module: nn.Module) -> type[nn.Module]:
    """Return the class of ``module``, or the one it had before its calls were rewritten."""
    return module.polyvision_base if isinstance(module, _Rewritten) else type(module)


def attribute_for(target: Target, owner: nn.Module, taken: set[str]) -> str:
    """Return a free attribute of ``owner`` for the activation of ``target``."""
    name = target.kind if target.module is None else target.module.rpartition(".")[2]
    if not name.isidentifier():  # a number, in a Sequential
        name = f"act_{name}"
    numbered = itertools.chain([name], (f"{name}_{i}" for i in itertools.count(2)))
    return next(a for a in numbered if a not in taken and not hasattr(owner, a))


def rewritten_class(owner: nn.Module, calls: Mapping[Target, str]) -> type[nn.Module]:
    """Return a subclass in which each call of ``calls`` goes to the attribute named with it.

    Args:
        owner: the module whose methods hold the calls; it stays as it is.
        calls: target -> attribute that holds the new activation.

    Raises:
        CannotRewrite: the source is not at hand, or is not that of a method of the class.
    """
    sources = dict(getattr(owner, "polyvision_sources", {}))
    by_method: dict[str, dict[Target, str]] = {}
    for target, attribute in calls.items():
        by_method.setdefault(_method_of(owner, target), {})[target] = attribute
    for name, edits in by_method.items():
        sources[name] = _edited_source(type(owner), name, edits)
    return _subclass(_base_class(owner), sources)


def _method_of(owner: nn.Module, target: Target) -> str:
    """Return the name of the method that contains ``target``."""
    place = target.place
    if place is None:
        raise CannotRewrite(f"{target.caller} is no method of a module")
    for cls in type(owner).__mro__:
        for name, value in vars(cls).items():
            code = _code_of(value)
            if code is None or code.co_filename != place.file:
                continue
            if code.co_firstlineno <= place.line <= _last_line(code):
                if inspect.getattr_static(type(owner), name) is not value:
                    raise CannotRewrite(f"{target.caller} is reached through super()")
                return name
    raise CannotRewrite(f"{target.caller} is no method of {type(owner).__name__}")


def _code_of(value: Any) -> CodeType | None:
    function = inspect.unwrap(value) if callable(value) else None
    return function.__code__ if isinstance(function, FunctionType) else None


def _last_line(code: CodeType) -> int:
    return max(line or 0 for inner in with_inner(code) for *_, line in inner.co_lines())


def source_of(target: Target) -> str:
    """Return the text of the call or expression with its file and line, as far as known."""
    place = target.place
    if place is None:
        return target.caller
    where = f"{Path(place.file).name}:{place.line}"
    try:
        tree = tree_of(place.file)
    except CannotRewrite:
        return where
    node = next((node for node in ast.walk(tree) if key_of_node(node) == key_of_place(place)), None)
    return where if node is None else f"{ast.unparse(node)} ({where})"


def _edited_source(cls: type, name: str, edits: Mapping[Target, str]) -> str:
    """Return the source of the method with the calls changed, under the name it is found by."""
    code = _code_of(inspect.getattr_static(cls, name))
    assert code is not None
    definition = copy.deepcopy(definition_of(code))
    definition.name = name
    parameters = [*definition.args.posonlyargs, *definition.args.args]
    owner = parameters[0].arg if parameters else "self"
    places = {key_of_place(t.place): (t, a) for t, a in edits.items() if t.place}
    editor = Editor(owner, places)
    editor.visit(definition)
    if editor.edits:
        kinds = ", ".join(target.kind for target, _ in editor.edits.values())
        raise CannotRewrite(f"{code.co_qualname} makes no plain call of {kinds} there")
    private = [
        node.attr
        for node in ast.walk(definition)
        if isinstance(node, ast.Attribute) and node.attr[:2] == "__" != node.attr[-2:]
    ]
    if private:
        raise CannotRewrite(f"{code.co_qualname} uses the private name {private[0]}")
    return ast.unparse(ast.fix_missing_locations(definition))


def _subclass(base: type[nn.Module], sources: Mapping[str, str]) -> type[nn.Module]:
    """Return the subclass of ``base`` with the methods of ``sources``, made once per process."""
    key = (base, *sorted(sources.items()))
    if key not in _KNOWN:
        body: dict[str, Any] = {name: _compiled(base, name, text) for name, text in sources.items()}
        body |= {
            "__module__": base.__module__,
            "__qualname__": base.__qualname__,
            "__doc__": base.__doc__,
            "polyvision_base": base,
            "polyvision_sources": dict(sources),
        }
        _KNOWN[key] = type(base.__name__, (_Rewritten, base), body)
    return _KNOWN[key]


def _compiled(base: type, name: str, text: str) -> Callable[..., Any]:
    """Compile a method in the scope of the one it replaces, and give it that one's defaults."""
    home = next(cls for cls in base.__mro__ if name in vars(cls))
    old: Any = inspect.unwrap(vars(home)[name])
    cells = dict(zip(old.__code__.co_freevars, old.__closure__ or (), strict=True))
    file = f"<polyvision {base.__qualname__}.{name} {next(_SERIAL)}>"

    def like_old(made: Any) -> Any:
        for attribute in (*functools.WRAPPER_ASSIGNMENTS, "__defaults__", "__kwdefaults__"):
            setattr(made, attribute, getattr(old, attribute))
        made.__qualname__ = f"{home.__qualname__}.{name}"
        return made

    try:
        scope = {free: cell.cell_contents for free, cell in cells.items()} | {"__class__": home}
        scope[_LIKE_OLD] = like_old
        body = "\n".join(f"    {line}" for line in text.split("\n"))
        source = f"def scope({', '.join(scope)}):\n{body}\n    return {name}\n"
        # Tracebacks and torch.jit look here for the text.
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        flags = old.__code__.co_flags & FUTURES
        namespace: dict[str, Any] = {}
        code = compile(_bare(ast.parse(source)), file, "exec", flags, dont_inherit=True)
        exec(code, old.__globals__, namespace)
        made: Callable[..., Any] = namespace["scope"](**scope)
    except Exception as error:  # an empty cell, a decorator that only the class knows, ...
        raise CannotRewrite(
            f"{base.__qualname__}.{name} cannot be compiled outside of its class: {error}"
        ) from error
    return made


def _bare(tree: ast.Module) -> ast.Module:
    """Take the defaults and annotations from the method, which its class may be needed to evaluate.

    A decorator of ours puts back those of the old method, before the other decorators see it.
    """
    scope = tree.body[0]
    assert isinstance(scope, ast.FunctionDef)
    method = scope.body[0]
    assert isinstance(method, ast.FunctionDef)
    given, nothing = method.args, ast.Constant(None)
    given.defaults = [nothing for _ in given.defaults]
    given.kw_defaults = [default and nothing for default in given.kw_defaults]
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    for argument in every:
        if argument is not None:
            argument.annotation = None
    method.returns = None
    method.decorator_list.append(ast.Name(_LIKE_OLD, ast.Load()))
    return ast.fix_missing_locations(tree)
