"""Fed-LTP, Fed-SPA and DP-Fed again, slowly: from the text of the algorithms, to compare the product with.

Shared with the product are its inputs alone: the data, the initial weights, and what is drawn at random. Networks,
Adam, pruning, DP-SGD (one example at a time), averages and validation are plain PyTorch and Python here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction

import torch
from torch.nn import functional as F

from fedprune_app.core import rng
from fedprune_app.data.splits import client_data, data_config, public_part
from fedprune_app.models.initial import initial_model
from fedprune_app.models.vision import build_model
from tests.strategies.reference import WEIGHTS, logits


@dataclass
class Outcome:
    model: dict  # the final one
    last: dict  # of the last round
    trained: dict = field(default_factory=dict)  # client -> its weights as of its last round
    models: dict = field(default_factory=dict)  # client -> index of its sub-model, from 0
    scores: list = field(default_factory=list)  # (correct and noise, examples) per round
    best: int = 0
    counts: list = field(default_factory=list)
    chosen: int = 0
    margins: list = field(default_factory=list)  # between the last weight kept and the first one pruned


def noise_of(config, role, partition, round):
    """The stream that both sides draw from."""
    return rng.generator(config.seed, f"shared noise of {role}", partition, round)


def correct(w, images, labels):
    with torch.no_grad():
        return int((logits(w, images).argmax(1) == labels).sum())


# --- Algorithm 1 ------------------------------------------------------------------------------------------------------


def ticket(config, outcome):
    """Values to start from, trained weights, and masks as 1 and 0."""
    options = config.fedltp
    initial = {n: p.detach().clone() for n, p in _initial(config).named_parameters()}
    if not options.tickets:
        return initial, initial, {n: torch.ones_like(initial[n]) for n in WEIGHTS}
    images, labels = public_part(data_config(config))
    tickets = []
    for j in range(options.tickets):
        network = build_model("cnn-small", (1, 8, 8), 10, rng=rng.generator(config.seed, "ticket", j))
        before = {n: p.detach().clone() for n, p in network.named_parameters()}
        leaves = {n: w.clone().requires_grad_() for n, w in before.items()}
        optimizer = torch.optim.Adam(leaves.values(), lr=1.2e-3)
        order, queue = rng.generator(config.seed, "ticket training", j), []
        for _ in range(options.ticket_iterations):
            if not queue:
                queue = torch.randperm(len(labels), generator=order).tolist()
            batch, queue = queue[:60], queue[60:]
            optimizer.zero_grad()
            F.cross_entropy(logits(leaves, images[batch]), labels[batch]).backward()
            optimizer.step()
        after = {n: w.detach() for n, w in leaves.items()}
        masks = {n: _prune(config, after[n], outcome.margins) for n in WEIGHTS}
        outcome.counts.append(correct({n: w * masks.get(n, 1) for n, w in after.items()}, images, labels))
        tickets.append((before, after, masks))
    outcome.chosen = _select(outcome.counts, len(labels), config.seed)
    before, after, masks = tickets[outcome.chosen]
    return {"rewind": before, "trained": after, "random": initial}[options.start], after, masks


def _prune(config, w, margins):
    flat = w.abs().flatten().tolist()
    if config.fedltp.rule == "relative-threshold":
        limit = (1 - config.density) * max(flat)
        margins.append(min(abs(x - limit) for x in flat))
        return torch.tensor([float(x > limit) for x in flat]).view(w.shape)
    ranked = sorted(range(len(flat)), key=lambda i: -flat[i])
    keep = math.floor(Fraction(str(config.density)) * len(flat))
    if keep < len(flat):
        margins.append(flat[ranked[keep - 1]] - flat[ranked[keep]])
    mask = torch.zeros(len(flat))
    mask[ranked[:keep]] = 1
    return mask.view(w.shape)


def _select(counts, total, seed):
    scale = Fraction(total) / 100
    powers = [math.exp(float(Fraction(count - max(counts)) / scale)) for count in counts]
    draw = rng.numpy_generator(seed, "ticket selection").random()
    total_power, so_far = sum(powers), 0.0
    for j, power in enumerate(powers):
        so_far += power / total_power
        if draw < so_far:
            return j
    return len(counts) - 1


def _initial(config):
    return initial_model("cnn-small", "digits", (1, 8, 8), 10, init="default", seed=config.seed)


# --- Algorithm 2 ------------------------------------------------------------------------------------------------------


def fedltp(config, num_clients):
    options = config.fedltp
    outcome = Outcome({}, {})
    start, trained, masks = ticket(config, outcome)
    per_round = max(math.floor(config.fraction_train * num_clients), 1)
    chain = [masks]
    if options.pruning == "iterative":
        chain = [_nested(masks, trained, options.further_pruned, i, outcome.margins) for i in range(1, per_round + 1)]
    model = {n: w * chain[0].get(n, 1) for n, w in start.items()}
    best = None
    for t in range(1, config.num_server_rounds + 1):
        chosen = sampled(config, num_clients, t)
        shuffle(config, outcome.models, chosen, len(chain), t)
        after = {}
        for k in chosen:
            own = chain[outcome.models[k]]
            begin = {n: w * own.get(n, 1) for n, w in model.items()}
            after[k] = local_training(config, begin, own, k, num_clients, t)
        outcome.trained |= after
        moved = {}
        for n, old in model.items():
            holders = sum(chain[outcome.models[k]].get(n, torch.ones_like(old)) for k in chosen)
            gone = sum(((after[k][n] - old) * chain[outcome.models[k]].get(n, 1)).double() for k in chosen)
            counted = holders.clamp(min=1) if options.average == "holders" else len(chosen)
            moved[n] = (old.double() + gone / counted).float()
        model = moved
        asked = {"all": range(num_clients), "selected": chosen, "none": []}[options.validators]
        total = [0, 0]
        for k in asked:
            data = client_data(data_config(config), k, num_clients)
            total[0] += correct(model, data.validation_images, data.validation_labels)
            if config.dp.enabled:
                total[0] += laplace(config, k)
            total[1] += len(data.validation_labels)
        outcome.scores.append(tuple(total))
        if not asked or best is None or Fraction(*total) > best:
            best, outcome.best, outcome.model = (Fraction(*total) if asked else None), t, model
    outcome.last = model
    return outcome


def _nested(masks, trained, share, i, margins):
    chain = {}
    for n, mask in masks.items():
        alive = mask.flatten().nonzero().squeeze(1).tolist()
        flat = trained[n].abs().flatten().tolist()
        ranked = sorted(alive, key=lambda x: -flat[x])
        keep = math.floor((1 - Fraction(str(share))) ** i * len(alive))
        margins.append(flat[ranked[keep - 1]] - flat[ranked[keep]])
        chain[n] = torch.zeros(mask.numel())
        chain[n][ranked[:keep]] = 1
        chain[n] = chain[n].view(mask.shape)
    return chain


def sampled(config, num_clients, t):
    order = rng.numpy_generator(config.seed, "sample", round=t).permutation(num_clients)
    return sorted(int(k) for k in order[: max(math.floor(config.fraction_train * num_clients), 1)])


def shuffle(config, models, chosen, count, t):
    """Whoever was never sampled draws among those that nobody else in the round holds."""
    free = [i for i in range(count) if i not in {models[k] for k in chosen if k in models}]
    order = rng.numpy_generator(config.seed, "model shuffle", round=t).permutation(len(free))
    free = [free[i] for i in order]
    for k in chosen:
        if k not in models:
            models[k] = free.pop(0) if count > 1 else 0


def laplace(config, k):
    """Rounded, and by the inverse of the distribution function. A count's noise does not depend on the round."""
    u = float(torch.rand(1, generator=noise_of(config, "count validation", k, 0), dtype=torch.float64)) - 0.5
    noise = -config.dp.count_scale * math.copysign(math.log(1 - 2 * abs(u)), u)
    return round(noise)


def local_training(config, begin, kept, k, num_clients, t):
    """DP-SGD, or SGD, on the coordinates where ``kept`` is 1; all others stay as they are."""
    data = client_data(data_config(config), k, num_clients)
    images, labels = data.train_images, data.train_labels
    n_examples = len(labels)
    w = {n: tensor.clone() for n, tensor in begin.items()}
    velocity = {n: torch.zeros_like(tensor) for n, tensor in w.items()}
    rate = config.learning_rate * config.lr_decay ** (t - 1)
    steps = config.steps_per_epoch or math.ceil(n_examples / config.batch_size)
    order, queue = rng.generator(config.seed, "train", k, t), []
    stream = noise_of(config, "train", k, t)
    for step in range(config.local_epochs * steps):
        if not config.dp.enabled:
            if not queue or step % steps == 0:
                queue = torch.randperm(n_examples, generator=order).tolist()
            batch, queue = queue[: config.batch_size], queue[config.batch_size :]
            gradients = _mean_gradient(w, images[batch], labels[batch])
        else:
            q = min(1.0, config.batch_size / n_examples)
            inside = torch.rand(n_examples, generator=stream, dtype=torch.float64) < q
            gradients = {n: torch.zeros_like(tensor) for n, tensor in w.items()}
            for i in inside.nonzero().squeeze(1).tolist():
                one = _mean_gradient(w, images[i : i + 1], labels[i : i + 1])
                one = {n: g * kept.get(n, 1) for n, g in one.items()}
                norm = math.sqrt(sum(float(g.double().square().sum()) for g in one.values()))
                for n, g in one.items():
                    gradients[n] += g * min(1.0, config.dp.clip_norm / norm)
            size = sum(tensor.numel() for tensor in w.values())
            noise = torch.randn(size, generator=stream, dtype=torch.float64).float()
            for n, g in gradients.items():
                part, noise = noise[: g.numel()].view(g.shape), noise[g.numel() :]
                gradients[n] = (g + config.dp.noise_multiplier * config.dp.clip_norm * part) / (q * n_examples)
        for n, g in gradients.items():
            velocity[n] = config.momentum * velocity[n] + g * kept.get(n, 1)
            w[n] = w[n] - rate * velocity[n]
    return w


def _mean_gradient(w, images, labels):
    leaves = {n: tensor.clone().requires_grad_() for n, tensor in w.items()}
    F.cross_entropy(logits(leaves, images), labels).backward()
    return {n: leaf.grad for n, leaf in leaves.items()}


# --- the baselines ----------------------------------------------------------------------------------------------------


def baseline(config, num_clients):
    """Fed-SPA, or DP-Fed, as ``config.system`` says."""
    model = {n: p.detach().clone() for n, p in _initial(config).named_parameters()}
    options = config.fedspa
    m = {n: torch.zeros_like(w) for n, w in model.items()}
    v = {n: torch.zeros_like(w) for n, w in model.items()}
    outcome = Outcome({}, {})
    for t in range(1, config.num_server_rounds + 1):
        chosen = sampled(config, num_clients, t)
        total = {n: torch.zeros_like(w, dtype=torch.float64) for n, w in model.items()}
        for k in chosen:
            kept = {}
            if config.system == "fedspa":
                seed = rng.derive_seed(config.seed, "coordinates", k, t)
                size = sum(w.numel() for w in model.values())
                order = torch.randperm(size, generator=torch.Generator().manual_seed(seed)).tolist()
                flat = torch.zeros(size)
                flat[order[: math.floor(Fraction(str(options.share)) * size)]] = 1
                for n, w in model.items():
                    kept[n], flat = flat[: w.numel()].view(w.shape), flat[w.numel() :]
            after = local_training(config, model, kept, k, num_clients, t)
            outcome.trained[k] = after
            for n in total:
                total[n] += (after[n] - model[n]).double()
        change = {n: (x / len(chosen)).float() for n, x in total.items()}
        if config.system == "fedspa" and options.acceleration == "momentum":
            m = {n: 0.5 * m[n] + 0.5 * g for n, g in change.items()}
            change = m
        elif config.system == "fedspa" and options.acceleration == "adam":
            m = {n: 0.5 * m[n] + 0.5 * g for n, g in change.items()}
            v = {n: 0.99 * v[n] + 0.01 * g.square() for n, g in change.items()}
            change = {n: m[n] / (v[n].sqrt() + 1e-3) for n in m}
        rate = options.server_learning_rate if config.system == "fedspa" else 1.0
        model = {n: w + rate * change[n] for n, w in model.items()}
    outcome.model = outcome.last = model
    return outcome
