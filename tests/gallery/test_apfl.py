"""APFL against its algorithm, written again in plain PyTorch: autograd differentiates the mixture by v and by α."""

from __future__ import annotations

import pytest
import torch

from fedprune_app.testing import check_system
from tests.gallery import federations as small

pytestmark = pytest.mark.usefixtures("no_plugins")


def slopes(model, own, common, alpha, images, labels):
    """The gradients of the loss of ``α v + (1 − α) w`` by v, by name, and by α."""
    leaves = {name: t.clone().requires_grad_() for name, t in own.items()}
    share = torch.tensor(alpha, requires_grad=True)
    mixed = {name: share * leaves[name] + (1 - share) * common[name] for name in own}
    logits = torch.func.functional_call(model, mixed, (images,))
    loss = torch.nn.functional.cross_entropy(logits, labels)
    *by_own, by_share = torch.autograd.grad(loss, [*leaves.values(), share])
    return dict(zip(leaves, by_own, strict=True)), float(by_share)


@pytest.mark.parametrize("adaptive", [True, False])
def test_it_is_the_papers_algorithm(tmp_path, adaptive):
    settings = {"apfl__adaptive": adaptive, "apfl__alpha": 0.6, "num_server_rounds": 3, "learning_rate": 0.2}
    config = small.config_of("apfl", **settings)
    finished = small.run(tmp_path, "apfl", **settings)
    model, examples = small.network(config), small.examples(config)
    server, rate = small.parameters(model), config.learning_rate
    own, alphas, mixed = [dict(server) for _ in examples], [0.6] * len(examples), [{} for _ in examples]
    for _ in range(config.num_server_rounds):
        sent = []
        for k, (images, labels) in enumerate(examples):
            if adaptive:
                alphas[k] -= rate * slopes(model, own[k], server, alphas[k], images, labels)[1]
            w = dict(server)
            for _ in range(config.local_epochs):
                slope = small.gradients(model, w, images, labels)
                w = {name: t - rate * slope[name] for name, t in w.items()}
            for _ in range(config.local_epochs):
                slope, _ = slopes(model, own[k], w, alphas[k], images, labels)
                own[k] = {name: t - rate * slope[name] for name, t in own[k].items()}
            mixed[k] = {name: alphas[k] * own[k][name] + (1 - alphas[k]) * w[name] for name in w}
            sent.append(w)
        server = small.mean(sent, [len(labels) for _, labels in examples])
    assert small.close(small.global_model(finished), server)
    for k, model_of_client in enumerate(mixed):
        assert small.close(small.state_of(finished, k, "weights"), model_of_client)
        assert small.close(small.state_of(finished, k, "own"), own[k], 1e-5)
    told = [row["alpha"] for row in finished.clients if row["round"] == config.num_server_rounds]
    assert told == pytest.approx(alphas, abs=1e-6)
    assert adaptive == any(alpha != 0.6 for alpha in alphas)


@pytest.mark.full
def test_it_keeps_the_laws():
    check_system("apfl", plugins=str(small.GALLERY / "apfl.py"))


def test_a_running_variance_is_that_of_the_common_model_and_never_negative(tmp_path):
    settings = {"apfl__alpha": 0.1, "apfl__adaptive": False, "num_server_rounds": 4, "model": "cnn-small-bn"}
    finished = small.run(tmp_path, "apfl", **settings)
    for client in range(small.CLIENTS):
        weights = small.state_of(finished, client, "weights")
        variances = [tensor for name, tensor in weights.items() if name.endswith("running_var")]
        assert variances
        assert all(float(tensor.min()) >= 0 for tensor in variances)
        assert not any("running" in name for name in small.state_of(finished, client, "own"))
