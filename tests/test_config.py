from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedprune_app.config import (
    DEFAULTS,
    ConfigError,
    flatten,
    parse_config,
    parse_override,
    read_toml,
    to_toml,
)
from fedprune_app.registry import check_names

ROOT = Path(__file__).parents[1]


def test_the_app_declares_every_key_with_its_default_because_flower_refuses_others():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert flatten(declared) == DEFAULTS


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda p: p.name)
def test_every_config_file_is_valid(path):
    expected = {"quickstart": "subfedavg"}.get(path.stem, path.stem)
    assert check_names(parse_config(read_toml(path))).system == expected


def test_parsing_the_flat_form_gives_the_configuration_back():
    config = parse_config({"subfedavg.target-rate": 30, "learning-rate": 1, "out-dir": "/tmp/x"})
    assert config.subfedavg.target_rate == 30.0
    assert parse_config(config.to_dict()) == config
    assert parse_config(flatten(tomllib.loads(to_toml(config.to_dict())))) == config


def test_a_list_of_one_number_may_come_as_a_number():
    config = parse_config({"fedspallm.layer-shares": 0.5, "fedspallm.segment-counts": 8})
    assert (config.fedspallm.layer_shares, config.fedspallm.segment_counts) == ("0.5", "8")
    assert parse_config(flatten(tomllib.loads(to_toml(config.to_dict())))) == config


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("num-sever-rounds", 3, "unknown key 'num-sever-rounds': did you mean 'num-server-rounds'?"),
        ("batch-size", 0, "batch-size is 0, allowed: at least 1"),
        ("batch-size", 2.5, "batch-size is 2.5, allowed: a whole number"),
        ("batch-size", True, "batch-size is True, allowed: a whole number"),
        ("fraction-train", 0.0, "fraction-train is 0.0, allowed: above 0 and at most 1"),
        ("fraction-train", "half", "fraction-train is 'half', allowed: a number"),
        ("learning-rate", float("nan"), "learning-rate is nan, allowed: a finite number"),
        ("momentum", 1.0, "momentum is 1.0, allowed: at least 0 and below 1"),
        ("download", "yes", "download is 'yes', allowed: true or false"),
        ("test-split", "all", "test-split is 'all', allowed: labels, proportional, holdout"),
        ("subfedavg.target-rate", 100, "subfedavg.target-rate is 100.0, allowed: at least 0 and below 100"),
        ("out-dir", "runs/x", "out-dir is 'runs/x', allowed: an absolute path"),
        ("system", "fedfoo", "system is 'fedfoo', allowed: subfedavg"),
        ("fedspallm.window", 1, "fedspallm.window is 1, allowed: 0, or at least 2"),
        ("fedspallm.layer-shares", True, "fedspallm.layer-shares is True, allowed: a text"),
        ("dataset", "mnits", "dataset is 'mnits', allowed: digits"),
        ("partition", "split", "partition is 'split', allowed: iid"),
        ("model", "lenet", "model is 'lenet', allowed: auto"),
    ],
)
def test_a_wrong_value_is_one_line_that_names_key_value_and_what_is_allowed(key, value, says):
    with pytest.raises(ConfigError) as caught:
        check_names(parse_config({key: value}))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("seed=3", ("seed", 3)),
        ("learning-rate=1e-2", ("learning-rate", 0.01)),
        ("download=true", ("download", True)),
        ("dataset=cifar10", ("dataset", "cifar10")),
        ("data-dir=/a b/c", ("data-dir", "/a b/c")),
        ("subfedavg.target-rate=70", ("subfedavg.target-rate", 70)),
    ],
)
def test_overrides_are_read_as_toml_or_text(text, expected):
    assert parse_override(text) == expected


@pytest.mark.parametrize("text", ["seed", "=3", "seed=[1, 2]"])
def test_a_malformed_override_is_refused(text):
    with pytest.raises(ConfigError):
        parse_override(text)


@given(st.dictionaries(st.from_regex(r"[a-z][a-z-]{0,8}(\.[a-z]{1,5})?", fullmatch=True), st.text(), max_size=4))
def test_any_text_survives_being_written_as_toml(values):
    assert tomllib.loads(to_toml(values)) == values


@pytest.mark.parametrize("text", ["a = " + "[" * 100_000, "a = " + "{a=" * 100_000], ids=["lists", "tables"])
def test_a_config_nested_without_end_is_one_line(text, tmp_path):
    deep = tmp_path / "deep.toml"
    deep.write_text(text)
    with pytest.raises(ConfigError, match=r"deep.toml' cannot be read: it is nested too deeply$"):
        read_toml(deep)
    assert parse_override(text.replace(" ", "", 2)) == ("a", text.partition("= ")[2])


def test_a_config_file_that_is_missing_or_broken_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere.toml' does not exist"):
        read_toml(tmp_path / "nowhere.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("a = = 1")
    with pytest.raises(ConfigError, match=r"broken.toml' cannot be read"):
        read_toml(broken)


def test_resuming_into_another_folder_is_refused():
    with pytest.raises(ConfigError, match="out-dir"):
        parse_config({"out-dir": "/a", "resume-from": "/b"})
