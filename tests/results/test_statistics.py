from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedprune_app.results.statistics import summary, worst_decile

shares = st.lists(st.floats(0, 1), min_size=1, max_size=60)


def test_the_worst_decile_of_twenty_clients_is_the_mean_of_the_two_lowest():
    assert worst_decile([0.5] * 9 + [0.1] + [0.9] * 9 + [0.3]) == pytest.approx(0.2)


def test_a_tenth_is_rounded_up_so_eleven_clients_have_two_worst():
    assert worst_decile([0.0, 1.0] + [2.0] * 9) == pytest.approx(0.5)


def test_of_up_to_ten_clients_the_worst_decile_is_the_worst_client():
    assert worst_decile([0.7, 0.2, 0.9]) == 0.2
    assert worst_decile(np.arange(10) / 10 + 0.4) == pytest.approx(0.4)


@given(shares, st.randoms(use_true_random=False))
def test_the_order_of_clients_does_not_matter_and_the_worst_decile_is_between_minimum_and_mean(values, random):
    shuffled = random.sample(values, len(values))
    assert worst_decile(shuffled) == worst_decile(values)
    assert min(values) - 1e-12 <= worst_decile(values) <= summary(values).mean + 1e-12


def test_the_spread_is_the_population_standard_deviation():
    assert summary([1.0, 3.0]) == (2.0, 1.0, 1.0)  # the sample formula would give 1.414


def test_nothing_measured_has_no_mean():
    assert all(math.isnan(number) for number in summary([]))
    assert all(math.isnan(number) for number in summary([0.5, float("nan")]))
