"""The examples in the docstrings of `core` and `privacy` say what the code does."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from types import ModuleType

import pytest

from fedprune_app import core, privacy

MODULES = [
    each.name for package in (core, privacy) for each in pkgutil.iter_modules(package.__path__, package.__name__ + ".")
]


def examples(module: ModuleType) -> list[doctest.DocTest]:
    return [test for test in doctest.DocTestFinder().find(module) if test.examples]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_give_what_they_show(name: str) -> None:
    results = doctest.testmod(importlib.import_module(name))
    assert results.failed == 0


def test_at_least_ten_docstrings_have_an_example() -> None:
    assert sum(len(examples(importlib.import_module(name))) for name in MODULES) >= 10
