"""Lines that cannot be used and are left out, up to a limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from polyvision.errors import PolyvisionError
from polyvision.output import plural

__all__ = ["BadLines"]


class BadLines:
    """Lines of JSON lines that cannot be used and are left out, up to a limit.

    Args:
        limit: how many may be left out.

    Attributes:
        reasons: for each file, what is wrong with which of its lines.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.reasons: dict[str, dict[int, str]] = {}

    def __len__(self) -> int:
        return sum(len(lines) for lines in self.reasons.values())

    def add(self, path: Path, line: int, reason: str) -> None:
        """Note a line, which may have been noted before.

        Raises:
            PolyvisionError: it is one more than the limit.
        """
        lines = self.reasons.setdefault(str(path), {})
        if line not in lines and len(self) >= self.limit:
            were = f"{plural(self.limit, 'line')} before it {'was' if self.limit == 1 else 'were'}"
            more = f"; {were} left out" if self.limit else ""
            raise PolyvisionError(f"{path}:{line}{reason}{more}; see --skip-bad-lines")
        lines[line] = reason

    def restore(self, noted: Mapping[str, Mapping[str | int, str]], paths: Sequence[Path]) -> None:
        """Take over what was noted of these files, which are not read again, and nothing else.

        Raises:
            PolyvisionError: these are more lines than the limit.
        """
        kept = [str(path) for path in paths if str(path) in noted]
        self.reasons = {}
        for path in kept:
            for line, reason in noted[path].items():
                self.add(Path(path), int(line), reason)
