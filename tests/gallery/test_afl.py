"""AFL against the paper's own way: local inverses, clients added one by one, and regularisers taken away at last."""

from __future__ import annotations

import pytest
import torch

from fedprune_app.testing import check_system
from tests.gallery import federations as small

pytestmark = pytest.mark.usefixtures("no_plugins")
SETTINGS = {"model": "mlp-small", "num_server_rounds": 1}


def moments_of(model, part):
    """``XᵀX`` and ``XᵀY`` by loops over examples, of what comes before the last layer of the network."""
    images, labels = part
    layers = list(model.children())
    width, classes = layers[-1].in_features, layers[-1].out_features
    gram, products = torch.zeros(width, width).double(), torch.zeros(width, classes).double()
    with torch.no_grad():
        for image, label in zip(images, labels, strict=True):
            value = image.unsqueeze(0)
            for layer in layers[:-1]:
                value = layer(value)
            row = value.view(-1).double()
            gram += torch.outer(row, row)
            products[:, int(label)] += row
    return gram, products


def one_by_one(pairs, gamma):
    """The absolute aggregation law for two, again and again: W and C of all clients so far, and of the next one."""
    solved = []
    for gram, products in pairs:
        c = gram + gamma * torch.eye(len(gram)).double()
        solved.append((torch.linalg.solve(c, products), c))
    w, c = solved[0]
    for w2, c2 in solved[1:]:
        one = torch.eye(len(c)).double()
        r, r2, both = torch.linalg.inv(c), torch.linalg.inv(c2), torch.linalg.inv(c + c2)
        w = (one - r @ c2 + r @ c2 @ both @ c2) @ w + (one - r2 @ c + r2 @ c @ both @ c) @ w2
        c = c + c2
    return w, c


@pytest.mark.parametrize("removes", [True, False])
def test_exact_sums_give_what_the_law_gives_one_client_after_the_other(tmp_path, removes):
    settings = {**SETTINGS, "afl__removes_regulariser": removes, "afl__regulariser": 1.0}
    config = small.config_of("afl", **settings)
    finished = small.run(tmp_path, "afl", **settings)
    pairs = [moments_of(small.network(config), part) for part in small.examples(config)]
    w, c = one_by_one(pairs, 1.0)
    if removes:
        c = c - len(pairs) * torch.eye(len(c)).double()
        w = w + len(pairs) * torch.linalg.pinv(c, rtol=1e-10, hermitian=True) @ w
    found, initial = small.global_model(finished), small.parameters(small.network(config))
    *rest, weight, bias = initial
    assert torch.allclose(found[weight].T.double(), w, atol=1e-4 * float(w.abs().max()))
    assert not bool(found[bias].any())
    assert all(torch.equal(found[name], initial[name]) for name in rest)


def test_the_model_is_the_same_however_the_data_are_dealt_and_the_clients_asked(tmp_path):
    """Half of the clients a round, and all at once: all are counted once in the end."""
    together = small.run(tmp_path / "1", "afl", **SETTINGS)
    apart = small.run(tmp_path / "2", "afl", **{**SETTINGS, "num_server_rounds": 8}, fraction_train=0.4)
    one, other = (small.global_model(run) for run in (together, apart))
    assert small.close(one, other, 1e-4)


def test_a_client_sends_its_moments_once(tmp_path):
    rounds = small.run(tmp_path, "afl", **{**SETTINGS, "num_server_rounds": 2}).rounds
    width = small.network(small.config_of("afl", **SETTINGS))[-1].in_features
    numbers = small.CLIENTS * (width**2 + width * 10)
    assert rounds[0]["paper_bytes_up"] == 8 * numbers
    assert rounds[0]["bytes_up"] == pytest.approx(8 * numbers, rel=0.05)
    assert rounds[1]["paper_bytes_up"] == 0
    assert rounds[1]["bytes_up"] < 2000
    assert (rounds[0]["flops"] > 0, rounds[1]["flops"]) == (True, 0)


@pytest.mark.full
def test_it_keeps_the_laws():
    check_system("afl", plugins=str(small.GALLERY / "afl.py"))
