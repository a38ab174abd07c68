"""The page of faults says what its rows of data say."""

from __future__ import annotations

from tests.docs.scripts import script

fault_tables = script("fault_tables")


def test_the_tables_of_the_page_are_those_of_the_data():
    assert fault_tables.written(fault_tables.PAGE.read_text()) == fault_tables.PAGE.read_text()


def test_a_seed_that_was_run_again_counts_once():
    rows = [{"first_seed": "0", "end_seed": "5"}, {"first_seed": "3", "end_seed": "8"}]
    assert fault_tables.seeds_in(rows) == 8


def test_every_kill_was_followed_by_the_same_models():
    for row in fault_tables.read("kills"):
        assert row["resumed"] == row["same_models"]
        assert len(row["rounds_when_killed"].split()) == int(row["kills"])
