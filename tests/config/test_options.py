"""Every option is declared once, and what the product has to know of an option is with its declaration."""

from __future__ import annotations

import re
import tomllib
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import get_type_hints

import pytest

from fedprune_app import config as face
from fedprune_app.config import DEFAULTS, OPTIONS, Config, flatten
from fedprune_app.config.options import option_of
from tests.refusing import refuses

ROOT = Path(__file__).parents[2]


def test_the_app_declares_every_key_with_its_default_because_flower_refuses_others():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert flatten(declared) == DEFAULTS


def test_the_face_of_the_package_names_what_it_has():
    assert len(set(face.__all__)) == len(face.__all__)
    assert all(hasattr(face, name) for name in face.__all__)


def test_a_default_is_a_value_that_its_option_allows():
    for key, declared in OPTIONS.items():
        assert declared.parse(key, DEFAULTS[key]) == DEFAULTS[key]
        assert not (declared.choices and declared.bounds), key


def test_a_default_has_the_type_of_its_field():
    for holder in (Config(), *Config().tables):
        hints = get_type_hints(type(holder))
        for item in fields(holder):
            if item.metadata:
                assert type(option_of(item).default) is hints[item.name], f"{type(holder).__name__}.{item.name}"


def test_help_is_made_of_sentences_and_every_choice_has_words_of_its_own():
    for key, declared in OPTIONS.items():
        assert re.fullmatch(r"[A-Z].*\.", declared.help), key
        assert not {"it", "what"} & set(re.findall(r"\w+", declared.help.lower())), f"help of {key} names the thing"
        for choice, words in declared.choices.items():
            assert re.fullmatch(r".*[^.]", words), f"{key}={choice}"


def test_bounds_are_told_as_errors_tell_them():
    assert OPTIONS["momentum"].range == "at least 0 and below 1"
    assert OPTIONS["fraction-train"].range == "above 0 and at most 1"
    assert OPTIONS["system"].range == ""


def test_what_an_option_is_cannot_change():
    with pytest.raises(FrozenInstanceError):
        OPTIONS["momentum"].help = "x"


# --- paths ------------------------------------------------------------------------------------------------------------

PATHS = [key for key, declared in OPTIONS.items() if declared.kind.is_folder]


def test_whatever_is_named_like_a_path_is_declared_as_one():
    assert {key for key in OPTIONS if key.endswith(("-dir", "-file", "-from"))} == set(PATHS)


@pytest.mark.parametrize("key", PATHS)
def test_a_path_is_absolute_and_may_begin_at_home(key, monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    assert OPTIONS[key].parse(key, "") == ""
    assert OPTIONS[key].parse(key, "/a/b/") == "/a/b"
    assert OPTIONS[key].parse(key, "~/a") == "/home/ada/a"
    for wrong in ("a/b", "~nobody-is-called-this/a"):
        with refuses(key, wrong):
            OPTIONS[key].parse(key, wrong)


def test_where_a_run_lives_changes_no_result():
    assert not [key for key, declared in OPTIONS.items() if declared.kind.is_folder and declared.changes_results]
