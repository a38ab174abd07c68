"""Clients that are held out join after the last round, in every system of images, and change nothing of the run."""

from __future__ import annotations

import pytest

from fedprune_app.engine.simulated_grid import InProcessGrid
from fedprune_app.registry import SYSTEMS
from fedprune_app.testing import cut_after, lasting
from tests.conformance.conftest import CLIENTS, ROUNDS, of_system
from tests.refusing import refuses

IMAGES = [
    of_system(name, full=name not in ("dispfl", "subfedavg"))
    for name, system in SYSTEMS.items()
    if not system.reads_text
]
HELD_OUT = {"holdout_clients": 2, "evaluate_every": 1}


class Alone(InProcessGrid):
    """A name of its own, so that no finished run is taken for one of this."""


@pytest.mark.parametrize("system", IMAGES)
def test_newcomers_are_tested_in_the_end_and_change_nothing(conform, monkeypatch, system):
    run = conform(system, **HELD_OUT)
    joined = {row["partition"] for row in run.clients if row.get("accuracy_newcomer") is not None}
    assert len(joined) == 2
    assert not joined & {row["partition"] for row in run.clients if row["accuracy_personal"] is not None}
    last = run.rounds[-1]
    assert (last["evaluated"], last["clients"]) == (CLIENTS - 2, CLIENTS - 2)
    most_noise = max([row.get("accuracy_noise") or 0 for row in run.rounds])  # of a share, where the run is private
    assert -8 * most_noise <= last["accuracy_newcomer_mean"] <= 1 + 8 * most_noise
    monkeypatch.setattr("fedprune_app.federation.loop.newcomers", lambda strategy, round: {})
    without = conform(system, grid=Alone, **HELD_OUT)
    members = [row for row in run.clients if row["partition"] not in joined]
    assert lasting(members) == lasting(without.clients)
    assert lasting([{**row, "accuracy_newcomer_mean": None} for row in without.rounds]) == lasting(
        [{**row, "accuracy_newcomer_mean": None} for row in run.rounds]
    )


@pytest.mark.parametrize("round", [ROUNDS, ROUNDS - 1])
@pytest.mark.parametrize("system", IMAGES)
def test_a_run_that_is_resumed_has_the_same_newcomers(conform, tmp_path, system, round):
    whole = conform(system, **HELD_OUT)
    cut = cut_after(whole, round, tmp_path / "cut")
    resumed = conform(system, resume_from=str(cut), **HELD_OUT)
    assert (resumed.sha256, lasting(resumed.clients)) == (whole.sha256, lasting(whole.clients))
    assert "losses" not in resumed.info


def test_a_held_out_client_whose_model_is_not_in_the_hash_is_a_loss(conform, monkeypatch):
    monkeypatch.setattr("fedprune_app.federation.loop.newcomers", lambda strategy, round: {})
    run = conform("fedavg", grid=Alone, **HELD_OUT)
    tested = {row["partition"] for row in run.clients if row["accuracy_personal"] is not None}
    losses = [line.split(": ")[0] for line in run.info["losses"]]
    assert losses == [f"client {k}" for k in range(CLIENTS) if k not in tested]


def test_somebody_has_to_take_part(conform):
    with refuses("holdout-clients", CLIENTS):
        conform("fedavg", holdout_clients=CLIENTS)
