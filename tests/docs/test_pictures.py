"""Pictures of the pages are of the product as it is."""

from __future__ import annotations

import json
from pathlib import Path

from fedprune_app.cli.demo import DEMO_SYSTEMS, demo_settings

ASSETS = Path(__file__).parents[2] / "docs" / "assets"


def test_the_picture_of_the_report_is_of_the_demo_as_it_is():
    """After a change of the demo, ``make demo`` and ``python docs/scripts/report_picture.py`` take a new picture."""
    shown = json.loads((ASSETS / "report.json").read_text())
    assert {system: each["settings"] for system, each in shown.items()} == {
        system: demo_settings(system) for system in DEMO_SYSTEMS
    }


def test_the_moving_picture_is_small():
    assert (ASSETS / "masks.webp").stat().st_size < 400_000
