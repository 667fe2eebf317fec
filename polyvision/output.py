"""Printing that fails no program: odd characters are escaped, a closed output is survived."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Any

__all__ = ["escape_output", "lasting_output", "say_error"]


def escape_output() -> None:
    """Let this process print characters that the output's encoding lacks as their numbers."""
    for stream in (sys.stdout, sys.stderr):
        if type(stream) is io.TextIOWrapper:  # not what a notebook or a test put there
            stream.reconfigure(errors="backslashreplace")


def lasting_output() -> None:
    """Do so, and go on without an output that cannot be written: closed, or on a full disk."""
    _fill_closed()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if type(stream) is io.TextIOWrapper:
            setattr(sys, name, _lasting(stream))


def _fill_closed() -> None:
    """Put the null device where the program was started with a standard stream closed.

    Else the next file that is opened takes its number, and gets what is written for a terminal.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number: this one
        if getattr(sys, name) is None:  # none where there is no console, too
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def _lasting(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    raw = _Lasting(stream)
    with contextlib.suppress(OSError):
        stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def say_error(error: Exception) -> None:
    """Print each line of an error; before, the traceback of another rank that it came from."""
    print(getattr(error, "details", ""), end="", file=sys.stderr)
    print("\n".join(f"error: {line}" for line in str(error).splitlines()), file=sys.stderr)


class _Lasting(io.FileIO):
    """Drop what cannot be written, and say so once."""

    def __init__(self, stream: io.TextIOWrapper) -> None:
        super().__init__(stream.fileno(), "w", closefd=False)
        self._stream = stream  # which would close the file if it were dropped
        self._said = False

    def write(self, data: Any) -> int:
        """Write, or do nothing."""
        try:
            written = super().write(data)
        except OSError as error:
            written = None
            if self.fileno() == 1 and not self._said:
                text = f"note: standard output: {error.strerror}; going on without it\n"
                with contextlib.suppress(OSError):
                    os.write(2, text.encode())
            self._said = True
        return len(data) if written is None else written
