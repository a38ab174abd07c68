"""Pictures of the pages are of the product as it is."""

from __future__ import annotations

import json
from pathlib import Path

from fedprune_app.cli.demo import DEMO_SYSTEMS, demo_settings
from tests.docs.scripts import script

ASSETS = Path(__file__).parents[2] / "docs" / "assets"


def test_the_picture_of_the_report_is_of_the_demo_as_it_is():
    """After a change of the demo, ``make demo`` and ``python docs/scripts/report_picture.py`` take a new picture."""
    shown = json.loads((ASSETS / "report.json").read_text())
    assert {system: each["settings"] for system, each in shown.items()} == {
        system: demo_settings(system) for system in DEMO_SYSTEMS
    }


def test_the_moving_picture_is_small():
    assert (ASSETS / "masks.webp").stat().st_size < 400_000


def test_the_demo_s_report_on_the_site_is_of_the_same_runs_and_small_without_plotly():
    page = (ASSETS / "demo.html").read_text()
    assert page.count(script("site_hooks").WITHOUT_PLOTLY) == 1  # where the site puts it in
    assert len(page) < 300_000
    for system, each in json.loads((ASSETS / "report.json").read_text()).items():
        assert system in page
        assert f"{100 * each['accuracy']:.2f}" in page


def test_pages_of_advice_on_the_site_are_small_and_name_no_folder():
    pages = list((ASSETS / "advice").glob("*.html"))
    assert len(pages) == 3
    for page in pages:
        text = page.read_text()
        assert len(text) < 30_000
        assert "Should these sites federate?" in text
        assert "/tmp" not in text
