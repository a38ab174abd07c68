"""A reply that is late, malformed, not finite, huge, for another message or sent twice, in every system.

It leaves the state and the result as if its client had not been asked.
"""

from __future__ import annotations

import pytest

from fedprune_app.testing import Failing, Misbehaving, Twice, patient_clock
from tests.conformance.conftest import ROUNDS, SYSTEM_ONCE


@pytest.fixture
def clock():
    """A busy machine makes nobody late."""
    with patient_clock():
        yield


@SYSTEM_ONCE
def test_bad_replies_leave_everything_as_if_their_clients_had_not_been_asked(conform, clock, system):
    settings = {"deadline_seconds": 5.0, "evaluate_every": ROUNDS}
    without, with_bad = (conform(system, grid=grid, **settings) for grid in (Failing, Misbehaving))
    failures = [[row["failures"] for row in run.rounds] for run in (with_bad, without)]
    assert failures[0] == failures[1]
    assert sum(failures[0]) == 2 * len(Failing.misbehaving)
    assert with_bad.sha256 == without.sha256
    assert with_bad.sha256 != conform(system).sha256


@SYSTEM_ONCE
def test_a_reply_that_comes_twice_counts_once(conform, system):
    assert conform(system, grid=Twice).sha256 == conform(system).sha256
