"""FedP3 again, slowly: Algorithms 1 to 3 from the text, on a network written by hand, to compare the product with.

Shared with the product are its inputs alone: a client's data, the initial model, and what is drawn at random. Pruning,
local training (masked, in full coordinates, whatever is sliced there) and averaging are plain PyTorch and Python here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import torch
from torch.nn import functional as F

from fedprune_app.core import rng
from fedprune_app.data.splits import client_data, data_config
from fedprune_app.models.initial import initial_model

HIDDEN = ("1", "2", "3")  # convolutions, each with its norm
LAYERS = {k: (f"conv{k}.weight", f"conv{k}.bias", f"gn{k}.weight", f"gn{k}.bias") for k in HIDDEN}
LAYERS["out"] = ("fc1.weight", "fc1.bias")
WEIGHT = {"1": "conv1.weight", "2": "conv2.weight", "3": "conv3.weight", "out": "fc1.weight"}
GROUP_SIZE = {"1": 4, "2": 8, "3": 16}  # channels of a norm's group: 16, 32, 64 channels in 4 groups


def logits(w, x):
    """cnn-gn: three convolutions with norms, the last two pooled before them, and a linear layer; in float64."""
    w, x = {name: tensor.double() for name, tensor in w.items()}, x.double()
    for k in HIDDEN:
        x = F.conv2d(x, w[f"conv{k}.weight"], w[f"conv{k}.bias"], stride=2 if k == "1" else 1, padding=1)
        if k != "1":
            x = F.max_pool2d(x, 2)
        mean = x.unflatten(1, (4, -1)).flatten(2).mean(2)[:, :, None, None, None]
        grouped = x.unflatten(1, (4, -1))
        variance = (grouped - mean).square().flatten(2).mean(2)[:, :, None, None, None]
        x = ((grouped - mean) / torch.sqrt(variance + 1e-5)).flatten(1, 2)
        x = torch.relu(x * w[f"gn{k}.weight"].view(-1, 1, 1) + w[f"gn{k}.bias"].view(-1, 1, 1))
    return x.flatten(1) @ w["fc1.weight"].T + w["fc1.bias"]


@dataclass
class Client:
    tensors: dict = field(default_factory=dict)
    masks: dict = field(default_factory=dict)
    round: int = 0


@dataclass
class Outcome:
    server: dict
    clients: dict
    sets: list  # per round: client → hidden layers
    margins: list  # how far the first weight that is pruned is from the last that is not


def federation(config, num_clients):
    model = initial_model("cnn-gn", "digits", (1, 8, 8), 10, init="default", seed=config.seed)
    server = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    initial = dict(server)
    outcome = Outcome(server, {k: Client() for k in range(num_clients)}, [], [])
    options = config.fedp3
    for t in range(1, config.num_server_rounds + 1):
        count = max(math.floor(config.fraction_train * num_clients), 1)
        order = rng.numpy_generator(config.seed, "sample", round=t).permutation(num_clients)
        chosen = sorted(int(k) for k in order[:count])
        sets = {k: layer_set(options, config.seed, k, num_clients, t) for k in range(num_clients)}
        outcome.sets.append({k: sets[k] for k in chosen})
        sent = {}
        for k in chosen:
            client = outcome.clients[k]
            own = (*sets[k], "out")
            start, masks = pruned(config, server, own, k, t, outcome.margins)
            if options.personal_head:
                start |= {name: (client.tensors or initial)[name] for name in LAYERS["out"]}
            data = client_data(data_config(config), k, num_clients)
            trained = local_training(config, start, masks, own, data, k, t)
            outcome.clients[k] = Client(trained, masks, t)
            sent[k] = {layer: {n: trained[n] for n in LAYERS[layer]} for layer in own}
        for layer, names in LAYERS.items():
            if layer == "out" and options.personal_head:
                continue
            senders = [k for k in chosen if layer in sent[k]]
            if senders:
                coefficients = alphas(options, sets, senders, layer, sent)
                for name in names:
                    total = sum(a * sent[k][layer][name].double() for k, a in zip(senders, coefficients, strict=True))
                    server[name] = total.float()
    return outcome


def layer_set(options, seed, k, n, t):
    draw = rng.numpy_generator(seed, "layers", k, t if options.assignment == "per-round" else 0)
    if options.assignment != "balanced":
        draw.integers(3)  # where a balanced client would begin
    if options.layer_set == "all":
        return HIDDEN
    if options.layer_set == "by-hand":
        texts = options.layers.split(";")
        text = texts[k % len(texts)] if options.assignment == "balanced" else texts[draw.integers(len(texts))]
        named = {part.strip("-")[-1] for part in text.split()}
        return tuple(x for x in HIDDEN if (x in named) != ("-" in text))
    sizes = {"lowerb": [1], "opu2": [2], "opu3": [3], "opu1-2-3": [1, 2, 3], "opu2-3": [2, 3]}[options.layer_set]
    if options.assignment == "balanced" and len(sizes) == 1:
        group = k // (n // 3)  # the code: id // 25, for four layers and 100 clients
        return tuple(sorted({str((group + i) % 3 + 1) for i in range(sizes[0])}))
    size = sizes[draw.integers(len(sizes))]
    return tuple(sorted(HIDDEN[i] for i in draw.permutation(3)[:size]))


def pruned(config, server, own, k, t, margins):
    """``W^l`` for own layers, ``P_i W^l`` for the others; a mask for each weight tensor of those."""
    density = config.density
    start, masks = {n: w.clone() for n, w in server.items()}, {}
    for layer in LAYERS:
        name = WEIGHT[layer]
        if layer in own or density == 1:
            continue
        flat = server[name].abs().flatten().tolist()
        keep = math.floor(Fraction(str(density)) * len(flat))
        ranked = sorted(range(len(flat)), key=lambda i: (-flat[i], i))
        margins.append(flat[ranked[keep - 1]] - flat[ranked[keep]])
        mask = torch.zeros(len(flat), dtype=torch.bool)
        mask[ranked[:keep]] = True
        masks[name] = mask.view(server[name].shape)
        start[name] = start[name] * masks[name]
    return start, masks


def local_training(config, start, masks, own, data, k, t):
    options = config.fedp3
    w = {n: tensor.clone() for n, tensor in start.items()}
    velocity = {n: torch.zeros_like(tensor) for n, tensor in start.items()}
    rate = config.learning_rate * config.lr_decay ** (t - 1)
    order = rng.generator(config.seed, "train", k, t)
    draw = rng.numpy_generator(config.seed, "local pruning", k, t)
    for _ in range(config.local_epochs):
        shuffled = torch.randperm(len(data.train_labels), generator=order).tolist()
        while shuffled:
            batch, shuffled = shuffled[: config.batch_size], shuffled[config.batch_size :]
            here = step_masks(options, w, own, draw)
            leaves = {n: (tensor * here[n]).requires_grad_() for n, tensor in w.items()}
            F.cross_entropy(logits(leaves, data.train_images[batch]), data.train_labels[batch]).backward()
            gradients = {n: leaf.grad * here[n] for n, leaf in leaves.items()}
            norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))
            for n, g in gradients.items():
                if config.max_grad_norm:
                    g = g * min(1.0, config.max_grad_norm / (norm + 1e-6))
                g = g * masks.get(n, 1) + config.weight_decay * w[n]
                moved = config.momentum * velocity[n] + g
                velocity[n] = torch.where(here[n].bool(), moved, velocity[n])
                w[n] = torch.where(here[n].bool(), w[n] - rate * moved, w[n])
    return w


def step_masks(options, w, own, draw):
    """What of every tensor one step has, 1 or 0."""
    ones = {n: torch.ones_like(tensor) for n, tensor in w.items()}
    if options.local == "fixed":
        return ones
    p = options.local_density
    q = p + (1 - p) * draw.random()
    if options.local == "uniform":
        for layer in LAYERS:
            if layer not in own:
                numbers = np.frombuffer(draw.bytes(2 * w[WEIGHT[layer]].numel()), dtype="<u2")
                keep = [int(number) < round(q * 65536) for number in numbers]
                ones[WEIGHT[layer]] = torch.tensor(keep).view(w[WEIGHT[layer]].shape).float()
        return ones
    for layer, follower in (("1", "2"), ("2", "3"), ("3", "out")):
        if layer in own and follower in own:
            continue
        units = w[WEIGHT[layer]].shape[0]
        whole_groups = math.ceil(math.ceil(q * units) / GROUP_SIZE[layer]) * GROUP_SIZE[layer]
        for name in LAYERS[layer]:
            ones[name][whole_groups:] = 0
        inputs = w[WEIGHT[follower]].shape[1]
        ones[WEIGHT[follower]][:, whole_groups * (inputs // units) :] = 0
    return ones


def alphas(options, sets, senders, layer, sent):
    """Algorithm 3: the coefficients of a layer's senders."""
    if options.aggregation == "simple":
        return [1 / len(senders)] * len(senders)
    if options.aggregation == "attention":
        flat = {k: torch.cat([sent[k][layer][n].flatten() for n in LAYERS[layer]]).double() for k in senders}
        mean = sum(flat.values()) / len(senders)
        far = [float((flat[k] - mean).square().sum()) for k in senders]
        scores = [-d / (options.temperature * sum(far) / len(far)) if any(far) else 0.0 for d in far]
        return [math.exp(s) / sum(math.exp(other) for other in scores) for s in scores]
    extra = options.aggregation == "weighted-with-head"
    count = {k: len(own) + extra for k, own in sets.items()}
    total = sum(count.values()) if options.aggregation == "weighted-literal" else sum(count[k] for k in senders)
    return [count[k] / total for k in senders]
