"""FedRTS against its algorithm, written again with single weights, their votes and their distributions."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from fedprune_app.core import rng
from fedprune_app.core.payload import Payload
from fedprune_app.testing import check_system
from tests.gallery import federations as small
from tests.gallery.test_feddst import erk_counts, masked, positions

pytestmark = pytest.mark.usefixtures("no_plugins")
SETTINGS = {"density": 0.2, "fedrts__rounds_between": 1, "num_server_rounds": 5, "local_epochs": 2}


def flat(tensor):
    return tensor.abs().view(-1).tolist()


@pytest.mark.full
def test_it_is_the_papers_algorithm(tmp_path):
    config = small.config_of("fedrts", **SETTINGS)
    finished = small.run(tmp_path, "fedrts", **SETTINGS)
    model, examples = small.network(config), small.examples(config)
    server = small.parameters(model)
    shapes = {name: tensor.shape for name, tensor in server.items() if name.endswith("weight")}
    keep = erk_counts(shapes, config.density)
    kept = {name: positions(flat(server[name]), keep[name], range(shapes[name].numel())) for name in shapes}
    server = masked(server, kept)
    alpha = {name: [1.0] * shapes[name].numel() for name in shapes}
    beta = {name: [1.0] * shapes[name].numel() for name in shapes}
    total, last, moved = sum(len(labels) for _, labels in examples), 3, 0  # 0.6 of five rounds
    for number in range(1, config.num_server_rounds + 1):
        moving = 2 <= number <= last + 1
        share = 0.2 * (1 + math.cos(math.pi * (number - 1) / last)) if number <= last else 0.0
        off = {name: set(range(shapes[name].numel())) - kept[name] for name in shapes}
        extra = {name: min(int(share * keep[name]), len(off[name])) for name in shapes}
        core = {name: keep[name] - extra[name] for name in shapes}
        sent, said = [], {name: [0.0] * shapes[name].numel() for name in shapes}
        for images, labels in examples:
            tensors = server
            for _ in range(config.local_epochs):
                slope = small.gradients(model, tensors, images, labels)
                tensors = masked({n: t - config.learning_rate * slope[n] for n, t in tensors.items()}, kept)
            slope = small.gradients(model, tensors, images, labels)
            for name in shapes:
                named = positions(flat(tensors[name]), core[name], kept[name])
                if moving:
                    named |= positions(flat(slope[name]), extra[name], off[name])
                for i in named:
                    said[name][i] += len(labels) / total
            sent.append(tensors)
        server = small.mean(sent, [len(labels) for _, labels in examples])
        if number > last + 1:
            continue
        for name in shapes:
            of_mean = positions(flat(server[name]), core[name], kept[name])
            for i in range(shapes[name].numel()):
                if i in kept[name] or moving:
                    outcome = 0.5 * (float(i in of_mean) if i in kept[name] else 0.5) + 0.5 * said[name][i]
                    alpha[name][i] += 10 * outcome
                    beta[name][i] += 10 * (1 - outcome)
        if moving:
            draw, before = rng.numpy_generator(config.seed, "thompson", round=number), kept
            drawn = {name: [draw.beta(*pair) for pair in zip(alpha[name], beta[name], strict=True)] for name in shapes}
            kept = {name: positions(drawn[name], keep[name], range(len(drawn[name]))) for name in shapes}
            moved += sum(len(before[name] - kept[name]) for name in shapes)
            server = masked(server, kept)
    found = small.global_model(finished)
    assert moved > 50
    assert small.close(found, server, 1e-5)
    assert all(set(found[name].view(-1).nonzero().view(-1).tolist()) <= kept[name] for name in kept)


def test_the_mask_moves_after_the_rounds_of_the_released_code_which_counts_them_from_0():
    config, method = small.config_of("fedrts", num_server_rounds=100), small.loaded("fedrts")
    assert [n for n in range(1, 101) if method.moves(config, n)] == [11, 21, 31, 41, 51, 61]


def test_votes_cost_where_they_are_and_their_gradient_and_no_values(tmp_path):
    settings = {**SETTINGS, "fedrts__rounds_between": 2, "num_server_rounds": 4}
    rounds = small.run(tmp_path, "fedrts", **settings).rounds
    examples = small.examples(small.config_of("fedrts", **settings))
    one_example = 3 * 2 * (64 * 9 * 16 + 16 * 9 * 16 * 32 + 1280)  # forward and backward, of cnn-small's three layers
    dense = one_example * sum(len(labels) for _, labels in examples)
    assert rounds[2]["flops"] - rounds[1]["flops"] == pytest.approx(dense, rel=1e-6)
    bits = 8 * (rounds[2]["bytes_up"] - rounds[1]["bytes_up"]) / small.CLIENTS
    assert 0 < bits < 2 * 6048  # less than two bits for each weight


def test_votes_for_kept_weights_or_too_many_are_refused(tmp_path, monkeypatch):
    client = small.loaded("fedrts").FedRTSClient
    honest = client.local_update

    def votes_for_all(self, task, state):
        update = honest(self, task, state)
        votes = {name: torch.ones_like(mask) for name, mask in update.payload.masks.items()}
        payload = Payload({**update.payload.tensors, **votes}, votes)
        return replace(update, payload=payload) if self.client_id == 0 else update

    monkeypatch.setattr(client, "local_update", votes_for_all)
    rounds = small.run(tmp_path, "fedrts", **SETTINGS).rounds
    assert [row["failures"] for row in rounds] == [0, 1, 1, 1, 0]
    assert "votes for 'conv1.weight'" in rounds[1]["failure_reasons"][0]


@pytest.mark.full
def test_it_keeps_the_laws():
    settings = {"density": 0.2, "fedrts.rounds-between": 1}
    check_system("fedrts", plugins=str(small.GALLERY / "fedrts.py"), settings=settings)
