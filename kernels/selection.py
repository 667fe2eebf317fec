"""Which backend computes: by device, or as the user says.

``triton`` runs on NVIDIA and AMD GPUs, ``cpp`` on CPUs once the system compiler has built it, and
``reference`` everywhere. The variable ``POLYVISION_BACKEND`` or ``use_backend`` overrides this.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from types import ModuleType

from polyvision.errors import PolyvisionError, unknown

__all__ = ["BACKENDS", "VARIABLE", "choose", "load", "obstacle", "requested", "use_backend"]

BACKENDS = ("cpp", "reference", "triton")
VARIABLE = "POLYVISION_BACKEND"
_forced: str | None = None


def load(backend: str) -> ModuleType:
    """Import the module of one backend; its four functions are those of ``closed_form``."""
    if backend == "cpp":
        from polyvision.kernels.cpu import launch

        return launch
    if backend == "triton":
        from polyvision.kernels import triton

        return triton
    from polyvision.kernels import closed_form

    return closed_form


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Compute everything inside the block with one backend, in all threads.

    Raises:
        ValueError: no such backend; or, when an activation is computed, one that cannot run on the
            device of its input.

    Example:
        >>> with use_backend("reference"):
        ...     choose("cpu")
        'reference'
    """
    global _forced
    if name not in BACKENDS:
        raise unknown("backend", name, BACKENDS)
    previous, _forced = _forced, name
    try:
        yield
    finally:
        _forced = previous


def requested() -> tuple[str, str] | None:
    """Return the backend asked for and where it was asked for."""
    if _forced is not None:
        return _forced, "use_backend"
    name = os.environ.get(VARIABLE)
    if not name:
        return None
    if name not in BACKENDS:
        raise PolyvisionError(f"{VARIABLE}: {unknown('backend', name, BACKENDS)}")
    return name, VARIABLE


def obstacle(backend: str, device: str) -> str | None:
    """Say why a backend cannot run on a device type; None if it can."""
    if backend == "cpp":
        if device != "cpu":
            return "it runs on CPU tensors"
        from polyvision.kernels.cpu import build

        try:
            build.library()
        except build.BuildError as error:
            return str(error)
    elif backend == "triton":
        from polyvision.kernels import triton

        usable, reason = triton.available()
        if not usable:
            return reason
        if device != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            return "it runs on GPU tensors"
    return None


def choose(device: str) -> str:
    """Return the backend for tensors on a device of this type ("cpu", "cuda", ...).

    Raises:
        ValueError: the backend asked for is unknown or cannot run there; the text says why.
    """
    if request := requested():
        name, place = request
        if reason := obstacle(name, device):
            raise PolyvisionError(
                f"{place}: backend {name!r} cannot compute on {device!r}: {reason}. Use another of "
                f"{', '.join(BACKENDS)}, or unset it to let the device decide."
            )
        return name
    fused = {"cpu": "cpp", "cuda": "triton"}.get(device)
    return fused if fused and obstacle(fused, device) is None else "reference"
