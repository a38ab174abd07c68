"""SSFL against its algorithm: SNIP's gradient by the mask itself, and FedAvg on the kept weights."""

from __future__ import annotations

import pytest
import torch

from fedprune_app.exports.find import find_model
from fedprune_app.testing import check_system
from tests.gallery import federations as small

pytestmark = pytest.mark.usefixtures("no_plugins")
SETTINGS = {"density": 0.2, "num_server_rounds": 3}


def saliency(model, tensors, images, labels):
    """SNIP: the magnitude of the loss's gradient by a mask c that stands at 1, in the network of weights ``c w``."""
    ones = {name: torch.ones_like(t, requires_grad=True) for name, t in tensors.items() if name.endswith("weight")}
    masked = {name: tensor * ones[name] if name in ones else tensor for name, tensor in tensors.items()}
    loss = torch.nn.functional.cross_entropy(torch.func.functional_call(model, masked, (images,)), labels)
    return {n: g.abs() for n, g in zip(ones, torch.autograd.grad(loss, list(ones.values())), strict=True)}


def test_it_is_the_papers_algorithm(tmp_path):
    config = small.config_of("ssfl", **SETTINGS)
    finished = small.run(tmp_path, "ssfl", **SETTINGS)
    model, examples = small.network(config), small.examples(config)
    server, counts = small.parameters(model), [len(labels) for _, labels in examples]
    scores = small.mean([saliency(model, server, *part) for part in examples], counts)
    ranked = torch.cat([score.view(-1) for score in scores.values()]).sort(descending=True).values
    last = ranked[int(0.2 * len(ranked)) - 1]
    kept = {name: (score >= last).float() for name, score in scores.items()}
    server = {name: tensor * kept.get(name, 1) for name, tensor in server.items()}
    for _ in range(config.num_server_rounds):
        sent = []
        for images, labels in examples:
            tensors = server
            for _ in range(config.local_epochs):
                slope = small.gradients(model, tensors, images, labels)
                tensors = {n: t - config.learning_rate * slope[n] * kept.get(n, 1) for n, t in tensors.items()}
            sent.append(tensors)
        server = small.mean(sent, counts)
    assert small.close(small.global_model(finished), server)


def test_scores_are_part_of_round_1_and_no_replies(tmp_path):
    rounds = small.run(tmp_path, "ssfl", **SETTINGS).rounds
    assert [row["replies"] for row in rounds] == [small.CLIENTS] * 3
    dense, scores = 4 * 6090 * small.CLIENTS, 4 * (9 * 16 + 9 * 16 * 32 + 1280) * small.CLIENTS
    assert rounds[0]["bytes_down"] - rounds[1]["bytes_down"] == pytest.approx(dense, rel=0.1)
    assert rounds[0]["bytes_up"] - rounds[1]["bytes_up"] == pytest.approx(scores, rel=0.1)


def test_a_clients_exported_model_is_as_sparse_as_the_run_says(tmp_path):
    """Its state has no masks: each message brings them."""
    finished = small.run(tmp_path, "ssfl", **SETTINGS)
    found = find_model(finished.folder, 1, trusted=[str(small.file_of("ssfl"))])
    density = next(row["density"] for row in reversed(finished.clients) if row["partition"] == 1)
    assert found.info.density == pytest.approx(density, abs=1e-6)
    assert density < 0.3


def test_each_client_is_charged_once_for_the_gradient_of_its_score(tmp_path):
    rounds = small.run(tmp_path, "ssfl", **SETTINGS).rounds
    examples = small.examples(small.config_of("ssfl", **SETTINGS))
    one_example = 3 * 2 * (64 * 9 * 16 + 16 * 9 * 16 * 32 + 1280)  # forward and backward, of cnn-small's three layers
    dense = one_example * sum(len(labels) for _, labels in examples)
    assert rounds[0]["flops"] - rounds[1]["flops"] == pytest.approx(dense, rel=1e-6)
    assert rounds[1]["flops"] == rounds[2]["flops"]


def test_clients_that_are_held_out_have_no_part_in_the_mask(tmp_path):
    settings = {**SETTINGS, "holdout_clients": 1}
    finished = small.run(tmp_path, "ssfl", **settings)
    (held_out,) = [row["partition"] for row in finished.clients if row.get("accuracy_newcomer") is not None]
    config = small.config_of("ssfl", **settings)
    model, examples = small.network(config), small.examples(config)
    del examples[held_out]
    scores = [saliency(model, small.parameters(model), *part) for part in examples]
    mean = small.mean(scores, [len(labels) for _, labels in examples])
    ranked = torch.cat([score.view(-1) for score in mean.values()]).sort(descending=True).values
    last = ranked[int(0.2 * len(ranked)) - 1]
    for name, score in mean.items():
        assert not bool(small.global_model(finished)[name][score < last].any())


@pytest.mark.full
def test_it_keeps_the_laws():
    check_system("ssfl", plugins=str(small.GALLERY / "ssfl.py"), settings={"density": 0.2})
