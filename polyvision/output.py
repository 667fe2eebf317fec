"""What is printed: numbers with units that fit, and output that fails no program.

Characters that the output lacks are escaped, and a closed output or a full disk is survived.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Any

__all__ = [
    "count",
    "duration",
    "escape_output",
    "lasting_output",
    "plural",
    "say_error",
    "size",
]


def count(number: float) -> str:
    """Shorten a large number: 23.5M."""
    for limit, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= 0.9995 * limit:  # three digits of it would be a whole one
            return f"{number / limit:.3g}{unit}"
    return f"{number:.3g}"


def size(number: float) -> str:
    """Bytes in binary units: 89.9 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(number) < 1024 or unit == "GiB":
            break
        number /= 1024
    return f"{number:.1f} {unit}"


def duration(seconds: float) -> str:
    """A time in the two largest units that fit: 8.4 s, 3 min 20 s, 2 h 5 min."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def plural(number: int, noun: str) -> str:
    """Count a noun: 1 thread, 2,000 threads."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


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
