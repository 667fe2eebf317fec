"""Plugins: modules, files and installed packages that register activations."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from polyvision import PolyvisionError, activation_names, create_activation
from polyvision.activations import activation_origin, load_plugins, registry
from polyvision.activations.plugins import plugins_of

MINE = """
from torch import Tensor, nn
from polyvision import register_activation

@register_activation("{name}", kind="pointwise", source="a user", formula="2 x")
class Mine(nn.Module):
    def __init__(self, inplace: bool = False) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x
"""


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Undo what plugins register, and start in an empty folder."""
    activation_names()
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    monkeypatch.setattr(registry, "_FAILED", {})
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]
    registry._load_installed.cache_clear()


def write(path: str, text: str = MINE, name: str = "mine") -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text.replace("{name}", name))


def test_what_a_command_line_names() -> None:
    assert plugins_of(["act=x", "plugins=a.b"]) == ["a.b"]
    assert plugins_of(["plugins=[ a , 'b c/d.py',\"e.py\"]", "plugins=[f]"]) == [
        *("a", "b c/d.py", "e.py", "f")
    ]
    assert plugins_of(["plugins=[]", "plugins=null", "plugins=", "myplugins=x"]) == []


def test_a_file_registers_an_activation_once(tmp_path: Path) -> None:
    write("acts/my-file.py")
    load_plugins(["acts/my-file.py"])
    load_plugins([str(tmp_path / "acts" / "my-file.py"), "acts/../acts/my-file.py"])
    module = create_activation("mine")
    assert module(torch.tensor(3.0)) == 6
    assert pickle.loads(pickle.dumps(module))(torch.tensor(3.0)) == 6
    assert activation_origin("mine") == str(tmp_path / "acts" / "my-file.py")


def test_a_module_of_the_current_folder_registers_one() -> None:
    write("own_package/__init__.py", "")
    write("own_package/acts.py")
    load_plugins(["own_package.acts"])
    load_plugins(["own_package.acts", "own_package/acts.py"])
    assert "mine" in activation_names()
    assert activation_origin("mine") == "own_package.acts"


def test_what_is_installed_comes_before_the_current_folder() -> None:
    write("json.py", "raise RuntimeError('not the one of Python')")
    load_plugins(["json"])


@pytest.mark.parametrize(
    ("plugin", "text", "said"),
    [
        ("nothere.py", None, r"there is no file nothere.py \(looked for /.*/nothere.py\)"),
        ("nothere", None, r"there is no module 'nothere', neither installed nor in /.*: install"),
        ("torch.nothere", None, r"there is no module 'torch.nothere'"),
        ("a b", None, r"'a b' is neither a module"),
        ("acts/mine.txt", None, r"'acts/mine.txt' is neither a module"),
        ("bad.py", "x = 1\ny = (", r"bad.py cannot be loaded: SyntaxError: .*bad.py, line 2"),
        ("bad.py", "x = 1\n1 / 0", r"bad.py cannot be loaded: ZeroDivisionError: .*bad.py, line 2"),
        ("bad.py", "x = (", r"bad.py cannot be loaded: .*Error: '\(' was never closed \(/[^ ]*bad"),
        ("bad.py", "\0", r"bad.py cannot be loaded: SyntaxError: .* null bytes \(bad.py, line 1\)"),
        ("bad.py", "import sys\nsys.exit(3)", r"bad.py cannot be loaded: SystemExit: 3 \(.*line 2"),
        ("bad_one", "raise SystemExit", r"bad_one cannot be loaded: SystemExit.*line 1"),
        ("bad.py", "import nothere", r"bad.py cannot be loaded: ModuleNotFoundError: .*nothere"),
        ("bad_one", "import nothere", r"bad_one cannot be loaded: ModuleNotFoundError: .*nothere"),
        ("bad.py", MINE.replace("{name}", "relu"), r"named 'relu' is registered already \(.*bad"),
    ],
)
def test_a_mistake_names_the_plugin_and_the_place(plugin: str, text: str | None, said: str) -> None:
    if text is not None:
        write(plugin if plugin.endswith(".py") else f"{plugin}.py", text)
    with pytest.raises(PolyvisionError, match=rf"^plugins: .*{said}") as error:
        load_plugins([plugin])
    assert "\n" not in str(error.value)
    assert not [name for name in sys.modules if name.startswith("polyvision_plugin_bad")]


def test_two_files_of_one_name() -> None:
    write("a/acts.py")
    write("b/acts.py", name="other")
    with pytest.raises(PolyvisionError, match=r"b/acts.py and .*a/acts.py have the same name"):
        load_plugins(["a/acts.py", "b/acts.py"])


def installed(tmp_path: Path, name: str, value: str) -> None:
    """Put a distribution with one entry point beside the current folder."""
    folder = tmp_path / f"{name}-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(f"[polyvision.activations]\n{name} = {value}\n")


def test_an_installed_package_registers_itself(tmp_path: Path) -> None:
    write("good_package.py")
    installed(tmp_path, "good", "good_package")
    installed(tmp_path, "broken", "broken_package")
    sys.path.append(str(tmp_path))
    registry._load_installed.cache_clear()
    assert create_activation("mine")(torch.tensor(1.0)) == 2
    assert activation_origin("mine") == "good_package"
    with pytest.raises(PolyvisionError, match=r"'nine'. Did you mean 'mine'\?") as error:
        create_activation("nine")
    assert "The installed broken (ModuleNotFoundError: No module named" in str(error.value)
    assert "good " not in str(error.value)
