"""HeteroFL against its algorithm, written again with index lists."""

from __future__ import annotations

import pytest

from fedprune_app.testing import check_system
from tests.gallery import federations as small
from tests.gallery.narrow import WIDTHS, reference

pytestmark = pytest.mark.usefixtures("no_plugins")
SETTINGS = {"fjord__widths": " ".join(map(str, WIDTHS)), "num_server_rounds": 3}


def test_it_is_the_papers_algorithm(tmp_path):
    finished = small.run(tmp_path, "heterofl", **SETTINGS)
    expected = reference(small.config_of("heterofl", **SETTINGS), rolls=False)
    assert small.close(small.global_model(finished), expected)


def test_it_keeps_the_laws():
    settings = {"fjord.widths": SETTINGS["fjord__widths"]}
    check_system("heterofl", plugins=str(small.GALLERY / "heterofl.py"), settings=settings)
