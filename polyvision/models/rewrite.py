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
import __future__

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

from polyvision.models.calls import Target
from polyvision.models.target import Place

__all__ = ["CannotRewrite", "attribute_for", "drops_result", "rewritten_class", "source_of"]

_SERIAL = itertools.count()
_KNOWN: dict[tuple[Any, ...], type[nn.Module]] = {}


class CannotRewrite(Exception):
    """Why a call cannot be given a module; the text completes "not replaced: ..."."""


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
    inner = [_last_line(const) for const in code.co_consts if isinstance(const, CodeType)]
    return max([code.co_firstlineno, *inner, *(line or 0 for *_, line in code.co_lines())])


@functools.lru_cache(maxsize=8)
def _tree(file: str) -> ast.Module:
    lines = linecache.getlines(file)
    if not lines:
        raise CannotRewrite(f"the source of {file} cannot be read")
    return ast.parse("".join(lines))


@functools.lru_cache(maxsize=256)
def _definition(code: CodeType) -> ast.FunctionDef:
    """Return the syntax tree of the function that ``code`` was compiled from."""
    for node in ast.walk(_tree(code.co_filename)):
        if isinstance(node, ast.FunctionDef) and node.name == code.co_name:
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            if first == code.co_firstlineno:
                return node
    raise CannotRewrite(f"the source of {code.co_qualname} cannot be found")


def _edited_source(cls: type, name: str, edits: Mapping[Target, str]) -> str:
    """Return the source of the method with the calls changed, under the name it is found by."""
    code = _code_of(inspect.getattr_static(cls, name))
    assert code is not None
    definition = copy.deepcopy(_definition(code))
    definition.name = name
    editor = _Editor({_key_of(t.place): (t, a) for t, a in edits.items() if t.place})
    editor.visit(definition)
    if editor.edits:
        raise CannotRewrite(f"{code.co_qualname} has changed on disk since it was imported")
    private = [
        node.attr
        for node in ast.walk(definition)
        if isinstance(node, ast.Attribute) and node.attr[:2] == "__" != node.attr[-2:]
    ]
    if private:
        raise CannotRewrite(f"{code.co_qualname} uses the private name {private[0]}")
    return ast.unparse(ast.fix_missing_locations(definition))


def source_of(target: Target) -> str:
    """Return the text of the call or expression with its file and line, as far as known."""
    place = target.place
    if place is None:
        return target.caller
    where = f"{Path(place.file).name}:{place.line}"
    try:
        nodes = [node for node in ast.walk(_tree(place.file)) if _key(node) == _key_of(place)]
    except (CannotRewrite, SyntaxError):
        nodes = []
    return f"{ast.unparse(nodes[0])} ({where})" if nodes else where


def drops_result(target: Target) -> bool:
    """Tell whether the call is a statement, made only for what it does to its argument."""
    place = target.place
    if place is None:
        return False
    try:
        return (place.line, place.column) in _statements(place.file)
    except CannotRewrite:
        return False


@functools.lru_cache(maxsize=8)
def _statements(file: str) -> frozenset[tuple[int | None, int | None]]:
    nodes = (node for node in ast.walk(_tree(file)) if isinstance(node, ast.Expr))
    return frozenset((n.end_lineno, n.end_col_offset) for n in nodes)


_Key = tuple[int, int, tuple[int, int] | None]  # line and column of the end; start of an operator


def _key_of(place: Place) -> _Key:
    return place.line, place.column, place.start


def _key(node: ast.AST) -> _Key | None:
    """Return what tells the place of an expression, or of a statement such as ``x *= y``."""
    if not isinstance(node, ast.expr | ast.AugAssign) or not hasattr(node, "lineno"):
        return None
    start = None if isinstance(node, ast.Call) else (node.lineno, node.col_offset)
    return node.end_lineno or 0, node.end_col_offset or 0, start


class _Editor(ast.NodeTransformer):
    """Changes the calls and expressions at the given places."""

    def __init__(self, edits: dict[_Key, tuple[Target, str]]) -> None:
        self.edits = edits

    def visit(self, node: ast.AST) -> Any:
        """Replace one expression, or go on with what ``node`` holds."""
        key = _key(node)
        edit = self.edits.get(key) if key is not None else None
        if key is None or edit is None or not edit[0].expression:
            return super().visit(node)
        del self.edits[key]
        assert isinstance(node, ast.expr | ast.AugAssign)
        target, attribute = edit
        given = self.visit(_operand(node, target))
        function = ast.Attribute(ast.Name("self", ast.Load()), attribute, ast.Load())
        new = ast.Call(function, [given], [])
        if isinstance(node, ast.AugAssign):
            return ast.Assign([node.target], new)
        if target.inplace and isinstance(given, ast.Name):
            return ast.NamedExpr(ast.Name(given.id, ast.Store()), new)
        return new

    def visit_Call(self, node: ast.Call) -> ast.expr:
        """Replace one call."""
        self.generic_visit(node)
        edit = self.edits.pop((node.end_lineno or 0, node.end_col_offset or 0, None), None)
        if edit is None:
            return node
        target, attribute = edit
        function = ast.Attribute(ast.Name("self", ast.Load()), attribute, ast.Load())
        if target.module is not None:
            return ast.Call(function, node.args, node.keywords)
        given = _input(node, target)
        new = ast.Call(function, [given], [])
        if _is_inplace(node, target) and isinstance(given, ast.Name):
            # What the variable holds changed too: keep that.
            return ast.NamedExpr(ast.Name(given.id, ast.Store()), new)
        return new

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        """Replace a call whose result is dropped: it was made for what it does to its argument."""
        call = node.value
        is_call = isinstance(call, ast.Call)
        key = (node.end_lineno or 0, node.end_col_offset or 0, None)
        edit = self.edits.get(key) if is_call else None
        new = self.generic_visit(node)
        assert isinstance(new, ast.Expr)
        if edit is None or not isinstance(new.value, ast.Call):
            return new
        given = new.value.args[0]
        if not isinstance(given, ast.Attribute | ast.Subscript | ast.Name):
            raise CannotRewrite(f"{edit[0].caller} drops the result of {ast.unparse(new)}")
        place = copy.deepcopy(given)
        place.ctx = ast.Store()
        return ast.Assign([place], new.value)


def _input(node: ast.Call, target: Target) -> ast.expr:
    """Return the expression that the function is applied to."""
    if target.method and isinstance(node.func, ast.Attribute):
        return node.func.value
    if node.args and not isinstance(node.args[0], ast.Starred):
        return node.args[0]
    for keyword in node.keywords:
        if keyword.arg == "input":
            return keyword.value
    raise CannotRewrite(f"{target.caller} passes its input by * or **")


def _operand(node: ast.expr | ast.AugAssign, target: Target) -> ast.expr:
    """Return the source of the tensor that an expression is a function of."""
    assigned = [part for part in ast.walk(node) if isinstance(part, ast.NamedExpr)]
    given = _found_operand(node, target)
    for part in assigned:
        if isinstance(given, ast.Name) and given.id == part.target.id:
            given = part
    if any(part not in list(ast.walk(given)) for part in assigned):
        raise CannotRewrite(f"{target.caller} assigns a variable inside of {ast.unparse(node)}")
    return given


def _found_operand(node: ast.expr | ast.AugAssign, target: Target) -> ast.expr:
    operand = target.operand
    if operand is not None and operand.name is not None:
        return ast.Name(operand.name, ast.Load())
    if operand is not None and operand.place is not None:
        for part in ast.walk(node):
            if _key(part) != _key_of(operand.place):
                continue
            if isinstance(part, ast.BinOp):
                sides = [side for side in (part.left, part.right) if not _is_number(side)]
                if len(sides) == 1:
                    return sides[0]
            if isinstance(part, ast.UnaryOp):
                return part.operand
            if isinstance(part, ast.Call):
                is_method = operand.method and isinstance(part.func, ast.Attribute)
                values = [part.func.value, *part.args] if is_method else part.args  # type: ignore[attr-defined]
                if operand.index < len(values) and not isinstance(values[0], ast.Starred):
                    return values[operand.index]
    text = f"{target.kind} is written by hand"
    raise CannotRewrite(f"{text}, and {source_of(target)} does not hold its input under one name")


def _is_number(node: ast.expr) -> bool:
    if isinstance(node, ast.UnaryOp):
        return _is_number(node.operand)
    return isinstance(node, ast.Constant)


def _is_inplace(node: ast.Call, target: Target) -> bool:
    return target.inplace or any(
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
    """Compile a method in the scope of the one it replaces."""
    home = next(cls for cls in base.__mro__ if name in vars(cls))
    old = inspect.unwrap(vars(home)[name])
    cells = dict(zip(old.__code__.co_freevars, old.__closure__ or (), strict=True))
    scope = {free: cell.cell_contents for free, cell in cells.items()} | {"__class__": home}
    body = "\n".join(f"    {line}" for line in text.split("\n"))
    source = f"def scope({', '.join(scope)}):\n{body}\n    return {name}\n"
    file = f"<polyvision {base.__qualname__}.{name} {next(_SERIAL)}>"
    # Tracebacks and torch.jit look here for the text.
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    flags = old.__code__.co_flags & __future__.annotations.compiler_flag
    namespace: dict[str, Any] = {}
    try:
        code = compile(source, file, "exec", flags, dont_inherit=True)
    except SyntaxError as error:
        raise CannotRewrite(f"{base.__qualname__}.{name} would not be Python: {error}") from error
    exec(code, old.__globals__, namespace)
    made: Callable[..., Any] = namespace["scope"](**scope)
    made.__qualname__ = f"{home.__qualname__}.{name}"
    return made
