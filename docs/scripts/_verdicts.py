"""What decides claims: Student's t test of the seeds' means, and Holm's correction for many tests."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import takewhile

from scipy.special import stdtr, stdtrit

from fedprune_app.results.differences import Difference


def chance(apart: Difference, floor: float = 0.0) -> float:
    """The p value of the two-sided t test that the mean is ``floor``; its 95 % interval is that of the seeds."""
    freedom, half = len(apart.by_seed) - 1, (apart.high - apart.low) / 2
    distance = abs(apart.mean - floor) / half if half else math.inf
    return float(2 * stdtr(freedom, -distance * stdtrit(freedom, 0.975)))


def holm(chances: Mapping[str, float], level: float = 0.05) -> set[str]:
    """The names of the tests that Holm's correction leaves at this level, by their p values."""
    tests = sorted((value, name) for name, value in chances.items())
    left = takewhile(lambda each: each[1][0] <= level / (len(tests) - each[0]), enumerate(tests))
    return {name for _, (_, name) in left}
