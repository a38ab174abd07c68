from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedprune_app.core.schedules import cosine_fraction


def test_the_cosine_falls_from_all_over_half_to_a_remainder():
    # cos 0, cos(π/3), cos(π/2), cos(2π/3) = 1, 1/2, 0, -1/2
    assert [cosine_fraction(0.5, t, 6) for t in (0, 2, 3, 4)] == pytest.approx([0.5, 0.375, 0.25, 0.125])
    assert cosine_fraction(0.8, 0, 1) == 0.8


@settings(deadline=None)
@given(st.floats(0.01, 1), st.integers(2, 1000))
def test_the_cosine_never_rises_and_never_reaches_zero(initial, num_rounds):
    fractions = [cosine_fraction(initial, t, num_rounds) for t in range(num_rounds)]
    assert fractions[0] == initial
    assert fractions == sorted(fractions, reverse=True)
    assert fractions[-1] > 0


@pytest.mark.parametrize(
    ("initial", "round", "num_rounds"),
    [(-0.1, 0, 5), (1.1, 0, 5), (float("nan"), 0, 5), (0.5, 0, 0), (0.5, -1, 5), (0.5, 5, 5)],
)
def test_a_wrong_argument_is_named_with_what_is_allowed(initial, round, num_rounds):
    message = f"initial fraction is {initial} and round is {round} of {num_rounds}, allowed: 0 to 1"
    with pytest.raises(ValueError, match=message):
        cosine_fraction(initial, round, num_rounds)
