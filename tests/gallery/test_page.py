"""The gallery's page and files: each method has a configuration that runs, a docstring, and its place on the page."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

from tests.docs.scripts import script
from tests.gallery.federations import GALLERY, file_of

ROOT = GALLERY.parent
PAGE = (ROOT / "docs" / "systems" / "index.md").read_text()
FILES = sorted(set(GALLERY.glob("*.py")) - {GALLERY / "__init__.py"})
METHODS = sorted(file.stem for file in GALLERY.glob("*.toml"))
pytestmark = pytest.mark.usefixtures("no_plugins")


@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_a_file_is_short_and_has_a_place_on_the_page(file):
    text = file.read_text()
    header = ast.get_docstring(ast.parse(text))
    assert len(text.splitlines()) - len(header.splitlines()) <= 165
    assert "deviation" in header.lower()
    assert f"(../../gallery/{file.name})" in PAGE


@pytest.mark.parametrize("method", METHODS)
def test_each_configuration_can_start(fedprune, method):
    file, configuration = file_of(method), GALLERY / f"{method}.toml"
    code, said = fedprune("check", "--plugin", str(file), "-c", str(configuration), "--clients", "5")
    assert code == 0, said  # it takes one step of training too


def test_the_table_is_that_of_the_rows():
    rows = script("gallery_rows")
    assert rows.TABLE.read_text(encoding="utf-8") == rows.as_csv(rows.table())


def test_neither_the_bundle_nor_a_room_of_the_product_has_the_gallery():
    included = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["fab-include"]
    assert not any(GALLERY in file.parents for pattern in included for file in ROOT.glob(pattern.lstrip("/")))
    product = [file for room in ("fedprune_app", "strategies", "clients") for file in Path(ROOT / room).rglob("*.py")]
    assert not any(re.search(r"^\s*(from|import) gallery", file.read_text(), re.M) for file in product)
