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

from polyvision.models.swap.source import FUTURES, CannotRewrite, definition_of, tree_of, with_inner
from polyvision.models.trace.call import Call, Location

__all__ = ["CannotRewrite", "attribute_for", "rewritten_class", "source_of"]

_SERIAL = itertools.count()
_KNOWN: dict[tuple[Any, ...], type[nn.Module]] = {}
_LIKE_OLD = "polyvision_like_old"

# Line and column of the end of an expression, and for an operator where it starts.
_Key = tuple[int, int, tuple[int, int] | None]


class _Rewritten:
    """Marks the classes made here, and pickles their objects."""

    polyvision_base: type[nn.Module]
    polyvision_sources: Mapping[str, str]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        sources = tuple(self.polyvision_sources.items())
        return _restore, (self.polyvision_base, sources), self.__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[misc]  # of the base
        # nn.TransformerDecoderLayer puts F.relu in front of an activation that is a module.
        for name in state["_modules"]:
            vars(self).pop(name, None)


def _restore(base: type[nn.Module], sources: tuple[tuple[str, str], ...]) -> nn.Module:
    cls = _subclass(base, dict(sources))
    return cls.__new__(cls)


def _base_class(module: nn.Module) -> type[nn.Module]:
    """Return the class of ``module``, or the one it had before its calls were rewritten."""
    return module.polyvision_base if isinstance(module, _Rewritten) else type(module)


def attribute_for(call: Call, owner: nn.Module, taken: set[str]) -> str:
    """Return a free attribute of ``owner`` for the activation of ``call``."""
    name = call.kind if call.module is None else call.module.rpartition(".")[2]
    if not name.isidentifier():  # a number, in a Sequential
        name = f"act_{name}"
    numbered = itertools.chain([name], (f"{name}_{i}" for i in itertools.count(2)))
    return next(a for a in numbered if a not in taken and not hasattr(owner, a))


def rewritten_class(owner: nn.Module, calls: Mapping[Call, str]) -> type[nn.Module]:
    """Return a subclass in which each call of ``calls`` goes to the attribute named with it.

    Args:
        owner: the module whose methods hold the calls; it stays as it is.
        calls: call -> attribute that holds the new activation.

    Raises:
        CannotRewrite: the source is not at hand, or is not that of a method of the class.
    """
    sources = dict(getattr(owner, "polyvision_sources", {}))
    by_method: dict[str, dict[_Key | None, tuple[Call, str]]] = {}
    for call, attribute in calls.items():
        assert call.location is not None
        edits = by_method.setdefault(_method_of(owner, call, call.location), {})
        edits[_key(call.location)] = (call, attribute)
    for name, edits in by_method.items():
        sources[name] = _edited_source(type(owner), name, edits)
    return _subclass(_base_class(owner), sources)


def _method_of(owner: nn.Module, call: Call, location: Location) -> str:
    """Return the name of the method that contains ``call``."""
    for cls in type(owner).__mro__:
        for name, value in vars(cls).items():
            code = _code_of(value)
            if code is None or code.co_filename != location.file:
                continue
            if code.co_firstlineno <= location.line <= _last_line(code):
                if inspect.getattr_static(type(owner), name) is not value:
                    raise CannotRewrite(f"{call.caller} is reached through super()")
                return name
    raise CannotRewrite(f"{call.caller} is no method of {type(owner).__name__}")


def _code_of(value: Any) -> CodeType | None:
    function = inspect.unwrap(value) if callable(value) else None
    return function.__code__ if isinstance(function, FunctionType) else None


def _last_line(code: CodeType) -> int:
    return max(line or 0 for inner in with_inner(code) for *_, line in inner.co_lines())


def source_of(call: Call) -> str:
    """Return the text of the call or expression with its file and line, as far as known."""
    location = call.location
    if location is None:
        return call.caller
    where = f"{Path(location.file).name}:{location.line}"
    try:
        tree = tree_of(location.file)
    except CannotRewrite:
        return where
    node = next((node for node in ast.walk(tree) if _key(node) == _key(location)), None)
    return where if node is None else f"{ast.unparse(node)} ({where})"


def _key(place: Location | ast.AST | None) -> _Key | None:
    """Return what identifies an expression, or a statement such as ``x *= y``, in its file."""
    if isinstance(place, Location):
        return place.line, place.column, place.start
    if not isinstance(place, ast.expr | ast.AugAssign) or not hasattr(place, "lineno"):
        return None  # statements, and expressions made here
    start = None if isinstance(place, ast.Call) else (place.lineno, place.col_offset)
    return place.end_lineno or 0, place.end_col_offset or 0, start


def _edited_source(cls: type, name: str, edits: dict[_Key | None, tuple[Call, str]]) -> str:
    """Return the source of the method with the calls changed, under the name it is found by."""
    code = _code_of(inspect.getattr_static(cls, name))
    assert code is not None
    definition = copy.deepcopy(definition_of(code))
    definition.name = name
    parameters = [*definition.args.posonlyargs, *definition.args.args]
    editor = _Editor(parameters[0].arg if parameters else "self", edits)
    editor.visit(definition)
    if editor.edits:
        kinds = ", ".join(call.kind for call, _ in editor.edits.values())
        raise CannotRewrite(f"{code.co_qualname} makes no plain call of {kinds} there")
    private = [
        node.attr
        for node in ast.walk(definition)
        if isinstance(node, ast.Attribute) and node.attr[:2] == "__" != node.attr[-2:]
    ]
    if private:
        raise CannotRewrite(f"{code.co_qualname} uses the private name {private[0]}")
    return ast.unparse(ast.fix_missing_locations(definition))


class _Editor(ast.NodeTransformer):
    """Changes the calls and expressions at the given places into calls of a module."""

    def __init__(self, owner: str, edits: dict[_Key | None, tuple[Call, str]]) -> None:
        self.owner = owner  # what the method calls its module, mostly self
        self.edits = edits

    def visit(self, node: ast.AST) -> Any:
        """Replace one call or expression, or go on with what ``node`` holds."""
        edit = self.edits.pop(_key(node), None)
        if edit is None:
            return super().visit(node)
        call, attribute = edit
        function = ast.Attribute(ast.Name(self.owner, ast.Load()), attribute, ast.Load())
        if call.module is not None and isinstance(node, ast.Call):
            self.generic_visit(node)
            return ast.Call(function, node.args, node.keywords)
        assert isinstance(node, ast.expr | ast.AugAssign)
        given = self.visit(_operand(node, call))
        new = ast.Call(function, [given], [])
        if isinstance(node, ast.AugAssign):
            return ast.Assign([node.target], new)
        if (call.inplace or _says_inplace(node)) and isinstance(given, ast.Name):
            # What the variable holds changed too: keep that.
            return ast.NamedExpr(ast.Name(given.id, ast.Store()), new)
        return new

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        """Replace a call whose result is dropped: it was made for what it does to its argument."""
        edit = self.edits.get(_key(node.value)) if isinstance(node.value, ast.Call) else None
        new = self.generic_visit(node)
        assert isinstance(new, ast.Expr)
        if edit is None or not isinstance(new.value, ast.Call):
            return new
        given = new.value.args[0]
        if not isinstance(given, ast.Attribute | ast.Subscript | ast.Name):
            raise CannotRewrite(f"{edit[0].caller} drops the result of {ast.unparse(new)}")
        assigned = copy.deepcopy(given)
        assigned.ctx = ast.Store()
        return ast.Assign([assigned], new.value)


def _operand(node: ast.expr | ast.AugAssign, call: Call) -> ast.expr:
    """Return the source of the tensor that a function or expression is applied to."""
    given = _found_operand(node, call)
    assigned = [part for part in ast.walk(node) if isinstance(part, ast.NamedExpr)]
    for part in assigned:
        if isinstance(given, ast.Name) and given.id == part.target.id:
            given = part
    if any(part not in list(ast.walk(given)) for part in assigned):
        raise CannotRewrite(f"{call.caller} assigns a variable inside of {ast.unparse(node)}")
    return given


def _found_operand(node: ast.expr | ast.AugAssign, call: Call) -> ast.expr:
    operand = call.operand
    if operand is not None and operand.name is not None:
        return ast.Name(operand.name, ast.Load())
    if operand is not None and operand.location is not None:
        for part in ast.walk(node):
            if _key(part) != _key(operand.location):
                continue
            if isinstance(part, ast.BinOp):
                sides = [side for side in (part.left, part.right) if not _is_number(side)]
                if len(sides) == 1:
                    return sides[0]
            if isinstance(part, ast.UnaryOp):
                return part.operand
            if isinstance(part, ast.Call):
                given = list(part.args)
                if operand.method and isinstance(part.func, ast.Attribute):
                    given.insert(0, part.func.value)
                given += [k.value for k in part.keywords if k.arg == "input"]
                if operand.index < len(given) and not isinstance(given[0], ast.Starred):
                    return given[operand.index]
    if not call.expression:
        raise CannotRewrite(f"{call.caller} passes its input by * or **")
    raise CannotRewrite(
        f"{call.kind} is written by hand, and {ast.unparse(node)} does not hold its input under "
        "one name: write it as one expression of one variable, or as a module"
    )


def _is_number(node: ast.expr) -> bool:
    if isinstance(node, ast.UnaryOp):
        return _is_number(node.operand)
    return isinstance(node, ast.Constant)


def _says_inplace(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and any(
        k.arg == "inplace" and isinstance(k.value, ast.Constant) and k.value.value is True
        for k in node.keywords
    )


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
