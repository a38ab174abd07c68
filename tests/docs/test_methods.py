"""The table of all methods says what their classes declare, and has a row for each."""

from __future__ import annotations

import pytest

from fedprune_app.registry import SYSTEMS
from tests.docs.blocks import ROOT
from tests.docs.scripts import script

methods = script("methods")
pytestmark = pytest.mark.usefixtures("no_plugins")


def test_the_table_of_all_methods_says_what_their_classes_declare():
    page = methods.PAGE.read_text()
    assert methods.written(page) == page, "write it anew: python docs/scripts/methods.py write"


def test_every_method_of_the_product_and_of_the_gallery_has_a_row():
    gallery = {path.stem for path in (ROOT / "gallery").glob("*.toml")}
    assert methods.METHODS.keys() == SYSTEMS.keys() | gallery
    measured = [row["system"] for row in methods.read_rows(methods.DATA)]
    assert sorted(measured) == sorted(methods.METHODS.keys() - methods.TEXT.keys())


@pytest.mark.full
def test_a_run_of_a_sparse_method_has_the_shares_of_its_row():
    rows = {row["system"]: row for row in methods.read_rows(methods.DATA)}
    alone = methods.measured(methods.settings_of("fedavg"))
    sparse = methods.measured(methods.settings_of("ssfl"))
    assert rows["ssfl"]["file"] == f"{sparse['file'] / alone['file']:.3f}"
    assert rows["ssfl"]["upload"] == f"{sparse['bytes_up'] / alone['bytes_up']:.3f}"
