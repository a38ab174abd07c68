"""A name of code that a page links to is in that file; each system's page has its algorithm beside the code."""

from __future__ import annotations

import ast
import re

import pytest

from tests.docs.blocks import ROOT

_NAME = re.compile(r"\[`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)?)`\]\(([^)\s#]+\.py)\)")
PAGES = sorted((ROOT / "docs" / "systems").glob("*.md"))


def definitions(path):
    """Return the functions and classes of a file, methods as `Class.method`."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
            inner = node.body if isinstance(node, ast.ClassDef) else []
            names |= {f"{node.name}.{member.name}" for member in inner if isinstance(member, ast.FunctionDef)}
    return names


def unknown_names(page):
    """Return the names that the page links to a file which does not define them."""
    return [
        f"{name} in {target}"
        for name, target in _NAME.findall(page.read_text(encoding="utf-8"))
        if not name.endswith(".py") and name not in definitions(page.parent / target)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_name_that_a_system_page_links_to_is_defined_in_that_file(page):
    assert unknown_names(page) == []


def test_a_name_that_is_gone_is_found(tmp_path):
    (tmp_path / "code.py").write_text("class A:\n    def b(self): ...\n")
    page = tmp_path / "page.md"
    page.write_text("[`A.b`](code.py) [`A`](code.py) [`code.py`](code.py) [`A.c`](code.py) [`d`](code.py)\n")
    assert unknown_names(page) == ["A.c in code.py", "d in code.py"]


@pytest.mark.parametrize("system", ["dispfl", "fedltp", "fedp3", "fedspallm", "subfedavg"])
def test_each_line_of_the_algorithm_has_its_code(system):
    page = (ROOT / "docs" / "systems" / f"{system}.md").read_text(encoding="utf-8")
    tables = re.findall(r"^\| line \| step \| code \|\n\| --- .*\n((?:\|.*\n)+)", page, re.M)
    rows = [row for table in tables for row in table.splitlines()]
    assert len(rows) >= 7
    assert [row for row in rows if not _NAME.search(row)] == []
