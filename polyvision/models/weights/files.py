"""The one reader of weight files: checksums are compared, and no code from a file is ever run."""

from __future__ import annotations

import hashlib
import re
import sys
import warnings
import zipfile
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from polyvision.errors import PolyvisionError

__all__ = ["file_digest", "read_checkpoint", "read_tensor_file"]

_UNSUPPORTED = re.compile(r"Unsupported (?:global: GLOBAL|class) ([\w.]+)")


def read_tensor_file(path: str | Path, *, what: str = "weights", sha256: str | None = None) -> Any:
    """Read a file of ``torch.save`` or safetensors, on the CPU.

    ``torch.load`` ignores the checksums that ``torch.save`` writes, so they are compared here.
    A safetensors file has none: its digest must come from elsewhere, such as an export's
    ``config.json``.

    Args:
        path: the file.
        what: what it should be, for the message.
        sha256: the digest of the file when it was written, if that is known.

    Raises:
        PolyvisionError: the file cannot be read, is damaged, or holds more than tensors and plain
            values.
    """
    path = Path(path)
    try:
        if sha256 is not None and file_digest(path) != sha256:
            raise zipfile.BadZipFile("its content is not what was written (SHA-256 differs)")
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        _compare_checksums(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # what is wrong is said below
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of zip, pickle, safetensors or the file system
        reason = _explanation(path, error) or " ".join(str(error).split()) or type(error).__name__
        raise PolyvisionError(f"{path} cannot be read as {what}: {reason}") from error


def read_checkpoint(path: Path, *, what: str = "weights") -> tuple[Path, dict[str, Any]]:
    """Read a checkpoint of a run; where its ``last.ckpt`` is damaged, the one before, and say so.

    Args:
        path: the file.
        what: what it should be, for the message.

    Returns:
        The file that was read, and its content.

    Raises:
        PolyvisionError: it cannot be read, and neither can ``previous.ckpt`` in its place.
    """
    previous = path.with_name("previous.ckpt")
    try:
        return path, _run_state(path, what)
    except PolyvisionError as error:
        if path.name != "last.ckpt" or not previous.is_file():
            raise
        try:
            state = _run_state(previous, what)
        except PolyvisionError as second:
            raise PolyvisionError(f"{error}\n{second}") from second
        print(f"warning: {error}: going on from {previous}", file=sys.stderr, flush=True)
        return previous, state


def _run_state(path: Path, what: str) -> dict[str, Any]:
    state = read_tensor_file(path, what=what)
    if not isinstance(state, dict) or not {"state_dict", "global_step"} <= set(state):
        raise PolyvisionError(f"{path} is not the checkpoint of a run")
    return state


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _compare_checksums(path: Path) -> None:
    """Compare every entry of a zip file of ``torch.save`` with its checksum."""
    with path.open("rb") as file:
        if file.read(2) != b"PK":  # the format before torch 1.6, which has no checksums
            return
    with zipfile.ZipFile(path) as archive:
        if not any(name.endswith("data.pkl") for name in archive.namelist()):
            raise zipfile.BadZipFile("it is a zip file, but none of torch.save")
        # torch.serialization.set_crc32_options(False) writes zeros.
        if all(entry.CRC == 0 for entry in archive.infolist()):
            return
        damaged = archive.testzip()
    if damaged is not None:
        raise zipfile.BadZipFile(f"{damaged} in it is not what was written")


def _explanation(path: Path, error: Exception) -> str | None:
    """Return what is wrong in our words where torch's take a page, or None."""
    if isinstance(error, FileNotFoundError):
        return "there is no such file"
    text = str(error)
    if "TorchScript archives" in text:
        return (
            "it is a TorchScript program, not a state_dict. Save its weights first: "
            "torch.save(torch.jit.load(path).state_dict(), 'weights.pth')"
        )
    if found := _UNSUPPORTED.search(text):
        return (
            f"it holds a pickled {found[1]} beside or instead of tensors, and reading that could "
            f"run code from the file. If you trust it, save its weights alone: for a whole model "
            f"torch.save(torch.load(path, weights_only=False).state_dict(), 'weights.pth')"
        )
    if isinstance(error, KeyError | UnpicklingError):
        return "it is not a file of torch.save, or is damaged"
    return None
