"""The documents: links lead somewhere, and names of the package are real."""

import ast
import pkgutil
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
IDS = [str(page.relative_to(ROOT)) for page in PAGES]
BLOCK = re.compile(r"^ *```.*?^ *```", re.M | re.S)
NAME = r"polyvision(?:\.[A-Za-z_]\w*)+"


def anchors(page):
    """What GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.*)$", BLOCK.sub("", page.read_text(encoding="utf-8")), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_lead_to_a_file_and_a_heading(page):
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    bad = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"\w+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            bad.append(link)
    assert not bad


def test_names_of_the_package_are_real():
    names = set()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        names.update(re.findall(rf"`({NAME})[`(]", text))
        names.update(re.findall(rf"python -m ({NAME})", text))
        for module, members in re.findall(rf"^from ({NAME}|polyvision) import (.*)$", text, re.M):
            names.update(f"{module}.{member.strip()}" for member in members.split(","))
    assert "polyvision.load_model" in names
    bad = []
    for name in sorted(names):
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError):
            bad.append(name)
    assert not bad


def test_every_file_is_listed_with_its_first_line():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    text = text[text.index("## Files") :]
    listed = {}
    for folder, rows in re.findall(r"^### ([\w/]+)/\n\n(.*?)(?=^### |\Z)", text, re.M | re.S):
        for name, line in re.findall(r"^\| `(\w+)` \| (.*) \|$", rows, re.M):
            listed[f"{folder}/{name}.py"] = line
    files = {}
    for top in ("polyvision", "kernels"):
        for path in (ROOT / top).rglob("*.py"):
            if not path.name.startswith("__"):
                first = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))).split("\n")[
                    0
                ]
                line = first.replace("``", "`").replace("|", "\\|")
                files[path.relative_to(ROOT).as_posix()] = line
    assert listed == files
