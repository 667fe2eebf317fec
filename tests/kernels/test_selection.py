"""Which backend is chosen, and the build of the C++ library in every kind of surroundings."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from polyvision.kernels import selection
from polyvision.kernels.cpu import build

from polyvision import cli, kernels
from polyvision import functional as F
from polyvision.data.text import cache
from polyvision.files import cache_folder

RUN = """
import torch, warnings
warnings.simplefilter("always")
from polyvision import PolyNorm, kernels
x = torch.arange(12.0).view(3, 4).requires_grad_()
PolyNorm()(x).sum().backward()
print(kernels.selection.choose("cpu"))
"""


def start(code, **environment):
    variables = {k: v for k, v in os.environ.items() if not k.startswith("POLYVISION")}
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**variables, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out.strip(), err


@pytest.fixture
def stub(tmp_path):
    """A compiler that takes its time and copies the library that is built already."""
    build.library()
    path = tmp_path / "c++"
    path.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = --version ]; then echo stub; exit; fi\n'
        f"echo built >> {tmp_path}/log\nsleep 1\n"
        f'while [ "$1" != -o ]; do shift; done\ncp {build.library_path()} "$2"\n'
    )
    path.chmod(0o755)
    return str(path)


def test_device_decides(monkeypatch):
    monkeypatch.delenv("POLYVISION_BACKEND", raising=False)
    assert selection.choose("cpu") == "cpp"
    assert selection.choose("mps") == "reference"


def test_override_by_variable_and_by_context(monkeypatch):
    monkeypatch.setenv("POLYVISION_BACKEND", "reference")
    assert selection.choose("cpu") == "reference"
    with kernels.use_backend("cpp"):
        assert selection.choose("cpu") == "cpp"
        with kernels.use_backend("reference"):
            assert selection.choose("cpu") == "reference"
        assert selection.choose("cpu") == "cpp"
    assert selection.choose("cpu") == "reference"


def test_mistakes_name_the_choices(monkeypatch):
    with pytest.raises(
        ValueError, match=r"'triten'.*Did you mean 'triton'.*cpp, reference, triton"
    ):
        kernels.use_backend("triten").__enter__()
    with (
        kernels.use_backend("cpp"),
        pytest.raises(ValueError, match=r"use_backend.*'cpp' cannot compute on 'meta'"),
    ):
        F.poly_norm(torch.empty(2, 3, device="meta"), torch.ones(3, device="meta"))
    monkeypatch.setenv("POLYVISION_BACKEND", "triton")
    with pytest.raises(ValueError, match=r"POLYVISION_BACKEND.*'triton' cannot compute on 'cpu'"):
        F.poly_norm(torch.ones(2, 3), torch.ones(3))
    monkeypatch.setenv("POLYVISION_BACKEND", "c++")
    with pytest.raises(ValueError, match=r"POLYVISION_BACKEND.*'c\+\+'.*cpp, reference, triton"):
        F.poly_norm(torch.ones(2, 3), torch.ones(3))


def test_backward_stays_with_the_backend_of_its_forward():
    x = torch.randn(4, 16, requires_grad=True)
    weight = torch.tensor([0.5, -0.2, 0.7])
    with kernels.use_backend("reference"):
        y = F.poly_norm(x, weight)
    (found,) = torch.autograd.grad(y.sum(), x)
    (other,) = torch.autograd.grad(F.poly_norm(x, weight).sum(), x)
    torch.testing.assert_close(found, other)


def test_what_no_kernel_takes_falls_back():
    x, mul = torch.randn(4, 16, dtype=torch.bfloat16), torch.randn(4, 16)
    y = F.poly_norm(x, torch.ones(3), mul=mul)
    torch.testing.assert_close(
        y.float(), F.poly_norm(x.float(), torch.ones(3)) * mul, rtol=1e-2, atol=1e-2
    )


def test_env_command(capsys):
    assert cli.main(["env"]) == 0
    printed = capsys.readouterr().out
    for part in (torch.__version__, "computes with 'cpp'", "triton", str(cache_folder())):
        assert part in printed


def test_env_command_reports_a_mistake(capsys, monkeypatch):
    monkeypatch.setenv("POLYVISION_BACKEND", "none")
    assert cli.main(["env"]) == 2
    assert "POLYVISION_BACKEND" in capsys.readouterr().err


def test_cache_directory(monkeypatch):
    monkeypatch.delenv("POLYVISION_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_folder() == Path("/somewhere/polyvision")
    monkeypatch.setenv("POLYVISION_CACHE", "/else")
    assert cache_folder() == Path("/else")


def test_the_library_lies_in_the_same_cache_as_all_else(monkeypatch):
    monkeypatch.setenv("HOME", "/h")
    monkeypatch.delenv("POLYVISION_CACHE", raising=False)
    for variable, value, folder in (
        ("XDG_CACHE_HOME", "~/x", "/h/x/polyvision"),
        ("POLYVISION_CACHE", "~/own", "/h/own"),
        ("POLYVISION_CACHE", "", "/h/x/polyvision"),
    ):
        monkeypatch.setenv(variable, value)
        assert build.library_path().parent == cache.cache_folder() == Path(folder)


def test_several_processes_build_once(stub, tmp_path):
    cache = str(tmp_path / "cache")
    runs = [start(RUN, CXX=stub, POLYVISION_CACHE=cache) for _ in range(3)]
    results = [finish(run) for run in runs]
    assert [out for out, _ in results] == ["cpp"] * 3
    assert (tmp_path / "log").read_text() == "built\n"
    assert sum("building the CPU kernels" in err for _, err in results) == 1
    assert not [*Path(cache).glob("*.tmp"), *Path(cache).glob("*.partial")]
    (library,) = Path(cache).glob("*.so")
    assert library.stat().st_mode & 0o777 == 0o755  # another user may load it


@pytest.mark.parametrize(
    "case", ["no compiler", "broken compiler", "half a library", "read-only cache"]
)
def test_without_a_build_the_reference_computes(case, stub, tmp_path):
    cache = tmp_path / "cache"
    environment = {"CXX": stub, "POLYVISION_CACHE": str(cache)}
    if case == "no compiler":
        environment["CXX"] = str(tmp_path / "missing")
    elif case == "broken compiler":
        environment["CXX"] = "/bin/false"
    elif case == "half a library":
        half = tmp_path / "half"
        half.write_text(
            '#!/bin/sh\n[ "$1" = --version ] && exit\n'
            'while [ "$1" != -o ]; do shift; done\necho half > "$2"\nexit 1\n'
        )
        half.chmod(0o755)
        environment["CXX"] = str(half)
    else:
        cache.write_text("a file stands where the directory should be")
    out, err = finish(start(RUN, **environment))
    assert out == "reference"
    assert err.count("no C++ kernels on this machine") == 1
    assert "Traceback" not in err
    assert cache.is_file() or not [p for p in cache.glob("*") if p.suffix != ".lock"]


def test_the_library_shares_the_threads_of_torch():
    """A second OpenMP runtime would start threads of its own."""
    if not Path("/proc/self/maps").exists():
        pytest.skip("needs /proc")
    # In a process of its own: other packages bring runtimes too.
    program = (
        "import torch\n"
        "from polyvision.kernels.cpu import build\n"
        "build.library()\n"
        "maps = open('/proc/self/maps').read().splitlines()\n"
        "print(len({line.split()[-1] for line in maps if 'gomp' in line}))\n"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert found.stdout.strip() in ("0", "1"), found.stderr
