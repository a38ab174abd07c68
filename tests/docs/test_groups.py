"""What it costs to protect groups: the page has the table of the rows, and they are what was asked for."""

from __future__ import annotations

from tests.docs.scripts import script

groups = script("groups")


def test_the_page_has_the_table_of_the_rows():
    page = groups.PAGE.read_text()
    assert groups.table() in page
    assert groups.with_tables(page, "groups", lambda name: groups.table()) == page


def test_every_setting_was_run_with_every_seed():
    found = {(row["unit"], row["epsilon"], int(row["seed"])) for row in groups.read_rows(groups.DATA)}
    assert found == {(*setting, seed) for setting in groups.SETTINGS for seed in groups.SEEDS}
