"""Every text file is UTF-8 by name: the default is what a machine's locale says."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILES = [
    *(
        p
        for folder in ("polyvision", "kernels", "benchmarks")
        for p in (ROOT / folder).rglob("*.py")
    ),
    *(ROOT / "tests").rglob("conftest.py"),
    *ROOT.glob("*.py"),
]
# Functions of other libraries, or of ours, that open no text file of ours.
_NO_TEXT = {"Image.open", "tarfile.open", "os.open", "tokenize.open"}


def without_encoding(source: str) -> Iterator[int]:
    """Yield the lines that open, read or write text in the encoding of the locale."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or any(
            k.arg in ("encoding", None) for k in node.keywords
        ):
            continue
        given = {k.arg for k in node.keywords}
        method = isinstance(node.func, ast.Attribute)
        name = ast.unparse(node.func)
        last = name.rsplit(".", 1)[-1]
        if last in ("read_text", "write_text"):
            if method:
                yield node.lineno
        elif last in ("open", "fdopen", "NamedTemporaryFile") and name not in _NO_TEXT:
            modes = [*node.args, *(k.value for k in node.keywords if k.arg == "mode")]
            texts = [str(m.value) for m in modes if isinstance(m, ast.Constant)]
            if not any("b" in text and len(text) <= 3 for text in texts):
                yield node.lineno
        elif given & {"text", "universal_newlines"} and last in ("run", "Popen", "check_output"):
            yield node.lineno


def test_every_text_file_names_its_encoding() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in FILES
        for line in without_encoding(path.read_text(encoding="utf-8"))
    ]
    assert len(FILES) > 100
    assert not wrong


def test_the_search_finds_what_it_is_for() -> None:
    wrong = ["p.read_text()", "p.write_text('x')", "open(p)", "p.open('a')", "open(p, mode='w')"]
    wrong += ["os.fdopen(n)", "subprocess.run(c, text=True)"]
    right = ["p.read_text(encoding='utf-8')", "open(p, 'rb')", "p.open(mode='wb')", "os.open(p, 1)"]
    right += ["read_text(p)", "subprocess.run(c)", "Image.open(f)"]
    assert [list(without_encoding(text)) for text in wrong] == [[1]] * len(wrong)
    assert [list(without_encoding(text)) for text in right] == [[]] * len(right)
