"""What a node's operator says it can bear decides the density of its model."""

from __future__ import annotations

import re

import pytest

from fedprune_app.config import ConfigError
from fedprune_app.engine import simulated_grid, wire
from fedprune_app.engine.simulated_grid import InProcessGrid
from tests.conftest import wrapped_app
from tests.examples import full
from tests.refusing import refuses


def grid_with(capacities):
    """A grid whose nodes were started with ``capacity=`` in their node-config; None is without."""

    class Grid(InProcessGrid):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            for context, capacity in zip(self._contexts.values(), capacities, strict=True):
                context.node_config |= {} if capacity is None else {"capacity": capacity}

    return Grid


def test_a_nodes_capacity_is_its_density_and_others_follow_the_list(federate, monkeypatch):
    monkeypatch.setattr(simulated_grid, "InProcessGrid", grid_with([0.3, None, 0.9, 1]))
    run = federate(
        clients=4, system="dispfl", num_server_rounds=2, evaluate_every=2, **{"dispfl.densities": "0.5 0.7 0.5 0.5"}
    )
    densities = {row["partition"]: row["density"] for row in run.clients if row["round"] == 2}
    assert densities == pytest.approx({0: 0.3, 1: 0.7, 2: 0.9, 3: 1.0}, abs=1e-3)


def test_a_run_goes_on_with_the_capacities_with_which_it_began(federate, monkeypatch, tmp_path):
    more = {"clients": 2, "system": "fjord", "fraction_train": 1.0}
    monkeypatch.setattr(simulated_grid, "InProcessGrid", grid_with([0.4, None]))
    federate(num_server_rounds=1, **more)
    monkeypatch.setattr(simulated_grid, "InProcessGrid", grid_with([0.4, 0.6]))
    with refuses("capacities", {"0": 0.4, "1": 0.6}, allowed="{'0': 0.4}, as the run began"):
        federate(num_server_rounds=2, resume_from=str(tmp_path / "run"), **more)
    monkeypatch.setattr(simulated_grid, "InProcessGrid", grid_with([0.4, None]))
    federate(num_server_rounds=2, resume_from=str(tmp_path / "run"), **more)


@pytest.mark.parametrize("changed", [{"capacity": 0.9}, full({"partition-id": 0})])
def test_a_node_that_comes_back_as_another_is_refused(federate, monkeypatch, changed):
    monkeypatch.setattr(simulated_grid, "InProcessGrid", grid_with([0.4, 0.4]))

    def train(message, context, honest):
        if wire.fields_of(message.content)["round"] == 2 and context.node_config["partition-id"] == 1:
            context.node_config |= changed
        return honest(message, context)

    run = federate(clients=2, system="fedavg", num_server_rounds=2, fraction_train=1.0, app=wrapped_app(train))
    (reason,) = run.rounds[1]["failure_reasons"]
    assert re.search(r"partition-id and capacity of the node are .*, allowed: \(1, 0\.4\), as the run began", reason)


@pytest.mark.parametrize("capacity", [0, 1.5, full("much"), full(True)])
def test_a_capacity_that_is_no_density_leaves_the_node_out_and_says_why(federate, monkeypatch, capacity):
    monkeypatch.setattr(simulated_grid, "InProcessGrid", grid_with([0.5, capacity]))
    run = federate(clients=2, system="dispfl", num_server_rounds=1, evaluate_every=0)
    assert run.info["status"] == "completed"
    (reason,) = run.info["clients_left_out"]
    assert "capacity is " in reason


@pytest.mark.parametrize(
    ("settings", "allowed"),
    [
        ({"dispfl.densities": "0.5 1.2"}, "numbers above 0 and at most 1"),
        ({"dispfl.topology": "star"}, "random, random-in, ring, full, exponential"),
        ({"density": 0.0}, "above 0"),
        ({"drop-probability": 1.0}, "below 1"),
        ({"system": "fedfomo", "validation-fraction": 0.0}, "above 0"),
        ({"system": "subfedavg-hy", "validation-fraction": 0.0}, "above 0"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_are_refused_on_one_line(federate, settings, allowed):
    with pytest.raises(ConfigError) as error:
        federate(**{"system": "dispfl", **settings})
    assert error.value.key in settings
    assert allowed in error.value.allowed


def test_the_topologies_that_can_be_chosen_are_those_that_exist():
    from fedprune_app.config import OPTIONS
    from fedprune_app.core.topology import TOPOLOGIES

    for table in ("dispfl", "dpsgd"):
        assert OPTIONS[f"{table}.topology"].choices.keys() == {*TOPOLOGIES}


@pytest.mark.full
def test_a_nodes_capacity_is_how_far_its_sub_network_is_pruned(federate, monkeypatch):
    monkeypatch.setattr(simulated_grid, "InProcessGrid", grid_with([0.6, None, 1]))
    run = federate(
        clients=3,
        system="subfedavg",
        num_server_rounds=6,
        fraction_train=1.0,
        evaluate_every=6,
        **{"subfedavg.target-rate": 20.0, "subfedavg.accuracy-threshold": 0.0, "subfedavg.prune-step": 15.0},
    )
    densities = {row["partition"]: row["density"] for row in run.clients if row["round"] == 6}
    assert densities == pytest.approx({0: 0.6, 1: 0.8, 2: 1.0}, abs=0.01)
