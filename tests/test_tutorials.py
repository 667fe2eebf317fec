"""The Python code of the tutorials runs, block after block."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGES = sorted((Path(__file__).parent.parent / "docs" / "tutorials").glob("*.md"))
# A block whose text before it ends in a file name is that file; the others run in order.
BLOCK = re.compile(r"(?:`(\w+\.py)`:\n\n)?^```python\n(.*?)^```", re.M | re.S)
WITH_CODE = [page for page in PAGES if BLOCK.search(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.stem)
def test_the_code_of_a_tutorial_runs(page: Path, tmp_path: Path) -> None:
    program = []
    for file, code in BLOCK.findall(page.read_text(encoding="utf-8")):
        if file:
            (tmp_path / file).write_text(code, encoding="utf-8")
        else:
            program.append(code)
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(program)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(program) >= 1
