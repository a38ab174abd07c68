"""Settings without effect are refused, with the setting that is meant instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedprune_app.config import OPTIONS, ConfigError, check_effects, has_effect, parse_config, read_toml
from fedprune_app.preflight.given import Given
from fedprune_app.registry import SYSTEMS
from fedprune_app.sweeps.matrix import read_matrix

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"density": 0.1},
            "density is 0.1, which has no effect with system 'subfedavg'; density needs system 'dispfl' or 'fedp3' or "
            "'fedcr' or 'fedltp' or 'fedspallm'; system 'subfedavg' has subfedavg.target-rate, the percentage that is "
            "pruned",
        ),
        (
            {"system": "fedavg", "dispfl.topology": "ring"},
            "dispfl.topology is 'ring', which has no effect with system 'fedavg'; "
            "dispfl.topology needs system 'dispfl'",
        ),
        (
            {"system": "dpsgd", "dispfl.topology": "ring"},
            "dispfl.topology is 'ring', which has no effect with system 'dpsgd'; "
            "dispfl.topology needs system 'dispfl'; "
            "system 'dpsgd' has dpsgd.topology",
        ),
        (
            {"data-dir": "/data"},
            "data-dir is '/data', which has no effect with dataset 'digits'; data-dir needs dataset "
            "other than 'digits' or 'stdlib'",
        ),
        (
            {"dp.clip-norm": 2.0},
            "dp.clip-norm is 2.0, which has no effect with dp.enabled False; dp.clip-norm needs dp.enabled true",
        ),
        (
            {"system": "dispfl", "dispfl.topology": "ring", "dispfl.neighbours": 3},
            "dispfl.neighbours is 3, which has no effect with dispfl.topology 'ring'; dispfl.neighbours needs "
            "dispfl.topology 'random' or 'random-in'",
        ),
        (
            {"system": "fedcr", "density": 0.9},
            "density is 0.9, which has no effect with fedcr.layer-set 'all'; density needs fedcr.layer-set other than "
            "'all'",
        ),
        (
            {"system": "fedp3", "fedp3.capacities": "0.5"},
            "fedp3.capacities is '0.5', which has no effect with fedp3.layer-set 'lowerb'; fedp3.capacities needs "
            "fedp3.layer-set 'capacity'",
        ),
        (
            {"dp.enabled": True, "dp.noise-multiplier": 1.0, "dp.planned-rounds": 3},
            "dp.planned-rounds is 3, which has no effect with dp.target-epsilon 0.0; dp.planned-rounds needs "
            "dp.target-epsilon other than 0.0",
        ),
        (
            {"system": "dispfl", "dispfl.clip": "masked"},
            "dispfl.clip is 'masked', which has no effect with max-grad-norm 0.0; dispfl.clip needs max-grad-norm "
            "other than 0.0",
        ),
        (
            {"dirichlet-alpha": 0.1},
            "dirichlet-alpha is 0.1, which has no effect with partition 'shards'; dirichlet-alpha needs partition "
            "'dirichlet-class' or 'dirichlet-client'",
        ),
    ],
)
def test_a_setting_without_effect_is_refused(given, message):
    with pytest.raises(ConfigError) as error:
        check_effects(given, parse_config(given))
    assert str(error.value) == message


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
    cells = read_matrix(path).cells(Given(out=tmp_path / "out"))
    assert [has_effect("density", cell.config) for cell in cells] == [False, True]
    path.write_text("common: {density: 0.2}\nsystems: [fedavg, subfedavg]\n")
    with pytest.raises(
        ConfigError, match=r"run 'fedavg-digits-seed0': density is 0\.2, which has no effect with system 'fedavg'"
    ):
        read_matrix(path).cells(Given(out=tmp_path / "out"))


@pytest.mark.parametrize("key", ["subfedavg.target-rate", "subfedavg.accuracy-threshold"])
def test_a_share_in_place_of_a_percentage_is_refused(key):
    with pytest.raises(ConfigError, match=f"^{key} is 0.7, allowed: 0, or a percentage from 1; 70 is meant"):
        parse_config({key: 0.7})
