"""What of a test is in ``make test``, and what in ``make full`` alone."""

from __future__ import annotations

import os
from collections.abc import Iterable

import pytest
from _pytest.mark.structures import ParameterSet

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "some")
SOME = 25


def examples(number: int) -> int:
    """Return how many examples a test tries whose full number this is."""
    return number if PROFILE == "full" else min(number, SOME)


def first(number: int, cases: Iterable[str]) -> list[ParameterSet | str]:
    """Return a fixture's parameters, of which ``make test`` has the first ``number`` and ``make full`` the others."""
    return [case if k < number else pytest.param(case, marks=pytest.mark.full) for k, case in enumerate(cases)]
