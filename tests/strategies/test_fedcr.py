"""FedCR, and FedCR with FedP3's layers, against a slow reference; what travels and what stays."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from fedprune_app.core import rng
from fedprune_app.data.splits import client_data, data_config
from fedprune_app.engine.exchange import TooFewReplies
from fedprune_app.models.initial import initial_model
from tests.examples import in_test
from tests.refusing import refuses

SETTINGS = {
    "system": "fedcr",
    "model": "cnn-small-cr",
    "clients": 6,
    "num_server_rounds": 3,
    "fraction_train": 0.5,
    "batch_size": 24,
    "momentum": 0.0,
    "learning_rate": 0.02,
    "max_grad_norm": 10.0,
    "fedcr_beta": 0.01,
    "density": 0.8,
}
VARIANTS = {
    "as coded": {},
    "opu2": {"fedcr_layer_set": "opu2"},
}
LAYERS = {k: (f"{k}.weight", f"{k}.bias") for k in ("conv1", "conv2", "fc1")}
HEAD = ("fc2.weight", "fc2.bias")
LATENT = 256


def encode(w, x):
    for k in ("conv1", "conv2"):
        x = F.max_pool2d(F.relu(F.conv2d(x, w[f"{k}.weight"], w[f"{k}.bias"], padding=1)), 2)
    out = x.flatten(1) @ w["fc1.weight"].T + w["fc1.bias"]
    return out[:, :LATENT], torch.log1p(torch.exp(out[:, LATENT:]))


def head(w, z):
    return z @ w["fc2.weight"].T + w["fc2.bias"]


def divergence(m1, s1, m2, s2):
    return (torch.log(s2 / s1) + (s1**2 + (m1 - m2) ** 2) / (2 * s2**2) - 0.5).sum(1)


def reference(config, n):
    model = initial_model("cnn-small-cr", "digits", (1, 8, 8), 10, init="default", seed=config.seed)
    initial = {name: p.detach().clone() for name, p in model.named_parameters()}
    server = {name: initial[name].clone() for names in LAYERS.values() for name in names}
    prior = torch.zeros(10, LATENT), torch.ones(10, LATENT)
    local = {}
    for t in range(1, config.num_server_rounds + 1):
        order = rng.numpy_generator(config.seed, "sample", round=t).permutation(n)
        chosen = sorted(int(k) for k in order[: math.floor(config.fraction_train * n)])
        sent, products = {}, []
        for k in chosen:
            own = layer_set(config, k, n)
            w, masks = pruned(config, {**(local.get(k) or initial), **server}, own)
            products.append(train(config, w, masks, prior, client_data(data_config(config), k, n), k, t))
            local[k], sent[k] = w, own
        for layer, names in LAYERS.items():
            senders = [k for k in chosen if layer in sent[k]]
            for name in names:
                if senders:
                    server[name] = (sum(local[k][name].double() for k in senders) / len(senders)).float()
        of_classes = sum(p for p, _ in products)
        mean, std = sum(m for _, m in products) / (1 + of_classes), 1 / (1 + of_classes).sqrt()
        seen = of_classes > 0  # a class that nobody of the round has keeps its Gaussian
        prior = torch.where(seen, mean.float(), prior[0]), torch.where(seen, std.float(), prior[1])
    return server, prior, local


def layer_set(config, k, n):
    names = list(LAYERS)
    return set(names) if config.fedcr.layer_set == "all" else {names[k * 3 // n], names[(k * 3 // n + 1) % 3]}


def pruned(config, w, own):
    w, masks = {name: tensor.clone() for name, tensor in w.items()}, {}
    for layer in LAYERS:
        if layer not in own:
            name = f"{layer}.weight"
            flat = w[name].abs().flatten()
            keep = math.floor(config.density * len(flat) + 1e-9)
            masks[name] = (flat >= flat.sort(descending=True).values[keep - 1]).view(w[name].shape)
            assert int(masks[name].sum()) == keep
            w[name] *= masks[name]
    return w, masks


def train(config, w, masks, prior, data, k, t):
    order, codes = rng.generator(config.seed, "train", k, t), rng.generator(config.seed, "codes", k, t)
    options = config.fedcr
    total = [torch.zeros(10, LATENT, dtype=torch.float64) for _ in range(2)]
    for epoch in range(config.local_epochs):
        for batch in torch.randperm(len(data.train_labels), generator=order).split(config.batch_size):
            leaves = {name: tensor.requires_grad_() for name, tensor in w.items()}
            y = data.train_labels[batch]
            mean, std = encode(leaves, data.train_images[batch])
            noise = torch.randn(options.train_draws, len(y), LATENT, generator=codes)
            loss = sum(F.cross_entropy(head(leaves, mean + std * e), y) for e in noise) / len(noise)
            loss = loss + options.beta * divergence(prior[0][y], prior[1][y], mean, std).mean()
            gradients = torch.autograd.grad(loss, list(leaves.values()))
            norm = torch.stack([g.norm() for g in gradients]).norm()
            for name, g in zip(leaves, gradients, strict=True):
                step = g * min(1.0, config.max_grad_norm / float(norm + 1e-6)) * masks.get(name, 1)
                w[name] = (w[name] - config.learning_rate * step).detach()
            if epoch == config.local_epochs - 1:
                for m, s, label in zip(mean.detach().double(), std.detach().double(), y, strict=True):
                    total[0][label] += 1 / s**2
                    total[1][label] += m / s**2
    return total


@pytest.fixture(scope="module", params=in_test(VARIANTS, "as coded"))
def both(request, federation):
    run = federation(**SETTINGS, **VARIANTS[request.param])
    return run, reference(run.config, 6)


def test_it_is_the_slow_reference(both):
    run, (server, prior, local) = both
    torch.testing.assert_close({n: run.server[n] for n in server}, server, rtol=1e-4, atol=5e-6)
    torch.testing.assert_close(run.server["prior.mean"], prior[0], rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(run.server["prior.std"], prior[1], rtol=1e-3, atol=1e-6)
    assert prior[1].min() < 0.9
    for k, expected in local.items():
        weights = run.client(k)[1].group("weights")
        torch.testing.assert_close({n: weights[n] for n in expected}, expected, rtol=1e-4, atol=5e-6)


def test_heads_stay_and_only_the_priors_come_down_beside_the_layers(both):
    run, _ = both
    for message in run.wiretap.of("train").values():
        own = {n for layer in layer_set(run.config, message.partition, 6) for n in LAYERS[layer]}
        assert message.up.tensors.keys() == own | {"experts.precision", "experts.weighted-mean"}
        assert message.down.tensors.keys() == {n for x in LAYERS.values() for n in x} | {"prior.mean", "prior.std"}
    assert not set(HEAD) & run.server.keys()


def test_a_personal_model_is_tested_by_the_mean_prediction_over_draws(federation):
    run = federation(**SETTINGS)
    data = data_config(run.config)
    for k, message in run.wiretap.of("train").items():
        w, split = run.client(k)[1].group("weights"), client_data(data, k, 6)
        noise = torch.randn((30, LATENT), generator=rng.generator(run.config.seed, "codes to test", k))
        mean, std = encode(w, split.test_images)
        chances = sum(head(w, mean + std * e).softmax(1) for e in noise)
        right = float((chances.argmax(1) == split.test_labels).float().mean())
        assert run.rows(message.round)[k]["accuracy_personal"] == pytest.approx(
            right, abs=1.01 / len(split.test_labels)
        )


def test_a_network_without_a_code_is_refused_and_so_is_local_pruning(federation):
    with pytest.raises(TooFewReplies, match="allowed with system 'fedcr': one whose name ends in -cr"):
        federation(**SETTINGS | {"model": "cnn-small"}, fresh=True)
    with refuses("fedp3.local", "uniform"):
        federation(**SETTINGS, fedp3_local="uniform", fresh=True)
