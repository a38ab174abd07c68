"""Dis-PFL and the systems it is compared with, again and slowly: written from the papers' text, as in ``reference.py``.

Shared with the product are a client's data, the initial model and what is drawn at random: who takes part and from
whom it receives, first masks, the order of examples, the batch and the scores of a mask search, FedFomo's candidates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction

import torch
from torch.nn import functional as F

from fedprune_app.core import rng
from fedprune_app.core.topology import neighbours
from fedprune_app.data.splits import client_data, data_config
from fedprune_app.models.initial import initial_model
from tests.strategies.reference import WEIGHTS, logits, share_correct


@dataclass
class Client:
    """A client's model, the masks it was trained under and those of the next round; accuracies of the last round."""

    tensors: dict
    masks: dict = field(default_factory=dict)
    next_masks: dict = field(default_factory=dict)
    personal: dict = field(default_factory=dict)  # Ditto's
    round: int = 0
    received_accuracy: Fraction | None = None  # before its last local training
    kept: dict = field(default_factory=dict)  # FedFomo: partition -> weight, in the last round


@dataclass
class Outcome:
    clients: dict
    server: dict  # the global or consensus model, where there is one
    personal_accuracies: list = field(default_factory=list)
    global_accuracies: list = field(default_factory=list)
    participants: list = field(default_factory=list)
    links: list = field(default_factory=list)
    margins: list = field(default_factory=list)  # relative gap at each decision of a mask search


class Federation:
    """One run; ``run()`` gives its outcome."""

    def __init__(self, config, num_clients):
        self.config, self.num_clients = config, num_clients
        model = initial_model("cnn-small", "digits", (1, 8, 8), 10, init=config.init, seed=config.seed)
        self.initial = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
        self.data = [client_data(data_config(config), k, num_clients) for k in range(num_clients)]
        self.clients = {k: Client(self.initial) for k in range(num_clients)}
        self.outcome = Outcome(self.clients, self.initial)
        self.affinity = [[0.0] * num_clients for _ in range(num_clients)]
        self.published = {}  # partition -> (tensors, masks)
        if config.system == "dispfl" or (config.system.startswith("dpsgd") and config.dpsgd.density < 1):
            for k, client in self.clients.items():
                client.masks = client.next_masks = self.first_masks(k)
                client.tensors = masked(self.initial, client.masks)
        if config.system == "dispfl" and not config.drop_probability:
            # As in the text everybody receives its neighbours' initial models in round 1. The product sends none:
            # they are parts of one model, so the average under a client's mask is what it had.
            self.published = {k: (client.tensors, client.masks) for k, client in self.clients.items()}

    def run(self):
        config, system = self.config, self.config.system
        for t in range(1, config.num_server_rounds + 1):
            active = self.participants(t)
            self.outcome.participants.append(active)
            if system in ("dispfl", "dpsgd", "dpsgd-ft"):
                self.gossip_round(t, active)
            elif system == "fedfomo":
                self.fomo_round(t, active)
            else:
                self.star_round(t, active)
        self.evaluate(config.num_server_rounds)
        return self.outcome

    def participants(self, t):
        size, config = self.num_clients, self.config
        drawn = rng.numpy_generator(config.seed, "sample", round=t).permutation(size)
        chosen = sorted(int(k) for k in drawn[: max(math.floor(config.fraction_train * size), 1)])
        luck = rng.numpy_generator(config.seed, "drop", round=t).random(size)
        luckiest = max(chosen, key=lambda k: luck[k])
        return [k for k in chosen if k == luckiest or luck[k] >= config.drop_probability]

    # --- local work -----------------------------------------------------------------------------------------------

    def train(self, start, k, t, masks=None, role="train", epochs=None, pull_to=None, pull=0.0):
        """SGD as in the released code: clip, step, mask; then, for Ditto, a step towards another model."""
        config, data = self.config, self.data[k]
        masks = masks or {}
        rate = config.learning_rate * config.lr_decay ** (t - 1)
        tensors = {name: tensor.clone().requires_grad_() for name, tensor in start.items()}
        optimizer = torch.optim.SGD(
            tensors.values(), lr=rate, momentum=config.momentum, weight_decay=config.weight_decay
        )
        order = rng.generator(config.seed, role, k, t)
        for _ in range(config.local_epochs if epochs is None else epochs):
            shuffled = torch.randperm(len(data.train_labels), generator=order).tolist()
            while shuffled:
                batch, shuffled = shuffled[: config.batch_size], shuffled[config.batch_size :]
                optimizer.zero_grad()
                F.cross_entropy(logits(tensors, data.train_images[batch]), data.train_labels[batch]).backward()
                if config.max_grad_norm:
                    torch.nn.utils.clip_grad_norm_(tensors.values(), config.max_grad_norm)
                optimizer.step()
                with torch.no_grad():
                    for name, mask in masks.items():
                        tensors[name] *= mask
                    for name, tensor in tensors.items():
                        if pull:
                            tensor -= rate * pull * (tensor - pull_to[name])
        return {name: tensor.detach().clone() for name, tensor in tensors.items()}

    def accuracy(self, tensors, k):
        return share_correct(tensors, self.data[k].test_images, self.data[k].test_labels)

    # --- Dis-PFL and D-PSGD ---------------------------------------------------------------------------------------

    @property
    def gossip(self):
        return self.config.dispfl if self.config.system == "dispfl" else self.config.dpsgd

    def first_masks(self, k):
        config = self.config
        sizes = {name: tensor.shape for name, tensor in self.initial.items()}
        if config.system == "dispfl":
            texts = config.dispfl.densities.split()
            density = Fraction(texts[k % len(texts)] if texts else str(config.density))
            densities = erk_by_hand(sizes, density)
        else:
            densities = dict.fromkeys(sizes, Fraction(str(config.dpsgd.density)))
        draw = rng.generator(config.seed, "initial masks", k if config.system == "dispfl" else 0)
        masks = {}
        for name in WEIGHTS:
            size = sizes[name].numel()
            positions = torch.randperm(size, generator=draw).tolist()[: math.floor(densities[name] * size)]
            masks[name] = as_mask(positions, sizes[name])
        return masks

    def gossip_round(self, t, active):
        options, everyone = self.gossip, list(range(self.num_clients))
        draw = rng.numpy_generator(self.config.seed, "topology", round=t)
        senders = neighbours(options.topology, everyone, active, options.neighbours, draw)
        self.outcome.links.append(senders)
        before = dict(self.published)
        for k in active:
            client = self.clients[k]
            heard = [before[j] for j in {*senders[k], k} if j in before]
            client.masks = client.next_masks
            start = consensus(heard) if any(j in before for j in senders[k]) else client.tensors
            if k not in before:  # has no model to average: its initial weights stay where nobody has one
                for name in client.masks:
                    held = torch.stack([masks[name] for _, masks in heard]).any(0) if heard else torch.tensor(False)
                    start = {**start, name: torch.where(held, start[name], self.initial[name])}
            start = masked(start, client.masks)
            client.received_accuracy = self.accuracy(start, k)
            client.tensors = self.train(start, k, t, client.masks)
            client.round = t
            if self.config.system == "dispfl":
                client.next_masks = self.search(client, k, t)
            self.published[k] = (client.tensors, client.masks)

    def search(self, client, k, t):
        """Algorithm 2, as the released code orders it: fire the smallest, then regrow among all that are off."""
        config, data = self.config, self.data[k]
        angle = math.pi * (t - 1) / config.num_server_rounds
        share = config.dispfl.prune_rate / 2 * (1 + math.cos(angle))
        draw = rng.generator(config.seed, "mask search", k, t)
        if config.dispfl.growth == "random":
            scores = {name: torch.rand(client.masks[name].shape, generator=draw) for name in WEIGHTS}
        else:
            batch = torch.randperm(len(data.train_labels), generator=draw)[: config.batch_size]
            leaves = {name: tensor.clone().requires_grad_() for name, tensor in client.tensors.items()}
            F.cross_entropy(logits(leaves, data.train_images[batch]), data.train_labels[batch]).backward()
            scores = {name: leaves[name].grad for name in WEIGHTS}
        result = {}
        for name in WEIGHTS:
            size = client.tensors[name].abs().flatten().tolist()
            score = scores[name].abs().flatten().tolist()
            live = {i for i, kept in enumerate(client.masks[name].flatten().tolist()) if kept}
            count = math.ceil(round(share * len(live), 6))  # cos(π / 3) is a little above a half in floats
            smallest_first = sorted(live, key=lambda i: (size[i], i))
            off = set(range(len(size))) - set(smallest_first[count:])
            best_first = sorted(off, key=lambda i: (-score[i], i))
            result[name] = as_mask([*smallest_first[count:], *best_first[:count]], client.masks[name].shape)
            if len(live) < len(size):  # in a dense tensor what is fired comes back, whatever it is
                self.note_margin(size, smallest_first, count)
                self.note_margin(score, best_first, count)
        return result

    def note_margin(self, value, ordered, count):
        """How far apart the last that was chosen and the first that was not are; equal zeros are told by place."""
        inside, outside = (value[ordered[i]] for i in (count - 1, count))
        if inside or outside:
            self.outcome.margins.append(abs(inside - outside))

    # --- with a server ----------------------------------------------------------------------------------------------

    def star_round(self, t, active):
        """FedAvg, FedAvg-FT and Ditto."""
        config, received = self.config, self.outcome.server
        sent = []
        for k in active:
            client = self.clients[k]
            if config.system == "ditto":
                sent.append(self.train(received, k, t, epochs=config.ditto.global_epochs))
                client.tensors = self.train(
                    client.tensors,
                    k,
                    t,
                    role="train personal",
                    epochs=config.ditto.personal_epochs,
                    pull_to=received,
                    pull=config.ditto.pull,
                )
            else:
                client.tensors = self.train(received, k, t)
                sent.append(client.tensors)
            client.round = t
        sizes = [len(self.data[k].train_labels) for k in active]
        self.outcome.server = {
            name: (sum(n * model[name].double() for n, model in zip(sizes, sent, strict=True)) / sum(sizes)).float()
            for name in received
        }

    # --- FedFomo ----------------------------------------------------------------------------------------------------

    def fomo_round(self, t, active):
        options, before_round = self.config.fedfomo, dict(self.published)
        for k in active:
            client = self.clients[k]
            draw = rng.numpy_generator(self.config.seed, "candidates", k, t)
            others = [int(j) for j in draw.permutation(sorted(before_round)) if j != k]
            if draw.random() >= options.exploration:  # by what their models were worth so far
                others = sorted(others, key=lambda j: self.affinity[k][j], reverse=True)
            candidates = {j: before_round[j][0] for j in others[: options.candidates]}
            old, new = client.tensors, self.train(client.tensors, k, t)
            worth = {j: self.worth(model, old, k) for j, model in {**candidates, k: new}.items()}
            total = sum(value for value in worth.values() if value > 0)
            client.kept = {j: value / total if value > 0 else 0.0 for j, value in worth.items()}
            models = {**candidates, k: new}
            client.tensors = {
                name: (
                    tensor.double()
                    + sum(w * (models[j][name].double() - tensor.double()) for j, w in client.kept.items())
                ).float()
                for name, tensor in old.items()
            }
            client.round = t
            for j in candidates:
                self.affinity[k][j] += worth[j]
            self.published[k] = (client.tensors, {})

    def worth(self, model, old, k):
        distance = math.sqrt(sum(float((model[n].double() - old[n].double()).pow(2).sum()) for n in old))
        gain = self.validation_loss(old, k) - self.validation_loss(model, k)
        return gain / distance if distance else 0.0

    def validation_loss(self, tensors, k):
        data = self.data[k]
        with torch.no_grad():
            chosen = logits(tensors, data.validation_images).double().log_softmax(1)
        return -float(sum(chosen[i, label] for i, label in enumerate(data.validation_labels.tolist())))

    # --- evaluation -------------------------------------------------------------------------------------------------

    def evaluate(self, t):
        system, outcome = self.config.system, self.outcome
        if system.startswith("dpsgd"):
            outcome.server = consensus([self.published[k] for k in sorted(self.published)])
        for k, client in self.clients.items():
            personal = client.tensors
            if system.endswith("-ft"):
                start = masked(outcome.server, client.masks)
                personal = self.finetuned(start, k, t, client.masks)
            outcome.personal_accuracies.append(self.accuracy(personal, k))
            outcome.global_accuracies.append(self.accuracy(outcome.server, k))

    def finetuned(self, start, k, t, masks):
        order = rng.generator(self.config.seed, "fine-tune", k, t)
        data, config = self.data[k], self.config
        tensors = {name: tensor.clone().requires_grad_() for name, tensor in start.items()}
        rate = config.learning_rate * config.lr_decay ** (t - 1)
        optimizer = torch.optim.SGD(
            tensors.values(), lr=rate, momentum=config.momentum, weight_decay=config.weight_decay
        )
        for _ in range(config.local_epochs):
            for batch in torch.randperm(len(data.train_labels), generator=order).split(config.batch_size):
                optimizer.zero_grad()
                F.cross_entropy(logits(tensors, data.train_images[batch]), data.train_labels[batch]).backward()
                if config.max_grad_norm:
                    torch.nn.utils.clip_grad_norm_(tensors.values(), config.max_grad_norm)
                optimizer.step()
                with torch.no_grad():
                    for name, mask in masks.items():
                        tensors[name] *= mask
        return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def erk_by_hand(shapes, density):
    """Densities by exact fractions over all tensors, biases too: those that would pass 1 become dense, and again."""
    size = {name: shape.numel() for name, shape in shapes.items()}
    raw = {name: Fraction(sum(shape), shape.numel()) for name, shape in shapes.items()}
    dense = set()
    while True:
        sparse = [name for name in shapes if name not in dense]
        budget = sum(density * size[n] for n in sparse) - sum((1 - density) * size[n] for n in dense)
        epsilon = budget / sum(raw[n] * size[n] for n in sparse) if sparse else 0
        largest = max((raw[n] for n in sparse), default=0)
        if epsilon * largest <= 1:
            return {name: Fraction(1) if name in dense else epsilon * raw[name] for name in shapes}
        dense |= {n for n in sparse if raw[n] == largest}


def as_mask(positions, shape):
    mask = torch.zeros(shape.numel(), dtype=torch.bool)
    mask[positions] = True
    return mask.reshape(shape)


def masked(tensors, masks):
    return {name: torch.where(masks[name], t, 0) if name in masks else t.clone() for name, t in tensors.items()}


def consensus(published):
    """Per coordinate the sum of the weights over the number of those who keep it; 0 where nobody does."""
    result = {}
    for name in published[0][0]:
        total = sum(tensors[name].double() for tensors, _ in published)
        keepers = sum(masks.get(name, torch.ones_like(tensors[name])).double() for tensors, masks in published)
        result[name] = torch.where(keepers > 0, total / keepers.clamp(min=1), 0).float()
    return result


def federation(config, num_clients):
    return Federation(config, num_clients).run()
