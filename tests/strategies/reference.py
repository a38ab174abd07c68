"""A whole federation again, slowly: written from the algorithms' text, to compare the product with.

Shared with the product are only its inputs: a client's data, the initial model, and what is drawn at random (who takes
part, in what order examples come). The network, the optimiser's use, the pruning, the gate and the averages are plain
PyTorch and Python here; decisions are made on exact fractions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction

import torch
from torch.nn import functional as F

from fedprune_app.core import rng
from fedprune_app.data.splits import client_data, data_config
from fedprune_app.models.initial import initial_model

WEIGHTS = ("conv1.weight", "conv2.weight", "fc1.weight")
BIASES = ("conv1.bias", "conv2.bias", "fc1.bias")


def logits(tensors, images):
    """cnn-small by hand: two blocks of 3x3 convolution, ReLU and pooling, then one linear layer."""
    for block in ("conv1", "conv2"):
        images = F.conv2d(images, tensors[f"{block}.weight"], tensors[f"{block}.bias"], padding=1)
        images = F.max_pool2d(F.relu(images), 2)
    return images.flatten(1) @ tensors["fc1.weight"].T + tensors["fc1.bias"]


def share_correct(tensors, images, labels):
    """Accuracy in [0, 1], exactly; None without examples."""
    with torch.no_grad():
        correct = int((logits(tensors, images).argmax(1) == labels).sum())
    return Fraction(correct, len(labels)) if len(labels) else None


@dataclass
class Client:
    """What a client keeps between rounds, and the last round it took part in."""

    tensors: dict
    masks: dict
    round: int = 0
    pruned: list = field(default_factory=list)  # percent of all parameters, after each round it took part in


@dataclass
class Outcome:
    server: dict
    clients: dict
    participants: list
    decisions: list  # one word per (round, participant): why and how much was pruned


def federation(config, num_clients):
    """Sub-FedAvg (Un), FedAvg or Standalone, as ``config.system`` says."""
    model = initial_model("cnn-small", "digits", (1, 8, 8), 10, init=config.init, seed=config.seed)
    server = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    full = {name: torch.ones_like(server[name], dtype=torch.bool) for name in WEIGHTS}
    clients = {k: Client(dict(server), dict(full)) for k in range(num_clients)}
    outcome = Outcome(server, clients, [], [])
    for t in range(1, config.num_server_rounds + 1):
        count = max(math.floor(config.fraction_train * num_clients), 1)
        drawn = rng.numpy_generator(config.seed, "sample", round=t).permutation(num_clients)
        chosen = sorted(int(k) for k in drawn[:count])
        outcome.participants.append(chosen)
        for k in chosen:
            data = client_data(data_config(config), k, num_clients)
            start = clients[k].tensors if config.system == "standalone" else outcome.server
            _client_update(config, clients[k], start, data, k, t, outcome.decisions)
        if config.system == "subfedavg":
            outcome.server = _mean_over_keepers([clients[k] for k in chosen], outcome.server)
        elif config.system == "fedavg":
            sizes = [len(client_data(data_config(config), k, num_clients).train_labels) for k in chosen]
            outcome.server = _weighted_mean([clients[k].tensors for k in chosen], sizes)
    return outcome


def _client_update(config, client, start, data, k, t, decisions):
    masked = config.system == "subfedavg"
    tensors = {
        name: (tensor * client.masks[name] if masked and name in WEIGHTS else tensor).clone().requires_grad_()
        for name, tensor in start.items()
    }
    optimizer = torch.optim.SGD(
        tensors.values(),
        lr=config.learning_rate * config.lr_decay ** (t - 1),
        momentum=config.momentum,
        weight_decay=config.weight_decay,
    )
    order = rng.generator(config.seed, "train", k, t)
    after_first = None
    for _ in range(config.local_epochs):
        shuffled = torch.randperm(len(data.train_labels), generator=order).tolist()
        while shuffled:
            batch, shuffled = shuffled[: config.batch_size], shuffled[config.batch_size :]
            optimizer.zero_grad()
            # In float64: in float32, rounding decides which of two equal pixels a pool takes, on each processor anew.
            exact = {name: tensor.double() for name, tensor in tensors.items()}
            F.cross_entropy(logits(exact, data.train_images[batch].double()), data.train_labels[batch]).backward()
            if masked:
                for name in WEIGHTS:
                    tensors[name].grad *= client.masks[name]
            optimizer.step()
        if after_first is None:
            after_first = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    trained = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    client.tensors, client.round = trained, t
    if masked:
        decisions.append(_perhaps_prune(config.subfedavg, client, after_first, data))


def _perhaps_prune(options, client, after_first, data):
    """Algorithm 1, lines 5, 6 and 13 to 16, as resolved: all percentages are exact fractions."""
    total = sum(tensor.numel() for tensor in client.tensors.values())
    pruned = _percent_pruned(client.masks, total)
    client.pruned.append(pruned)
    step, target = Fraction(options.prune_step), Fraction(options.target_rate)
    first = _without_smallest(after_first, client.masks, step)
    last = _without_smallest(client.tensors, client.masks, step)
    shares = [Fraction(int((first[name] != last[name]).sum()), first[name].numel()) for name in WEIGHTS]
    if not sum(shares) / len(shares) > Fraction(options.mask_distance):
        return "masks too close"
    if not pruned < target:
        return "target reached"
    kind = "full step"
    if target - pruned < step:
        share = (target - pruned) / (100 - pruned) * 100
        kind = "last step" if share <= Fraction(options.final_step_cap) else "capped step"
        last = _without_smallest(client.tensors, client.masks, min(share, Fraction(options.final_step_cap)))
    candidate = {name: w * last[name] if name in WEIGHTS else w for name, w in client.tensors.items()}
    images, labels = (
        (data.test_images, data.test_labels)
        if options.gate_split == "test"
        else (data.validation_images, data.validation_labels)
    )
    accuracy = share_correct(candidate, images, labels)
    if accuracy is None or not 100 * accuracy > Fraction(options.accuracy_threshold):
        return "not accurate enough"
    client.tensors, client.masks = candidate, last
    client.pruned[-1] = _percent_pruned(last, total)
    return kind


def _percent_pruned(masks, total):
    return Fraction(100 * sum(int((~mask).sum()) for mask in masks.values()), total)


def _without_smallest(tensors, masks, percent):
    """Per tensor, drop what is strictly below the interpolated percentile of |w| over the kept, non-zero weights."""
    result = {}
    for name, mask in masks.items():
        magnitudes = tensors[name].abs()
        ordered = sorted(magnitudes[mask & (magnitudes > 0)].tolist())  # float32 values, exact as Python floats
        place = percent / 100 * (len(ordered) - 1)
        below = math.floor(place)
        threshold = Fraction(ordered[below])
        if place > below:
            threshold += (Fraction(ordered[below + 1]) - threshold) * (place - below)
        dropped = {value for value in ordered if Fraction(value) < threshold}
        keep = [
            kept and value not in dropped
            for kept, value in zip(mask.flatten().tolist(), magnitudes.flatten().tolist(), strict=True)
        ]
        result[name] = torch.tensor(keep).reshape(mask.shape)
    return result


def _mean_over_keepers(clients, server):
    result = {}
    for name, old in server.items():
        if name in BIASES:
            result[name] = torch.stack([c.tensors[name].double() for c in clients]).mean(0).float()
            continue
        total = torch.stack([(c.tensors[name] * c.masks[name]).double() for c in clients]).sum(0)
        keepers = torch.stack([c.masks[name] for c in clients]).sum(0)
        result[name] = torch.where(keepers > 0, total / keepers.clamp(min=1), old.double()).float()
    return result


def _weighted_mean(models, sizes):
    return {
        name: (sum(n * model[name].double() for n, model in zip(sizes, models, strict=True)) / sum(sizes)).float()
        for name in models[0]
    }
