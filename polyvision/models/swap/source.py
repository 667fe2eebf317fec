"""The source of a function that runs, as a syntax tree; refused where it is another one's.

A file may have changed since it was imported, and a notebook reloads modules under living objects.
So the source is compiled and compared with the code object in use.
"""

from __future__ import annotations
import __future__

import ast
import copy
import functools
import linecache
import operator
import sys
import tokenize
from collections.abc import Iterator
from types import CodeType
from typing import Any

__all__ = ["FUTURES", "CannotRewrite", "definition_of", "tree_of", "with_inner"]

# The flags of ``from __future__ import ...`` in the code of a function.
FUTURES = functools.reduce(
    operator.or_, (getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
)


class CannotRewrite(Exception):
    """Why a call cannot be given a module; the text completes "not replaced: ..."."""


def with_inner(code: CodeType) -> Iterator[CodeType]:
    """Yield ``code`` and the code of all functions that are written inside of it."""
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from with_inner(const)


def _text(file: str) -> str:
    """Return what ``file`` says now; cells of notebooks are known to linecache only."""
    try:
        with tokenize.open(file) as source:
            return source.read()
    except (OSError, SyntaxError, UnicodeDecodeError):
        text = "".join(linecache.getlines(file))
    if not text:
        raise CannotRewrite(f"the source of {file} cannot be read")
    return text


@functools.lru_cache(maxsize=8)
def _tree(file: str, text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise CannotRewrite(f"{file} is no Python any more: {error}") from error


def tree_of(file: str) -> ast.Module:
    """Return the syntax tree of what ``file`` says now.

    Raises:
        CannotRewrite: it cannot be read, or is no Python.
    """
    return _tree(file, _text(file))


@functools.lru_cache(maxsize=8)
def _codes(file: str, text: str, flags: int, rewriter: Any) -> dict[tuple[str, int], CodeType]:
    """Compile ``text``; return all functions in it by qualified name and first line."""
    tree = _tree(file, text)
    if rewriter is not None:
        tree = copy.deepcopy(tree)
        rewriter(tree, text.encode())
    whole = compile(tree, file, "exec", flags, dont_inherit=True)
    return {(code.co_qualname, code.co_firstlineno): code for code in with_inner(whole)}


def definition_of(code: CodeType) -> ast.FunctionDef:
    """Return the syntax tree of the function that ``code`` was compiled from.

    Raises:
        CannotRewrite: there is none, or the source is not that of the code that runs.
    """
    file = code.co_filename
    text = _text(file)
    flags = code.co_flags & FUTURES
    # pytest compiles the assert statements of test files into code of its own.
    by_pytest = any("@pytest_ar" in inner.co_names for inner in with_inner(code))
    rewriter = sys.modules["_pytest.assertion.rewrite"].rewrite_asserts if by_pytest else None
    now = _codes(file, text, flags, rewriter).get((code.co_qualname, code.co_firstlineno))
    if now is None or not _same(code, now):
        raise CannotRewrite(
            f"{code.co_qualname} does not run what {file} says now: the file has changed since it "
            "was imported; restart Python, or reload the module and build the model again"
        )
    for node in ast.walk(_tree(file, text)):
        if isinstance(node, ast.FunctionDef) and node.name == code.co_name:
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            if first == code.co_firstlineno:
                return node
    raise CannotRewrite(f"{code.co_qualname} is not written as a def")


def _same(one: CodeType, other: CodeType) -> bool:
    """Tell whether two code objects do the same at the same places of their files."""
    return one == other and all(
        list(a.co_positions()) == list(b.co_positions())
        for a, b in zip(with_inner(one), with_inner(other), strict=True)
    )
