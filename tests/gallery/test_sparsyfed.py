"""SparsyFed against its algorithm: autograd goes through the powers, and through pruned inputs of each layer."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from fedprune_app.core import rng
from fedprune_app.testing import check_system
from tests.gallery import federations as small
from tests.refusing import refuses

pytestmark = pytest.mark.usefixtures("no_plugins")
SETTINGS = {"density": 0.3, "num_server_rounds": 3, "sparsyfed__exponent": 1.5}


def powered(tensor, exponent):
    return tensor.sign() * tensor.abs() ** exponent


def largest(tensor, count):
    """1 at the entries of largest magnitude, 0 elsewhere."""
    order = tensor.detach().abs().view(-1).argsort(descending=True, stable=True)
    return torch.zeros(tensor.numel()).index_fill(0, order[:count], 1).view(tensor.shape)


def layer(function, inputs, weight, bias, share):
    """A layer whose weight's gradient sees the largest inputs alone."""
    few = (inputs * largest(inputs, int(share * inputs.numel() + 1e-6))).detach()
    seen = function(few, weight, bias)
    return function(inputs, weight.detach(), bias.detach()) + seen - seen.detach()


def loss_of(parameters, shares, images, labels):
    weights = {n: powered(t, 1.5) if n.endswith("weight") else t for n, t in parameters.items()}
    for name in ("conv1", "conv2"):
        weight, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]

        def convolved(x, w, b):
            return F.conv2d(x, w, b, padding=1)

        images = F.relu(F.max_pool2d(layer(convolved, images, weight, bias, shares[name]), 2))
    logits = layer(F.linear, images.flatten(1), weights["fc1.weight"], weights["fc1.bias"], shares["fc1"])
    return F.cross_entropy(logits, labels)


def test_it_is_the_papers_algorithm(tmp_path):
    config = small.config_of("sparsyfed", **SETTINGS)
    finished = small.run(tmp_path, "sparsyfed", **SETTINGS)
    model, examples = small.network(config), small.examples(config)
    server = {n: powered(t, 1 / 1.5) if n.endswith("weight") else t for n, t in small.parameters(model).items()}
    for number in range(1, config.num_server_rounds + 1):
        sent = []
        shares = {n.partition(".")[0]: float((t != 0).double().mean()) for n, t in server.items() if "weight" in n}
        for client, (images, labels) in enumerate(examples):
            own, draw = server, rng.generator(config.seed, "train", client, number)
            for _ in range(config.local_epochs):
                order = torch.randperm(len(labels), generator=draw)  # of equal inputs the first are kept
                leaves = {name: tensor.clone().requires_grad_() for name, tensor in own.items()}
                loss = loss_of(leaves, shares, images[order], labels[order])
                slopes = torch.autograd.grad(loss, list(leaves.values()))
                stepped = zip(leaves.items(), slopes, strict=True)
                own = {n: (t - config.learning_rate * slope.nan_to_num()).detach() for (n, t), slope in stepped}
            weights = [name for name in own if name.endswith("weight")]
            together = torch.cat([powered(own[name], 1.5).view(-1) for name in weights])
            kept = largest(together, int(0.3 * len(together))).split([own[name].numel() for name in weights])
            sent.append({**own, **{n: own[n] * k.view(own[n].shape) for n, k in zip(weights, kept, strict=True)}})
        server = small.mean(sent, [len(labels) for _, labels in examples])
    expected = {n: powered(t, 1.5) if n.endswith("weight") else t for n, t in server.items()}
    assert min(shares.values()) < 0.7
    assert small.close(small.global_model(finished), expected, 1e-5)
    assert finished.rounds[-1]["density_mean"] == pytest.approx((0.3 * 6032 + 58) / 6090, abs=1e-3)


def test_momentum_is_refused(tmp_path):
    with refuses("momentum", 0.5):
        small.run(tmp_path, "sparsyfed", momentum=0.5)


@pytest.mark.full
def test_it_keeps_the_laws():
    settings = {"density": 0.3, "momentum": 0.0}
    check_system("sparsyfed", plugins=str(small.GALLERY / "sparsyfed.py"), settings=settings)


def test_operations_count_by_the_density_of_the_received_model(tmp_path):
    rows = small.run(tmp_path, "sparsyfed", density=0.1, num_server_rounds=3).rounds
    assert rows[1]["flops"] < 0.7 * rows[0]["flops"]
