"""How a wrong setting is told: one line of fields, here and in another process."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest

from fedprune_app.config import SETTING_ERROR, ConfigError, PolicyError, naming_source, parse_config, refused
from fedprune_app.config.policy import declined
from fedprune_app.preflight.inputs import Placement


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ConfigError("density", 1.5, "above 0 and at most 1"), "density is 1.5, allowed: above 0 and at most 1"),
        (
            ConfigError("model", "cnn", "cnn-bn", condition="with system 'x'", which="has no norms", hint="see docs"),
            "model is 'cnn', which has no norms, allowed with system 'x': cnn-bn; see docs",
        ),
        (ConfigError("--resume", True, condition="with --out alone"), "--resume is true, allowed with --out alone"),
        (ConfigError("seed", ..., "once", which="is given twice"), "seed is given twice, allowed: once"),
        (ConfigError("seeds", [0, 0], where="matrix 'm'"), "matrix 'm': seeds is [0, 0]"),
        (ConfigError("--out", Path("a b")), "--out is 'a b'"),
        (ConfigError("seed", 10**99), "seed is 100000000000000000...0000000000000000000"),
        (ConfigError("a whole sentence"), "a whole sentence"),
        (
            declined("dp.enabled", False, "require-dp", "true"),
            "the node declines the run: dp.enabled is false, allowed by its require-dp: true",
        ),
    ],
)
def test_an_error_is_one_line_of_its_fields(error, line):
    assert str(error) == line


def test_an_error_says_in_which_file_and_entry_it_is():
    with pytest.raises(ConfigError) as caught, naming_source("matrix 'm'"), naming_source(""), naming_source("common"):
        raise PolicyError("seed", 1)
    assert (type(caught.value), str(caught.value)) == (PolicyError, "matrix 'm': common: seed is 1")


def test_an_error_of_another_process_has_its_fields_or_its_text():
    with pytest.raises(ConfigError) as caught, naming_source("here"):
        parse_config({"dp.enabled": True})
    for again in (copy.copy(caught.value), pickle.loads(pickle.dumps(caught.value))):
        assert (again.key, again.value, str(again)) == ("dp.noise-multiplier", 0.0, str(caught.value))
    missing = pickle.loads(pickle.dumps(ConfigError("seed", which="is given twice")))
    assert (missing.value, str(missing)) == (..., "seed is given twice")
    text = str(caught.value)
    caught.value.mark = SETTING_ERROR
    assert refused(f"ServerAppException: {caught.value}") == text
    assert refused("training diverged") == ""


def test_a_wrong_option_is_told_with_its_value():
    with pytest.raises(ConfigError, match=r"^--clients is 0, allowed: a whole number, at least 1$"):
        Placement("inprocess", 0)
