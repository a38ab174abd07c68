"""Settings as text: run-config files, and ``key=value`` on a command line."""

from __future__ import annotations

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedprune_app.config import parse_override, read_toml, to_toml
from tests.refusing import refuses


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("seed=3", ("seed", 3)),
        ("learning-rate=1e-2", ("learning-rate", 0.01)),
        ("download=true", ("download", True)),
        ("dataset=cifar10", ("dataset", "cifar10")),
        ("data-dir=/a b/c", ("data-dir", "/a b/c")),
        ("data-dir=2024_01", ("data-dir", "2024_01")),
        ("data-dir=2024-01-02", ("data-dir", "2024-01-02")),
        ('data-dir="2024_01"', ("data-dir", "2024_01")),
        ("model=true", ("model", "true")),
        ("label-column=1e3", ("label-column", "1e3")),
        ("learning-rate=.1", ("learning-rate", ".1")),
        ("subfedavg.target-rate=70", ("subfedavg.target-rate", 70)),
    ],
)
def test_overrides_are_read_as_toml_or_text(text, expected):
    assert parse_override(text) == expected


@pytest.mark.parametrize("text", ["seed", "=3", "seed=[1, 2]"])
def test_a_malformed_override_is_refused(text):
    with refuses("setting" if "=[" not in text else "seed"):
        parse_override(text)


@pytest.mark.full
@given(st.dictionaries(st.from_regex(r"[a-z][a-z-]{0,8}(\.[a-z]{1,5})?", fullmatch=True), st.text(), max_size=4))
def test_any_text_survives_being_written_as_toml(values):
    assert tomllib.loads(to_toml(values)) == values


def test_a_config_file_that_is_missing_or_broken_is_named(tmp_path):
    with refuses("config file", tmp_path / "nowhere.toml"):
        read_toml(tmp_path / "nowhere.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("a = = 1")
    with refuses("config file", broken):
        read_toml(broken)


def test_a_key_with_a_dot_and_in_a_table_is_refused(tmp_path):
    (tmp_path / "a.toml").write_text('"dp.enabled" = true\n[dp]\nenabled = false\n')
    with refuses("dp.enabled", where="a.toml"):
        read_toml(tmp_path / "a.toml")
