"""Every number that a run of any system records is declared in ``results/declarations.py``."""

from __future__ import annotations

import pytest

from fedprune_app.results.declarations import DECLARATIONS
from fedprune_app.testing import misrecorded
from tests.conformance.conftest import SYSTEM, of_system


@SYSTEM
def test_every_number_that_is_recorded_is_declared_as_what_it_is(conform, system):
    run = conform(system)
    of_rounds, of_clients = {*DECLARATIONS.columns}, {"round", "partition", *DECLARATIONS.of_clients}
    for rows, columns in ((run.rounds, of_rounds), (run.clients, of_clients)):
        assert rows
        assert misrecorded(rows, columns) == []


def test_what_is_not_declared_or_of_another_kind_is_found():
    rows = [{"round": 1, "loss_mean": "high", "mood": 3}]
    assert misrecorded(rows, {"round", "loss_mean"}) == ["loss_mean", "mood"]


@pytest.mark.parametrize("system", [of_system(each) for each in ("dispfl", "fedltp", "subfedavg", "subfedavg-hy")])
def test_the_runs_that_are_recorded_of_systems_that_prune_have_pruned(conform, system):
    assert conform(system).rounds[-1]["density_mean"] < 0.95
