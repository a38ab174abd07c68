"""A run without a folder of its own gets the next number."""

from __future__ import annotations

from fedprune_app.files import next_folder


def test_two_commands_at_once_get_two_numbers_and_what_stays_empty_is_removed(tmp_path):
    runs = tmp_path / "runs"
    with next_folder(runs) as first, next_folder(runs) as second:
        assert (first, second) == (runs / "1", runs / "2")
        (first / "run.json").touch()
    assert [path.name for path in runs.iterdir()] == ["1"]
    with next_folder(runs) as third:
        assert third == runs / "2"
    assert [path.name for path in runs.iterdir()] == ["1"]
