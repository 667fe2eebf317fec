"""The order of imports, what an import costs, and the form of every public symbol."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def packages() -> dict[str, set[str]]:
    """Read the table of docs/architecture.md: package -> those that it may import.

    A package may import what it names, and what these may import. Rows come in this order, so
    nothing can stand on something above it.
    """
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w.]+)` \|[^|]*\|([^|]*)\|$", page, re.M)
    below: dict[str, set[str]] = {}
    for name, allowed in reversed(rows):
        direct = re.findall(r"`([\w.]+)`", allowed)
        assert set(direct) <= set(below), f"{name} names a package above it: {allowed}"
        below[name] = set(direct).union(*(below[other] for other in direct))
    return below


BELOW = packages()

# Packages that only these may import. `lightning` and `hydra` stay out of what others reuse.
ONLY_IN = {
    "triton": {"kernels"},
    "timm": {"models", "data", "training", "timm"},
    "torchvision": {"models", "data"},
    "sklearn": {"data"},
    "tokenizers": {"data"},
    "lightning": {"training"},
    "hydra": {"training", "cli"},
    "omegaconf": {"training", "cli"},
}
KERNELS_NEED = {"torch", "triton", "polyvision"}


def package_of(name: str) -> str:
    """Return the row of the table that a module belongs to: the longest that fits."""
    parts = name.split(".")
    prefixes = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((prefix for prefix in prefixes if prefix in BELOW), "polyvision")


def modules() -> dict[str, Path]:
    """Return every module of the package: dotted name under polyvision -> file."""
    found = {}
    for folder in ("polyvision", "kernels", "configs"):
        inside = ROOT / folder if folder == "polyvision" else ROOT
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(inside).with_suffix("").parts
            found[".".join(part for part in parts if part != "__init__")] = path
    return found


MODULES = modules()


def imports(name: str, path: Path) -> Iterator[tuple[str, int]]:
    """Yield (absolute dotted name, line) of every import in a file, also those in functions."""
    package = ["polyvision", *name.split(".")] if name else ["polyvision"]
    if path.name != "__init__.py":
        package.pop()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            # `from polyvision import kernels` names a package by its alias.
            names = (f"{source}.{alias.name}" for alias in node.names)
            yield from ((full, node.lineno) for full in names)


@pytest.mark.parametrize("name", MODULES)
def test_imports_go_only_downhill(name: str) -> None:
    package = package_of(name)
    file, wrong = MODULES[name].relative_to(ROOT), []
    for target, line in imports(name, MODULES[name]):
        top, _, rest = target.partition(".")
        if top == "polyvision":
            other = package_of(rest)
            allowed = other == package or other in BELOW[package]
        elif package == "kernels":
            allowed = top in KERNELS_NEED or top in sys.stdlib_module_names
        else:
            family = package.split(".")[0]
            allowed = top not in ("kernels", "configs") and family in ONLY_IN.get(top, {family})
        if not allowed:
            wrong.append(f"{file}:{line}: {package} imports {target}")
    assert not wrong


def test_no_folder_holds_more_than_fifteen_files() -> None:
    counts = Counter(path.parent for path in MODULES.values() if path.name != "__init__.py")
    assert len(counts) > 20
    assert [str(folder) for folder, count in counts.items() if count > 15] == []


def test_every_package_that_is_imported_is_a_declared_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    lines = project["dependencies"] + [line for e in extras if e != "dev" for line in extras[e]]
    declared = {re.split(r"[^\w-]", line)[0].lower() for line in lines}
    owners = importlib.metadata.packages_distributions()
    tops = {target.split(".")[0] for name in MODULES for target, _ in imports(name, MODULES[name])}
    foreign = tops - sys.stdlib_module_names - {"polyvision"}
    missing = {t for t in foreign if declared.isdisjoint(o.lower() for o in owners.get(t, [t]))}
    assert {"torch", "timm"} <= foreign
    assert not missing


def python(code: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_polyvision_loads_only_torch(tmp_path: Path) -> None:
    heavy = sorted({*ONLY_IN, "matplotlib", "tensorboard", "scipy", "torch._dynamo"})
    code = f"import sys, polyvision; print([m for m in {heavy} if m in sys.modules])"
    assert python(code, tmp_path).strip() == "[]"


def test_the_names_for_timm_come_with_polyvision_and_hide_nothing(tmp_path: Path) -> None:
    code = "import timm, polyvision; from polyvision import *; polyvision.timm.register(); "
    assert python(code + "print(timm.__name__)", tmp_path).strip() == "timm"


STATE = """
import os, random, sys, warnings
import torch
def state():
    return (dict(os.environ), list(sys.path), list(warnings.filters), random.getstate(),
            torch.get_rng_state().tolist(), torch.get_default_dtype(), torch.get_num_threads(),
            torch.is_grad_enabled(), torch.get_float32_matmul_precision())
before = state()
import kernels
assert state() == before
assert "triton" not in sys.modules
print(kernels.__file__)
"""


# A program that runs in the repository sees kernels/ under the name of another package.
OWNER_IS_INSTALLED = any(
    Path(entry, "kernels", "__init__.py").exists() for entry in sys.path if Path(entry) != ROOT
)


@pytest.mark.skipif(OWNER_IS_INSTALLED, reason="the package named kernels is installed")
def test_top_level_kernels_changes_nothing_when_imported(root: Path) -> None:
    # One line: the import itself prints nothing.
    assert python(STATE, root).splitlines() == [str(root / "kernels" / "__init__.py")]


def test_top_level_kernels_steps_aside_for_the_package_of_that_name(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "kernels"
    package.mkdir()
    (package / "__init__.py").write_text("from kernels.layer import Mode\n")
    (package / "layer.py").write_text("class Mode: ...\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code = (
        "import kernels, kernels.layer, polyvision.kernels, polyvision.kernels.reference; "
        "print(kernels.Mode is kernels.layer.Mode, kernels.__file__, polyvision.kernels.__file__)"
    )
    ours = root / "kernels" / "__init__.py"
    assert python(code, root).split() == ["True", str(package / "__init__.py"), str(ours)]


@pytest.mark.skipif(
    not (OWNER_IS_INSTALLED and importlib.util.find_spec("transformers")),
    reason="needs transformers and the package named kernels",
)
def test_transformers_works_in_the_root_of_the_repository(root: Path) -> None:
    code = "from transformers.activations import ACT2FN; print('silu' in ACT2FN)"
    assert python(code, root).strip() == "True"


def is_public_def(node: ast.AST) -> bool:
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    if not isinstance(node, kinds) or node.name.startswith("_"):
        return False
    # The signatures of an overloaded function stand before it, without docstrings.
    return "overload" not in map(ast.unparse, node.decorator_list)


def is_annotated(function: ast.FunctionDef | ast.AsyncFunctionDef, method: bool) -> bool:
    decorators = {ast.unparse(decorator) for decorator in function.decorator_list}
    # The arguments of a device function are pointers and tiles, not Python values.
    if any(text.startswith("triton.jit") for text in decorators):
        return True
    a = function.args
    arguments = [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))]
    own = arguments[1:] if method and "staticmethod" not in decorators else arguments
    return function.returns is not None and all(argument.annotation for argument in own)


def form_errors(scope: ast.Module | ast.ClassDef) -> Iterator[str]:
    """Yield what the public functions and classes of a scope lack, methods included."""
    for node in filter(is_public_def, scope.body):
        if not ast.get_docstring(node):
            yield f"line {node.lineno}: {node.name} has no docstring"
        if isinstance(node, ast.ClassDef):
            yield from form_errors(node)
        elif not is_annotated(node, method=isinstance(scope, ast.ClassDef)):
            yield f"line {node.lineno}: {node.name} is not fully annotated"


def target_of(node: ast.Assign | ast.AnnAssign) -> ast.expr:
    return node.targets[0] if isinstance(node, ast.Assign) else node.target


@pytest.mark.parametrize("name", MODULES)
def test_form_of_every_module(name: str) -> None:
    text = MODULES[name].read_text(encoding="utf-8")
    assert text.isascii()
    tree = ast.parse(text)
    assert ast.get_docstring(tree)
    assert not list(form_errors(tree))

    assigned = [node for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign)]
    variables = {t.id for t in map(target_of, assigned) if isinstance(t, ast.Name)}
    defined = {node.name for node in tree.body if is_public_def(node)}
    lazy = [n for node in tree.body if isinstance(node, ast.If) for n in node.body]  # for mypy
    imports = [n for n in (*tree.body, *lazy) if isinstance(n, ast.ImportFrom)]
    aliases = [alias for node in imports for alias in node.names]
    imported = {alias.asname or alias.name for alias in aliases}
    if "__all__" not in variables:
        assert not defined | imported, "no __all__"
        return
    listed = next(ast.literal_eval(n.value) for n in assigned if "__all__" in ast.unparse(n))
    assert len(set(listed)) == len(listed)
    assert set(listed) <= defined | imported | variables, "in __all__ but not defined"
    assert defined <= set(listed), "public by name but not in __all__"
