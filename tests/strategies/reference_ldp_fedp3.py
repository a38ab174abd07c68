"""LDP-FedP3 again, slowly: Algorithm 5 from the text, one example at a time, with sketches as diagonal matrices.

Shared with the product are its inputs alone: a client's data, the initial model, and the streams of random numbers. The
noise is each step's, times the step size (the proof's reading), and gradients are clipped one by one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch.nn import functional as F

from fedprune_app.core import rng
from fedprune_app.data.splits import client_data, data_config
from fedprune_app.models.initial import initial_model
from tests.strategies.reference import logits

NAMES = ("conv1.weight", "conv1.bias", "conv2.weight", "conv2.bias", "fc1.weight", "fc1.bias")


@dataclass
class Outcome:
    server: dict
    clients: dict = field(default_factory=dict)  # the last ũ_i of each
    batches: list = field(default_factory=list)  # sizes of the Poisson samples


def stream(seed, role, partition, round):
    """Where the tests have the noise come from."""
    return rng.generator(seed, f"known noise of {role}", partition, round)


def federation(config, num_clients):
    model = initial_model("cnn-small", "digits", (1, 8, 8), 10, init="default", seed=config.seed)
    outcome = Outcome({name: dict(model.named_parameters())[name].detach().clone() for name in NAMES})
    sizes = [outcome.server[name].numel() for name in NAMES]
    dimension = sum(sizes)
    for k in range(1, config.num_server_rounds + 1):
        order = rng.numpy_generator(config.seed, "sample", round=k).permutation(num_clients)
        chosen = sorted(int(i) for i in order[: max(math.floor(config.fraction_train * num_clients), 1)])
        n = len(chosen)
        total = torch.zeros(dimension, dtype=torch.float64)
        owner = who_sends(config, k, n, sizes)
        for place, i in enumerate(chosen):
            perturbed = local_steps(config, outcome, i, num_clients, k)
            outcome.clients[i] = perturbed
            vector = torch.cat([perturbed[name].flatten() for name in NAMES]).double()
            diagonal = torch.tensor([float(n) if owner[j] == place else 0.0 for j in range(dimension)])
            total += diagonal * vector  # S_i ũ_i
        parts = (total / n).float().split(sizes)
        outcome.server = {m: part.view(outcome.server[m].shape) for m, part in zip(NAMES, parts, strict=True)}
    return outcome


def who_sends(config, k, n, sizes):
    """Definition 2: a random permutation, cut into n blocks, of coordinates."""
    draw = rng.generator(config.seed, "sketch", round=k)
    names = torch.randperm(n, generator=draw).tolist()
    return [names[place % n] for place in torch.randperm(sum(sizes), generator=draw).tolist()]


def local_steps(config, outcome, i, num_clients, k):
    data = client_data(data_config(config), i, num_clients)
    m, b, C = len(data.train_labels), config.batch_size, config.dp.clip_norm
    gamma = config.learning_rate * config.lr_decay ** (k - 1)
    draw = stream(config.seed, "train", i, k)
    w = {name: tensor.clone() for name, tensor in outcome.server.items()}
    velocity = {name: torch.zeros_like(tensor) for name, tensor in w.items()}
    for _ in range(config.local_epochs * math.ceil(m / b)):
        coins = torch.rand(m, generator=draw, dtype=torch.float64)
        batch = [j for j in range(m) if coins[j] < min(1, b / m)]
        outcome.batches.append(len(batch))
        total = {name: torch.zeros_like(tensor) for name, tensor in w.items()}
        for j in batch:
            leaves = {name: tensor.clone().requires_grad_() for name, tensor in w.items()}
            F.cross_entropy(logits(leaves, data.train_images[j : j + 1]), data.train_labels[j : j + 1]).backward()
            norm = math.sqrt(sum(float(leaf.grad.double().square().sum()) for leaf in leaves.values()))
            for name, leaf in leaves.items():
                total[name] += leaf.grad * min(1.0, C / norm)
        size = sum(t.numel() for t in w.values())
        zeta = torch.randn(size, generator=draw, dtype=torch.float64).float() * config.dp.noise_multiplier * C
        for name, noise in zip(NAMES, zeta.split([w[name].numel() for name in NAMES]), strict=True):
            gradient = (total[name] + noise.view(w[name].shape)) / min(b, m) + config.weight_decay * w[name]
            velocity[name] = config.momentum * velocity[name] + gradient
            w[name] = w[name] - gamma * velocity[name]
    return w
