"""FedRolex against its algorithm, written again with index lists."""

from __future__ import annotations

import pytest

from fedprune_app.testing import check_system
from tests.gallery import federations as small
from tests.gallery.narrow import WIDTHS, reference

pytestmark = pytest.mark.usefixtures("no_plugins")
SETTINGS = {"fjord__widths": " ".join(map(str, WIDTHS)), "num_server_rounds": 3}


def test_it_is_the_papers_algorithm(tmp_path):
    finished = small.run(tmp_path, "fedrolex", **SETTINGS)
    expected = reference(small.config_of("fedrolex", **SETTINGS), rolls=True)
    assert small.close(small.global_model(finished), expected)


def test_every_unit_is_trained_by_narrow_clients_too(tmp_path):
    """With HeteroFL those behind the width of all clients never move."""
    settings = {"fjord__widths": "0.5", "num_server_rounds": 12}
    start = small.parameters(small.network(small.config_of("fedrolex", **settings)))["conv1.bias"]
    found = small.global_model(small.run(tmp_path, "fedrolex", **settings))["conv1.bias"]
    assert bool((found != start).all())


def test_it_keeps_the_laws():
    settings = {"fjord.widths": SETTINGS["fjord__widths"]}
    check_system("fedrolex", plugins=str(small.GALLERY / "fedrolex.py"), settings=settings)
