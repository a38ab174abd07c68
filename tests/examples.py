"""Hypothesis tries fewer examples in ``make test`` than in ``make full``."""

from __future__ import annotations

import os

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "some")
SOME = 25


def examples(number: int) -> int:
    """Return how many examples a test tries whose full number this is."""
    return number if PROFILE == "full" else min(number, SOME)
