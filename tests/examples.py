"""What of a test is in ``make test``, and what in ``make full`` alone."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "some")
SOME = 25


def examples(number: int) -> int:
    """Return how many examples a test tries whose full number this is."""
    return number if PROFILE == "full" else min(number, SOME)


def full(*values: Any) -> ParameterSet:
    """Return a case that is in ``make full`` alone."""
    return pytest.param(*values, marks=pytest.mark.full)


def in_test(cases: Iterable[Any], *named: Any) -> list[Any]:
    """Return the cases, of which ``make test`` has those that are named, and ``make full`` the others."""
    cases = list(cases)
    if missing := [name for name in named if name not in cases]:
        raise ValueError(f"{missing} are no cases, allowed: {cases}")
    return [case if case in named else full(*(case if isinstance(case, tuple) else [case])) for case in cases]
