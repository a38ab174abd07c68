"""Who is asked to train and to evaluate follows from the seed and the round alone."""

from __future__ import annotations

import pytest

from fedprune_app.config import parse_config
from fedprune_app.core.rng import derive_seed
from fedprune_app.engine.simulated_grid import InProcessGrid
from fedprune_app.results.texts import progress_line
from fedprune_app.testing.runs import run_with
from tests.conftest import SMALL
from tests.examples import full
from tests.refusing import refuses


@pytest.mark.full
def test_between_the_first_and_the_last_evaluation_some_clients_are_drawn_anew_each_time(federate):
    run = federate(system="subfedavg", evaluate_clients=2, num_server_rounds=4, local_epochs=1)
    asked = [
        {row["partition"] for row in run.clients if row["round"] == number and row.get("accuracy_personal") is not None}
        for number in range(1, 5)
    ]
    assert [len(clients) for clients in asked] == [2, 2, 2, 6] == [row["evaluated"] for row in run.rounds]
    assert [row["clients"] for row in run.rounds] == [6] * 4
    assert progress_line(run.rounds[0]).count("(2 of 6 clients)") == 2  # of personal and of global accuracy
    assert "clients)" not in progress_line(run.rounds[-1])
    assert len(set(map(frozenset, asked[:3]))) > 1
    everybody = federate("all", system="subfedavg", num_server_rounds=4, local_epochs=1)
    assert run.sha256 == everybody.sha256
    assert [row["evaluated"] for row in everybody.rounds] == [6] * 4
    of_client = {(row["round"], row["partition"]): row["accuracy_personal"] for row in everybody.clients}
    for row in run.clients:
        if row.get("accuracy_personal") is not None:
            assert row["accuracy_personal"] == of_client[row["round"], row["partition"]]


def test_a_secure_sum_that_can_lose_nobody_is_told_before_the_run(fedprune):
    line = "note: a secure sum needs each of a round's 3 clients: where one is lost the run stops, and --resume"
    settings = ("system=fedavg", "secure-sums=true", "fraction-train=1.0")
    assert f"{line} continues it\n" in fedprune("check", *settings, "--clients", "3")[1]
    assert "a secure sum needs" not in fedprune("check", *settings, "--clients", "4")[1]


def test_an_evaluation_asks_as_many_as_it_needs():
    with refuses("evaluate-clients", 2):
        parse_config({"evaluate-clients": 2, "min-replies": 3})


def test_a_mean_of_received_models_says_how_many_clients_received_one(federate):
    run = federate(system="dispfl", fraction_train=0.5, num_server_rounds=2, local_epochs=1)
    for row in run.rounds:
        received = [
            client
            for client in run.clients
            if client["round"] == row["round"] and client.get("accuracy_received") is not None
        ]
        assert row["accuracy_received_clients"] == len(received) == 3
        assert row["evaluated"] == 6


@pytest.mark.parametrize("system", ["dispfl", full("dpsgd-ft"), full("fedavg")])
def test_what_clients_received_is_taken_over_all_that_tell_it_in_training_or_in_an_evaluation(federate, system):
    more = {f"{system.removesuffix('-ft')}.neighbours": 2} if system != "fedavg" else {}
    run = federate(system=system, evaluate_clients=2, num_server_rounds=2, evaluate_every=1, local_epochs=1, **more)
    first, last = run.rounds
    assert (first["evaluated"], last["evaluated"]) == (2, 6)
    for row in run.rounds:
        told = [
            client["accuracy_received"]
            for client in run.clients
            if client["round"] == row["round"] and client.get("accuracy_received") is not None
        ]
        assert row["accuracy_received_clients"] == len(told)
        assert row["accuracy_received_mean"] == pytest.approx(sum(told) / len(told))


class LosesANode(InProcessGrid):
    """The node of client 1 sends no heartbeat in rounds 2 and 3."""

    looks = 0

    def get_node_ids(self):
        nodes = super().get_node_ids()
        self.looks += 1
        return nodes if self.looks in (1, 2, 5) else [node for node in nodes if node != derive_seed(1, "node-id")]


@pytest.mark.full
def test_a_node_without_heartbeat_is_not_drawn_and_named_when_it_goes_and_is_back(tmp_path):
    values = {**SMALL, "system": "fedavg", "num-server-rounds": 4, "fraction-train": 1.0, "min-replies": 2}
    run = run_with(values, tmp_path / "run", LosesANode, clients=3)
    assert run.info["status"] == "completed"
    trained = [[c["partition"] for c in run.clients if c["round"] == n and c["bytes_up"]] for n in (1, 2, 3, 4)]
    assert trained == [[0, 1, 2], [0, 2], [0, 2], [0, 1, 2]]
    assert [row["notes"] for row in run.rounds] == [
        [],
        ["client 1 is gone: its node sends no heartbeat"],
        [],
        ["client 1 is back"],
    ]
