"""HeteroFL and FedRolex, whose clients are the same, against their algorithms, written again with index lists."""

from __future__ import annotations

import pytest

import fedprune_app
from fedprune_app.data.splits import client_data, data_config
from fedprune_app.testing import check_system
from tests.examples import full
from tests.gallery import federations as small
from tests.gallery.narrow import WIDTHS, cut, grid, logits, reference

pytestmark = pytest.mark.usefixtures("no_plugins")
SETTINGS = {"fjord__widths": " ".join(map(str, WIDTHS)), "num_server_rounds": 3}
BOTH = pytest.mark.parametrize("system", ["heterofl", full("fedrolex")])


@BOTH
def test_it_is_the_papers_algorithm(tmp_path, system):
    finished = small.run(tmp_path, system, **SETTINGS)
    expected = reference(small.config_of(system, **SETTINGS), rolls=system == "fedrolex")
    assert small.close(small.global_model(finished), expected)


@pytest.mark.full
@BOTH
def test_a_narrow_client_is_tested_as_it_was_trained(tmp_path, system):
    """Its accuracy is that of the network by hand, with the Scaler, on its own test data."""
    settings = {**SETTINGS, "num_server_rounds": 6, "learning_rate": 0.1}
    finished = small.run(tmp_path, system, **settings)
    config = small.config_of(system, **settings)
    rows = {row["partition"]: row for row in finished.clients if row["round"] == 6}
    for client, rate in enumerate(WIDTHS):
        weights = small.state_of(finished, client, "weights")
        data = client_data(data_config(config), client, small.CLIENTS)
        hits = logits(weights, data.test_images, rate).argmax(1) == data.test_labels
        assert rows[client]["accuracy_personal"] == pytest.approx(float(hits.float().mean()), abs=0.02)
        places = cut(6 if system == "fedrolex" else 0, rate)  # of the next round, which would begin with them
        received = {name: tensor[grid(places[name])] for name, tensor in small.global_model(finished).items()}
        hits = logits(received, data.test_images, rate).argmax(1) == data.test_labels
        assert rows[client]["accuracy_received"] == pytest.approx(float(hits.float().mean()), abs=0.02)
    with pytest.raises(ValueError, match="tests more than a network's tensors, which are all that is written"):
        fedprune_app.model(finished.folder, client=client, plugins=str(small.file_of(system)))


@pytest.mark.full
@BOTH
def test_it_keeps_the_laws(system):
    settings = {"fjord.widths": SETTINGS["fjord__widths"]}
    check_system(system, plugins=str(small.file_of(system)), settings=settings)


@pytest.mark.full
def test_with_fedrolex_every_unit_is_trained_by_narrow_clients_too(tmp_path):
    """With HeteroFL those behind the width of all clients never move."""
    settings = {"fjord__widths": "0.5", "num_server_rounds": 12}
    start = small.parameters(small.network(small.config_of("fedrolex", **settings)))["conv1.bias"]
    found = small.global_model(small.run(tmp_path, "fedrolex", **settings))["conv1.bias"]
    assert bool((found != start).all())
