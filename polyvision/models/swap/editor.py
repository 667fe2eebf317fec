"""Change calls and expressions in the syntax tree of a method into calls of a module."""

from __future__ import annotations

import ast
import copy
from typing import Any

from polyvision.models.swap.source import CannotRewrite
from polyvision.models.trace.target import Place, Target

__all__ = ["Editor", "Key", "key_of_node", "key_of_place"]

Key = tuple[int, int, tuple[int, int] | None]  # line and column of the end; start of an operator


def key_of_place(place: Place) -> Key:
    """Return what names the expression at ``place`` within its file."""
    return place.line, place.column, place.start


def key_of_node(node: ast.AST) -> Key | None:
    """Return what tells the place of an expression, or of a statement such as ``x *= y``."""
    if not isinstance(node, ast.expr | ast.AugAssign) or not hasattr(node, "lineno"):
        return None
    start = None if isinstance(node, ast.Call) else (node.lineno, node.col_offset)
    return node.end_lineno or 0, node.end_col_offset or 0, start


class Editor(ast.NodeTransformer):
    """Changes the calls and expressions at the given places."""

    def __init__(self, owner: str, edits: dict[Key, tuple[Target, str]]) -> None:
        self.owner = owner  # what the method calls its module, mostly self
        self.edits = edits

    def visit(self, node: ast.AST) -> Any:
        """Replace one expression, or go on with what ``node`` holds."""
        key = key_of_node(node)
        edit = self.edits.get(key) if key is not None else None
        if key is None or edit is None or not edit[0].expression:
            return super().visit(node)
        del self.edits[key]
        assert isinstance(node, ast.expr | ast.AugAssign)
        target, attribute = edit
        given = self.visit(_operand(node, target))
        function = ast.Attribute(ast.Name(self.owner, ast.Load()), attribute, ast.Load())
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
        function = ast.Attribute(ast.Name(self.owner, ast.Load()), attribute, ast.Load())
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
            if key_of_node(part) != key_of_place(operand.place):
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
    raise CannotRewrite(
        f"{target.kind} is written by hand, and {ast.unparse(node)} does not hold its input under "
        "one name"
    )


def _is_number(node: ast.expr) -> bool:
    if isinstance(node, ast.UnaryOp):
        return _is_number(node.operand)
    return isinstance(node, ast.Constant)


def _is_inplace(node: ast.Call, target: Target) -> bool:
    return target.inplace or any(
        k.arg == "inplace" and isinstance(k.value, ast.Constant) and k.value.value is True
        for k in node.keywords
    )
