"""Settings without effect are refused, with the setting that is meant instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedprune_app.config import OPTIONS, check_effects, has_effect, parse_config, read_toml
from fedprune_app.preflight.inputs import RunInputs
from fedprune_app.registry import SYSTEMS
from fedprune_app.sweeps.matrix import read_matrix
from tests.refusing import refuses

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize(
    ("given", "key", "without", "instead"),
    [
        ({"density": 0.1}, "density", "system 'subfedavg'", "system 'subfedavg' has subfedavg.target-rate"),
        ({"system": "fedavg", "dispfl.topology": "ring"}, "dispfl.topology", "system 'fedavg'", "system 'dispfl'"),
        ({"system": "dpsgd", "dispfl.topology": "ring"}, "dispfl.topology", "system 'dpsgd'", "system 'dispfl'"),
        ({"data-dir": "/data"}, "data-dir", "dataset 'digits'", "dataset other than 'digits' or 'stdlib'"),
        ({"dp.clip-norm": 2.0}, "dp.clip-norm", "dp.enabled False", "dp.enabled true"),
        (
            {"system": "dispfl", "dispfl.topology": "ring", "dispfl.neighbours": 3},
            "dispfl.neighbours",
            "dispfl.topology 'ring'",
            "dispfl.topology 'random' or 'random-in'",
        ),
        ({"system": "fedcr", "density": 0.9}, "density", "fedcr.layer-set 'all'", "fedcr.layer-set other than 'all'"),
        (
            {"system": "fedp3", "fedp3.layer-set": "all", "density": 0.9},
            "density",
            "fedp3.layer-set 'all'",
            "other than 'all'",
        ),
        (
            {"system": "dispfl", "dispfl.densities": "0.5 1.0", "density": 0.3},
            "density",
            "dispfl.densities '0.5 1.0'",
            "dispfl.densities ''",
        ),
        (
            {"system": "fedspallm", "dataset": "stdlib", "fedspallm.pattern": "2:4", "density": 0.3},
            "density",
            "fedspallm.pattern '2:4'",
            "fedspallm.pattern '' or 'cut'",
        ),
        (
            {"system": "fedp3", "fedp3.capacities": "0.5"},
            "fedp3.capacities",
            "fedp3.layer-set 'lowerb'",
            "fedp3.layer-set 'capacity'",
        ),
        (
            {"dp.enabled": True, "dp.noise-multiplier": 1.0, "dp.planned-rounds": 3},
            "dp.planned-rounds",
            "dp.target-epsilon 0.0",
            "dp.target-epsilon other than 0.0",
        ),
        (
            {"dirichlet-alpha": 0.1},
            "dirichlet-alpha",
            "partition 'shards'",
            "partition 'dirichlet-class' or 'dirichlet-client'",
        ),
    ],
)
def test_a_setting_without_effect_is_refused(given, key, without, instead):
    with refuses(key, given[key], which=without, hint=instead):
        check_effects(given, parse_config(given))


def test_every_option_has_an_effect_in_some_run_and_needs_what_there_is():
    for key, option in OPTIONS.items():
        for name, values in option.needs.items():
            for value in tuple(values):
                parse = OPTIONS[name].parse(name, value)
                assert parse == value, key
                if name == "system":
                    assert value in SYSTEMS, key


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_shipped_configs_set_nothing_in_vain(path):
    values = read_toml(path)
    check_effects(values, parse_config(values))


def test_a_matrix_may_set_what_only_some_of_its_systems_take(tmp_path):
    path = tmp_path / "matrix.yaml"
    path.write_text("common: {density: 0.2}\nsystems: [fedavg, dispfl]\n")
    cells = read_matrix(path).cells(RunInputs(out=tmp_path / "out"))
    assert [has_effect("density", cell.config) for cell in cells] == [False, True]
    path.write_text("common: {density: 0.2}\nsystems: [fedavg, subfedavg]\n")
    with refuses("density", 0.2, which="system 'fedavg'", where="run 'fedavg-digits-seed0'"):
        read_matrix(path).cells(RunInputs(out=tmp_path / "out"))


@pytest.mark.parametrize("key", ["subfedavg.target-rate", "subfedavg.accuracy-threshold"])
def test_a_share_in_place_of_a_percentage_is_refused(key):
    with refuses(key, 0.7, hint="70"):
        parse_config({key: 0.7})
