"""From flat keys to a configuration and back; what cannot be is refused in one line."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from fedprune_app.config import (
    OPTIONS,
    PathKind,
    errors,
    flatten,
    parse_config,
    paths_from_here,
    read_toml,
    to_toml,
    written_below,
)
from fedprune_app.preflight.inputs import RunInputs
from fedprune_app.preflight.prepare import prepare
from tests.refusing import refuses

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda p: p.name)
def test_every_config_file_is_valid(path):
    expected = {"quickstart": "subfedavg"}.get(path.stem, path.stem)
    assert prepare(RunInputs(read_toml(path))).config.system == expected


def test_parsing_the_flat_form_gives_the_configuration_back():
    config = parse_config({"subfedavg.target-rate": 30, "learning-rate": 1, "out-dir": "/tmp/x"})
    assert config.subfedavg.target_rate == 30.0
    assert parse_config(config.to_dict()) == config
    assert parse_config(flatten(tomllib.loads(to_toml(config.to_dict())))) == config


@pytest.mark.parametrize("text", [".1", "1e-1", "0.1"])
def test_an_option_that_takes_a_number_reads_it_from_a_text(text):
    """YAML has 1e-1 as a text, and TOML has no .1 at all."""
    assert parse_config({"learning-rate": text}).learning_rate == 0.1


def test_a_list_of_one_number_may_come_as_a_number():
    config = parse_config({"fedspallm.layer-shares": 0.5, "fjord.widths": 1})
    assert (config.fedspallm.layer_shares, config.fjord.widths) == ("0.5", "1")
    assert parse_config(flatten(tomllib.loads(to_toml(config.to_dict())))) == config


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("batch-size", 0),
        ("batch-size", 2.5),
        ("batch-size", True),
        ("fraction-train", 0.0),
        ("fraction-train", "half"),
        ("learning-rate", float("nan")),
        ("learning-rate", 10**400),
        ("momentum", 1.0),
        ("download", "yes"),
        ("test-split", "all"),
        ("subfedavg.target-rate", 100),
        ("out-dir", "runs/x"),
        ("system", "fedfoo"),
        ("fedspallm.layer-shares", True),
        ("dataset", "mnits"),
        ("partition", "split"),
        ("model", "lenet"),
    ],
)
def test_a_wrong_value_is_one_line_that_names_key_value_and_what_is_allowed(key, value):
    with refuses(key, value) as caught:
        prepare(RunInputs({key: value}))
    assert caught.value.allowed


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ({"classes": "cat"}, ("classes", "cat")),
        ({"out-dir": "/a", "resume-from": "/b"}, ("out-dir", "/a")),
        ({"validation-fraction": 0}, ("validation-fraction", 0)),
        ({"dispfl.densities": "0.2 2"}, ("dispfl.densities", "0.2 2")),
        ({"system": "fedfomo", "validation-fraction": 0}, ("validation-fraction", 0)),
        ({"fedp3.layers": "fc1"}, ("fedp3.layers", "fc1")),
        ({"fedp3.layer-set": "by-hand"}, ("fedp3.layers", "")),
        ({"fedp3.capacities": "a"}, ("fedp3.capacities", "a")),
        ({"system": "fedcr", "fedp3.local": "uniform"}, ("fedp3.local", "uniform")),
        ({"system": "ldp-fedp3"}, ("dp.enabled", False)),
        ({"fjord.widths": "0"}, ("fjord.widths", "0")),
        ({"system": "fedltp", "validation-fraction": 0}, ("validation-fraction", 0)),
        ({"dp.enabled": True}, ("dp.noise-multiplier", 0)),
        ({"fedspallm.pattern": "4:2"}, ("fedspallm.pattern", "4:2")),
        ({"fedspallm.evaluation-texts": "a=b"}, ("fedspallm.evaluation-texts", "a=b")),
        ({"fedspallm.pattern": "2:5"}, ("fedspallm.block-size", 128)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_settings_that_do_not_go_together_are_one_line(settings, refused):
    with refuses(*refused) as caught:
        parse_config(settings)
    assert caught.value.allowed


def test_resuming_into_another_folder_is_refused():
    with refuses("out-dir", "/a"):
        parse_config({"out-dir": "/a", "resume-from": "/b"})


# --- paths ------------------------------------------------------------------------------------------------------------


def test_paths_on_a_command_line_begin_where_the_command_was_typed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("llama", "lenet5"):
        (tmp_path / name).mkdir()
    (tmp_path / "llama" / "config.json").touch()
    here = {key: "there/x" for key, option in OPTIONS.items() if option.kind.is_folder}
    given = {**here, "model": "llama", "fedspallm.evaluation-texts": "a=one.txt, b=/two.txt", "seed": 3, "unknwon": "x"}
    found = paths_from_here(given)
    assert list(found) == list(given)
    for key in here:
        is_said_by_out = OPTIONS[key].kind is PathKind.RUN_FOLDER
        assert found[key] == ("there/x" if is_said_by_out else str(tmp_path / "there" / "x"))
    assert found["model"] == str(tmp_path / "llama")
    assert found["fedspallm.evaluation-texts"] == f"a={tmp_path / 'one.txt'},b=/two.txt"
    assert paths_from_here({"model": "lenet5", "data-dir": ""}) == {"model": "lenet5", "data-dir": ""}
    assert (found["seed"], found["unknwon"]) == (3, "x")


def test_a_rehearsal_writes_in_its_own_folder_alone():
    written = [key for key, option in OPTIONS.items() if option.kind in (PathKind.RUN_FOLDER, PathKind.STATE_FOLDER)]
    assert {"out-dir", "resume-from", "state-dir", "dp.ledger-dir"} <= set(written)
    given = {**dict.fromkeys(written, "/real"), "data-dir": "/data", "seed": 3}
    values = written_below(Path("/scratch"), parse_config(given)).to_dict()
    assert "/real" not in values.values()
    assert (values["out-dir"], values["data-dir"], values["seed"]) == ("/scratch", "/data", 3)


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ({}, "labels"),
        ({"test-split": "auto"}, "labels"),
        ({"partition": "dirichlet-class"}, "proportional"),
        ({"partition": "dirichlet-client", "test-split": "labels"}, "labels"),
        ({"dp.enabled": True, "dp.noise-multiplier": 1.0}, "holdout"),
        ({"dp.enabled": True, "dp.noise-multiplier": 1.0, "test-split": "labels"}, "labels"),
        ({"test-split": "holdout"}, "holdout"),
    ],
)
def test_the_record_says_which_test_split_was_taken(given, taken):
    config = parse_config(given)
    assert config.to_dict()["test-split"] == taken
    assert parse_config(config.to_dict()) == config


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        ("lr", "did you mean 'learning-rate'?"),
        ("epsilon", "did you mean 'dp.target-epsilon'?"),
        ("rounds", "did you mean 'num-server-rounds'?"),
        ("Learning_Rate", "did you mean 'learning-rate'?"),
        ("alpha", "did you mean 'dirichlet-alpha'?"),
        ("topology", "did you mean 'dispfl.topology' or 'dpsgd.topology'?"),
        ("target-rate", "did you mean 'subfedavg.target-rate'?"),
        ("clients", "it is the command's option --clients"),
        ("densty", "did you mean 'density'?"),
        ("xyzzy", "see `fedprune list --keys`"),
    ],
)
def test_a_key_that_people_type_is_answered_with_the_one_that_is_meant(typed, answer):
    with refuses("setting", typed, hint=answer):
        parse_config({typed: 1})


def test_every_other_word_for_a_key_stands_for_one_that_there_is():
    assert errors.OTHER_WORDS.keys().isdisjoint(OPTIONS)
    assert set(errors.OTHER_WORDS.values()) <= OPTIONS.keys()
    assert errors._COMMAND_LINE.keys().isdisjoint(OPTIONS)


@pytest.mark.parametrize(
    ("key", "value", "answer"),
    [
        ("system", "FedAvg", "did you mean 'fedavg'?"),
        ("system", "Dis-PFL", "did you mean 'dispfl'?"),
        ("dataset", "CIFAR-10", "did you mean 'cifar10'?"),
        ("partition", "dirichlet", "did you mean 'dirichlet-class'?"),
        ("model", "LeNet", "did you mean 'lenet5'?"),
        ("download", "True", "did you mean true?"),
        ("dataset", "imagenet", "did you mean 'tiny-imagenet'?"),
        ("system", "xyzzy", "plug-in"),
    ],
)
def test_a_name_that_people_type_is_answered_with_the_one_that_is_meant(key, value, answer):
    with refuses(key, value, hint=answer):
        prepare(RunInputs({key: value}))
