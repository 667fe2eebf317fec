"""A formula as text: read into a tree without running any of it, and computed by torch.

The text is checked in three steps: its characters, then Python's own grammar (``ast.parse`` builds
a tree and runs nothing), then each node of that tree against the short lists in this module. What
is left is a tree of our own that holds numbers, names and functions from ``FUNCTIONS``.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import keyword
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from polyvision.errors import PolyvisionError, did_you_mean

__all__ = [
    "CONSTANTS",
    "FUNCTIONS",
    "Expression",
    "Function",
    "Node",
    "compute",
    "mistake",
    "read_expression",
]

INPUT = "x"
EPS = 1e-6  # of rms(...), as in PolyNorm
MAX_LENGTH, MAX_DEPTH, MAX_POWER = 500, 40, 16

CONSTANTS = {"pi": math.pi, "e": math.e}
_STATISTICS = frozenset({"mean", "rms"})
_CHARACTERS = re.compile(r"[A-Za-z0-9_ .,+\-*/()<>=]*")
_HINTS = {
    "^": "a power is written **",
    "|": "an absolute value is written abs(...)",
    "[": "parentheses are round",
    "{": "parentheses are round",
    "=": "options of functions are given in order, without their names",
}
_WORDS = {
    "if": "write where(x > 0, a, b)",
    "lambda": "write the formula alone",
    "and": "write one comparison inside the other: where(a, where(b, ...), ...)",
}


@dataclasses.dataclass(frozen=True)
class Function:
    """What a name in a formula computes.

    Attributes:
        compute: the torch function.
        arguments: how many it takes.
    """

    compute: Callable[..., Any]
    arguments: int = 1


# torch's own, but for softplus, which torch cuts off at 20, where float64 still tells it from x.
FUNCTIONS: dict[str, Function] = {
    **{
        name: Function(getattr(torch, name))
        for name in (
            *("abs", "sign", "square", "sqrt", "rsqrt", "exp", "expm1", "log", "log1p"),
            *("sin", "cos", "atan", "sinh", "cosh", "tanh", "asinh", "erf", "erfc"),
            *("sigmoid", "relu"),
        )
    },
    **{name: Function(getattr(F, name)) for name in ("logsigmoid", "gelu", "silu", "mish")},
    "softplus": Function(functools.partial(F.softplus, threshold=50)),
    "max": Function(torch.maximum, 2),
    "min": Function(torch.minimum, 2),
    "clamp": Function(torch.clamp, 3),
    "where": Function(torch.where, 3),
    "mean": Function(torch.mean),
    "rms": Function(lambda v, dim, keepdim: (v.square().mean(dim, keepdim) + EPS).sqrt()),
}
_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
    ast.Pow: lambda a, b: a**b,
    ast.USub: lambda a: -a,
    ast.Lt: lambda a, b: a < b,
    ast.LtE: lambda a, b: a <= b,
    ast.Gt: lambda a, b: a > b,
    ast.GtE: lambda a, b: a >= b,
}
_ALL_TENSORS = frozenset({"max", "min", "clamp", "where"})


@dataclasses.dataclass(frozen=True)
class Node:
    """A part of a formula.

    Attributes:
        kind: ``number``, ``name``, a name of ``FUNCTIONS`` or the name of an operator.
        value: the number or the name.
        arguments: the parts it is computed from.
        start: its first character in the text.
        end: the character after its last.
    """

    kind: str
    value: Any
    arguments: tuple[Node, ...]
    start: int
    end: int


@dataclasses.dataclass(frozen=True)
class Expression:
    """A formula that was read.

    Attributes:
        text: as it was given.
        root: its tree.
        names: the free names, which are neither the input nor constants, with the place of each.
        normalising: it has a mean or root mean square over the features.
    """

    text: str
    root: Node
    names: dict[str, int]
    normalising: bool

    def plain(self) -> str:
        """Return the text without spaces, the same for two that differ in these alone."""
        return re.sub(r"\s+", "", self.text)

    def nodes(self) -> list[Node]:
        """Return all parts, each after those that it is computed from."""
        return list(_below(self.root))


def _below(node: Node) -> list[Node]:
    return [n for argument in node.arguments for n in _below(argument)] + [node]


def mistake(text: str, start: int, problem: str) -> PolyvisionError:
    """Return the error for a mistake at character ``start`` of the formula ``text``."""
    shown = text if len(text) <= MAX_LENGTH else f"{text[:60]}..."
    return PolyvisionError(f"formula {shown!r}, column {start + 1}: {problem}")


@functools.lru_cache(maxsize=256)
def read_expression(text: str) -> Expression:
    """Read a formula of ``x``; nothing of it is run.

    Raises:
        PolyvisionError: it is not one; the text names the column and what to write.

    Example:
        >>> list(read_expression("x * sigmoid(b * x)").names)
        ['b']
    """
    return _Reader(text).read()


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.names: dict[str, int] = {}

    def fail(self, start: int, problem: str) -> NoReturn:
        raise mistake(self.text, start, problem) from None

    def read(self) -> Expression:
        text = re.sub(r"[\t\n\r]", " ", self.text)
        start = len(text) - len(text.lstrip())
        if not text.strip():
            self.fail(0, 'it is empty: write one of x, such as "x * sigmoid(b * x)"')
        if len(text) > MAX_LENGTH:
            self.fail(MAX_LENGTH, f"it is longer than {MAX_LENGTH} characters")
        self._check_characters(text)
        try:
            tree = ast.parse(text[start:], mode="eval").body
        except SyntaxError as error:
            if not error.offset:  # Python's mark for a text that stops where more must follow
                self.fail(len(text.rstrip()), "it cannot be read here (something is missing)")
            offset = min(start + error.offset - 1, len(text))
            self.fail(max(offset, 0), f"it cannot be read here ({error.msg})")
        except (ValueError, MemoryError, RecursionError):
            self.fail(start, "it is nested too deeply or has a number that is too long")
        self._shift = start
        root = self._node(tree, 1)
        uses = {n.value for n in _below(root) if n.kind == "name"}
        if INPUT not in uses:
            other = self.names.get(INPUT.upper())
            at, hint = (start, "") if other is None else (other, f", which is no {INPUT.upper()}")
            self.fail(at, f"it does not depend on the input, {INPUT}{hint}")
        if _compares(root):
            self.fail(root.start, "a comparison stands only in the first place of where(...)")
        normalising = any(n.kind in _STATISTICS for n in _below(root))
        return Expression(self.text, root, self.names, normalising)

    def _check_characters(self, text: str) -> None:
        good = _CHARACTERS.match(text)
        end = 0 if good is None else good.end()
        if end < len(text):
            hint = _HINTS.get(text[end], "")
            name = repr(text[end]) if text[end].isascii() else f"{text[end]!r} (not ASCII)"
            known = "numbers, names, + - * / **, comparisons, commas and parentheses"
            self.fail(end, f"{name} has no meaning here; {hint or f'a formula has {known}'}")
        for word in re.finditer(r"[A-Za-z_]\w*", text):
            if word[0] in keyword.kwlist:
                hint = _WORDS.get(word[0], "a formula has names, numbers and functions only")
                self.fail(word.start(), f"{word[0]!r} is a word of Python's own; {hint}")

    def _node(self, tree: ast.expr, depth: int) -> Node:
        start = tree.col_offset + self._shift
        end = (tree.end_col_offset or tree.col_offset) + self._shift
        if depth > MAX_DEPTH:
            self.fail(start, f"it is nested more than {MAX_DEPTH} deep")
        match tree:
            case ast.Constant(value=int() | float() as value):
                return Node("number", self._number(value, start), (), start, end)
            case ast.Name(id=name):
                return self._name(name, start, end)
            case ast.UnaryOp(op=ast.UAdd(), operand=operand):
                return self._node(operand, depth + 1)
            case ast.UnaryOp(op=ast.USub() as op, operand=operand):
                parts = [self._plain(operand, depth)]
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                parts = [self._plain(left, depth), self._plain(right, depth)]
                if isinstance(op, ast.Pow):
                    self._check_power(parts[1])
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _OPERATORS:
                parts = [self._plain(left, depth), self._plain(right, depth)]
            case ast.Call():
                return self._call(tree, depth, start, end)
            case _:
                self._refuse(tree, start)
        return self._folded(Node(type(op).__name__, None, tuple(parts), start, end))

    def _plain(self, tree: ast.expr, depth: int) -> Node:
        """Return a part that is a value, not a comparison."""
        node = self._node(tree, depth + 1)
        if _compares(node):
            self.fail(node.start, "a comparison stands only in the first place of where(...)")
        return node

    def _number(self, value: float, start: int) -> float:
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            self.fail(start, "the number is too large")
        return number

    def _name(self, name: str, start: int, end: int) -> Node:
        if name in CONSTANTS:
            return Node("number", CONSTANTS[name], (), start, end)
        if name in FUNCTIONS:
            self.fail(start, f"{name} is a function: write {name}(...)")
        if name.startswith("_"):
            self.fail(start, f"{name!r} is not a name here: names begin with a letter")
        if name != INPUT:
            self.names.setdefault(name, start)
        return Node("name", name, (), start, end)

    def _call(self, tree: ast.Call, depth: int, start: int, end: int) -> Node:
        place = tree.func.col_offset + self._shift
        if not isinstance(tree.func, ast.Name):
            if isinstance(tree.func, ast.Attribute):
                self._refuse(tree.func, place)
            self.fail(place, "only a function can stand before parentheses; a product needs *")
        name = tree.func.id
        if name not in FUNCTIONS:
            valid = ", ".join(sorted(FUNCTIONS))
            hint = did_you_mean(name, FUNCTIONS)
            self.fail(place, f"unknown function {name!r}.{hint} Valid: {valid}.")
        if tree.keywords:
            at = tree.keywords[0].value.col_offset + self._shift
            self.fail(at, f"{name}(...) takes its arguments in order, without their names")
        function, given = FUNCTIONS[name], len(tree.args)
        if given != function.arguments:
            takes = "1 argument" if function.arguments == 1 else f"{function.arguments} arguments"
            self.fail(place, f"{name}(...) takes {takes}, got {given}")
        if name == "where":
            condition = self._node(tree.args[0], depth + 1)
            if not _compares(condition):
                self.fail(condition.start, "where(...) begins with a comparison, such as x > 0")
            parts = [condition, *(self._plain(a, depth) for a in tree.args[1:])]
        else:
            parts = [self._plain(a, depth) for a in tree.args]
        node = Node(name, None, tuple(parts), start, end)
        if name in _STATISTICS and INPUT not in {n.value for n in _below(node)}:
            self.fail(start, f"{name}(...) is taken over the features of x, and x is not in it")
        return self._folded(node)

    def _check_power(self, exponent: Node) -> None:
        if exponent.kind == "number" and abs(exponent.value) > MAX_POWER:
            self.fail(exponent.start, f"a power is at most {MAX_POWER}, got {exponent.value:g}")

    def _folded(self, node: Node) -> Node:
        """Return a number in place of what is computed from numbers alone."""
        if _compares(node) or any(a.kind != "number" for a in node.arguments):
            return node
        numbers = [torch.tensor(a.value, dtype=torch.float64, device="cpu") for a in node.arguments]
        if not numbers:
            return node
        value = float(_function(node.kind)(*numbers))
        if not math.isfinite(value):
            self.fail(node.start, f"{self.text[node.start : node.end].strip()} is {value}")
        return Node("number", value, (), node.start, node.end)

    def _refuse(self, tree: ast.expr, start: int) -> NoReturn:
        match tree:
            case ast.Attribute(attr=attribute):
                known = f"write {attribute}(...)" if attribute in FUNCTIONS else "names have no dot"
                self.fail(start, f"{ast.unparse(tree)!r} is an attribute; {known}")
            case ast.Tuple():
                self.fail(
                    start, "there is more than one formula, or none: take one, without commas"
                )
            case ast.Compare():
                self.fail(start, "a comparison has two sides and one of < <= > >=")
            case ast.Constant():
                self.fail(start, "this is not a number that a formula can have")
            case ast.BinOp(op=ast.FloorDiv()):
                self.fail(start, "// has no derivative; a division is written /")
        self.fail(start, f"{ast.unparse(tree)} is not part of a formula")


_BY_NAME = {operator.__name__: function for operator, function in _OPERATORS.items()}
_COMPARISONS = frozenset({"Lt", "LtE", "Gt", "GtE"})


def _compares(node: Node) -> bool:
    return node.kind in _COMPARISONS


def _function(kind: str) -> Callable[..., Any]:
    return _BY_NAME[kind] if kind in _BY_NAME else FUNCTIONS[kind].compute


def compute(node: Node, values: Mapping[str, Tensor], dim: int) -> Any:
    """Compute a part of a formula.

    Args:
        node: the part, such as ``root`` of an ``Expression``.
        values: the input, ``x``, and the tensor of each free name.
        dim: the feature dimension, for mean and root mean square.

    Returns:
        A tensor, or a float where the part is a number.
    """
    if node.kind == "number":
        return node.value
    if node.kind == "name":
        return values[node.value]
    arguments = [compute(argument, values, dim) for argument in node.arguments]
    if node.kind in _STATISTICS:
        return _function(node.kind)(arguments[0], dim=dim, keepdim=True)
    if node.kind == "Pow" and isinstance(arguments[1], float) and arguments[1].is_integer():
        return arguments[0] ** int(arguments[1])
    if node.kind in _ALL_TENSORS:  # these take no plain numbers, or lose their dtype
        x = values[INPUT]
        arguments = [
            torch.full((), a, dtype=x.dtype, device=x.device) if isinstance(a, float) else a
            for a in arguments
        ]
    return _function(node.kind)(*arguments)
