"""Builds the C++ kernels once with the system compiler and loads them.

The sources need no headers of PyTorch or Python: tensors are passed as addresses and strides. So a
build takes seconds and fits every version of PyTorch. The library lies in a cache directory under a
name made from the sources, the flags, the compiler, the CPU and the version of PyTorch.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from polyvision.files import cache_folder, whole_file

__all__ = ["BuildError", "compiler", "library", "library_path"]

_HERE = Path(__file__).parent
_SOURCES = ("kernels.cpp", "norm.h", "relu.h", "strips.h", "vectors.h")
_TIMEOUT_S = 600


class BuildError(RuntimeError):
    """The kernels cannot be built or loaded here; the text says why."""


def compiler() -> str:
    """Return the path of the C++ compiler: ``$CXX`` or the first of g++, clang++, c++.

    Raises:
        BuildError: there is none.
    """
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
    for name in names:
        if path := shutil.which(name):
            return path
    raise BuildError(f"no C++ compiler found (looked for {', '.join(names)})")


def _flags() -> list[str]:
    native = "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"
    return [
        "-std=c++17",
        # Of -O3 what pays here: a choice that is the same for all elements leaves the loop.
        *("-O2", "-funswitch-loops", "-fpeel-loops", native),
        *("-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"),
        # OpenMP: the library shares PyTorch's runtime, which is loaded already, and its threads.
        *("-fopenmp", "-fPIC", "-shared"),
    ]


def _cpu() -> str:
    """Return what ``-march=native`` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    wanted = ("flags", "Features", "model name", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def library_path() -> Path:
    """Return where the library lies or would lie.

    Raises:
        BuildError: there is no compiler, whose version is part of the name.
    """
    command = compiler()
    version = subprocess.run(
        [command, "--version"], capture_output=True, encoding="utf-8", errors="replace", check=False
    )
    parts = [version.stdout, *_flags(), _cpu(), torch.__version__]
    parts += [(_HERE / name).read_text(encoding="utf-8") for name in _SOURCES]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return cache_folder() / f"cpu-{digest}.so"


def _build(path: Path) -> None:
    """Compile under another name, then move: others see all or nothing."""
    print(f"polyvision: building the CPU kernels, once, into {path}", file=sys.stderr, flush=True)
    with whole_file(path) as partial:
        command = [compiler(), *_flags(), str(_HERE / _SOURCES[0]), "-o", str(partial)]
        result = subprocess.run(
            command,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
        )
        if result.returncode != 0:
            lines = [line for line in result.stderr.splitlines() if "error" in line]
            reason = (lines or result.stderr.splitlines() or ["no message"])[0]
            raise BuildError(f"{command[0]} failed: {reason}")


def _build_alone(path: Path) -> None:
    """Build unless another process does; then wait for it."""
    import fcntl  # POSIX only, like the rest of this build

    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            _build(path)


def _load() -> Callable[[bytes, int, int], int]:
    try:
        path = library_path()
        if not path.exists():
            _build_alone(path)
        run = ctypes.CDLL(str(path)).polyvision_run
    except (OSError, ImportError, subprocess.SubprocessError) as error:
        raise BuildError(str(error)) from error
    run.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_int]
    run.restype = ctypes.c_int
    return run


_lock = threading.Lock()
_loaded: Callable[[bytes, int, int], int] | BuildError | None = None


def library() -> Callable[[bytes, int, int], int]:
    """Return the entry point ``run(call, is_norm, backward)``, building the library if need be.

    A failure is reported once as a warning and remembered.

    Raises:
        BuildError: there is no library; the text says why.
    """
    global _loaded
    if _loaded is None:
        with _lock:
            if _loaded is None:
                try:
                    _loaded = _load()
                except BuildError as error:
                    _loaded = error
                    warnings.warn(
                        f"polyvision: no C++ kernels on this machine ({error}); CPU tensors take "
                        "the slower reference path. `polyvision env` shows the details.",
                        RuntimeWarning,
                        stacklevel=2,
                    )
    if isinstance(_loaded, BuildError):
        raise _loaded
    return _loaded
