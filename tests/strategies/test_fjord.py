"""FjORD: nested sub-networks travel as small tensors, and each coordinate is averaged over those that have it."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from fedprune_app.core import rng
from fedprune_app.data.splits import client_data, data_config
from fedprune_app.engine.exchange import TooFewReplies
from fedprune_app.models.initial import initial_model
from tests.strategies.reference import logits

SETTINGS = {
    "system": "fjord",
    "clients": 5,
    "fraction_train": 0.6,
    "num_server_rounds": 3,
    "momentum": 0.4,
    "weight_decay": 5e-3,
    "max_grad_norm": 2.0,
    "fjord_widths": "0.2 0.5 1.0",
}
WIDTHS = [0.2, 0.5, 1.0, 0.2, 0.5]


def block(name, p):
    """How far the sub-network of width p reaches: 16 and 32 channels, four pixels of each before the last layer."""
    a, b = math.ceil(p * 16), math.ceil(p * 32)
    return {
        "conv1.weight": (a, 1), "conv1.bias": (a,), "conv2.weight": (b, a), "conv2.bias": (b,),
        "fc1.weight": (10, 4 * b), "fc1.bias": (10,),
    }[name]  # fmt: skip


def cut(tensors, p):
    return {name: t[tuple(slice(n) for n in block(name, p))].clone() for name, t in tensors.items()}


def reference(config, num_clients):
    """Algorithm 1 on small tensors all through; nothing is masked here, and nothing shared with the product."""
    model = initial_model("cnn-small", "digits", (1, 8, 8), 10, init="default", seed=config.seed)
    server = {name: p.detach().clone() for name, p in model.named_parameters()}
    last = {}
    for t in range(1, config.num_server_rounds + 1):
        order = rng.numpy_generator(config.seed, "sample", round=t).permutation(num_clients)
        total = {n: torch.zeros(w.shape, dtype=torch.float64) for n, w in server.items()}
        count = {n: torch.zeros(w.shape, dtype=torch.float64) for n, w in server.items()}
        for k in sorted(order[: math.floor(config.fraction_train * num_clients)]):
            data = client_data(data_config(config), int(k), num_clients)
            w = cut(server, WIDTHS[k])
            train(config, w, data, int(k), t)
            last[int(k)] = w
            for name, tensor in w.items():
                place = tuple(slice(n) for n in tensor.shape)
                total[name][place] += len(data.train_labels) * tensor
                count[name][place] += len(data.train_labels)
        for name, w in server.items():
            server[name] = torch.where(count[name] > 0, total[name] / count[name].clamp(min=1), w.double()).float()
    return server, last


def train(config, w, data, k, t):
    p_max = WIDTHS[k]
    widths = [p for p in (0.2, 0.4, 0.6, 0.8, 1.0) if p < p_max] + [p_max]
    order, draw = rng.generator(config.seed, "train", k, t), rng.numpy_generator(config.seed, "ordered dropout", k, t)
    velocity = {n: torch.zeros_like(tensor) for n, tensor in w.items()}
    for _ in range(config.local_epochs):
        for batch in torch.randperm(len(data.train_labels), generator=order).split(config.batch_size):
            p = widths[draw.integers(len(widths))]
            images, labels = data.train_images[batch], data.train_labels[batch]
            leaves = {n: tensor.clone().requires_grad_() for n, tensor in cut(w, p).items()}
            loss = F.cross_entropy(logits(leaves, images), labels)
            loss.backward()
            norm = math.sqrt(sum(float(leaf.grad.double().square().sum()) for leaf in leaves.values()))
            for n, leaf in leaves.items():
                place = tuple(slice(size) for size in leaf.shape)
                gradient = leaf.grad * min(1, config.max_grad_norm / (norm + 1e-6))
                moved = config.momentum * velocity[n][place] + gradient + config.weight_decay * w[n][place]
                velocity[n][place] = moved
                w[n][place] -= config.learning_rate * moved


def test_it_is_the_slow_reference(federation):
    run = federation(**SETTINGS)
    server, last = reference(run.config, 5)
    torch.testing.assert_close(run.server, server, rtol=1e-4, atol=2e-6)
    for k, expected in last.items():
        state = run.client(k)[1]
        weights, masks = state.group("weights"), state.group("masks")
        torch.testing.assert_close(cut(weights, WIDTHS[k]), expected, rtol=1e-4, atol=2e-6)
        for name, mask in masks.items():
            assert not weights[name][~mask].any()
            assert int(mask.sum()) == expected[name].numel()


def test_clients_validate_the_network_at_full_width_by_which_the_system_is_judged(federation):
    run = federation(**SETTINGS | {"fraction_train": 1.0, "validation_fraction": 0.3})
    differ = []
    for k, row in run.rows(3).items():
        data = client_data(data_config(run.config), k, 5)
        whole, part = (logits(cut(run.server, p), data.validation_images).argmax(1) for p in (1.0, WIDTHS[k]))
        assert row["accuracy_validation"] == pytest.approx(float((whole == data.validation_labels).double().mean()))
        differ.append(int((whole == data.validation_labels).sum() - (part == data.validation_labels).sum()))
    assert any(differ)


def test_messages_hold_the_leading_block_of_each_tensor_alone(federation):
    run = federation(**SETTINGS)
    for round in (1, 2, 3):
        for k, message in run.wiretap.of("train", round).items():
            for payload in (message.down, message.up):
                assert not payload.masks
                for name, tensor in payload.tensors.items():
                    assert tensor.shape[: len(block(name, WIDTHS[k]))] == block(name, WIDTHS[k])
    sizes = {WIDTHS[k]: m.bytes_up for m in run.wiretap.messages if m.kind == "train" for k in [m.partition]}
    assert sizes[0.2] < sizes[0.5] < sizes[1.0]


def test_with_all_clients_at_one_full_width_it_is_fedavg(federation, own_form, monkeypatch):
    import clients.fjord

    monkeypatch.setattr(clients.fjord, "FJORD_SHARES", (1.0,))
    settings = {k: v for k, v in SETTINGS.items() if k not in ("system", "fjord_widths")}
    run = federation(system="fjord", fjord_widths="1", **settings, fresh=True)
    fedavg = federation(system="fedavg", **settings, fresh=True)
    assert all(torch.equal(run.server[name], tensor) for name, tensor in fedavg.server.items())


def test_units_beyond_every_participants_width_stay_as_they_were(federation):
    run = federation(**{**SETTINGS, "fjord_widths": "0.5"})
    initial = initial_model("cnn-small", "digits", (1, 8, 8), 10, init="default", seed=0)
    for name, start in initial.named_parameters():
        there = torch.zeros_like(start, dtype=torch.bool)
        there[tuple(slice(n) for n in block(name, 0.5))] = True
        assert torch.equal(run.server[name][~there], start.detach()[~there])
        assert (run.server[name][there] != start.detach()[there]).float().mean() > 0.5


def test_batch_norms_are_cut_too_and_a_run_says_how_dense_clients_are(federation):
    run = federation(**{**SETTINGS, "fjord_widths": "0.5", "fraction_train": 1.0}, model="cnn-small-bn")
    message = run.wiretap.of("train")[0]
    assert message.up.tensors["bn2.running_var"].shape == (16,)
    assert message.up.tensors["bn2.running_var"].ne(1).all()
    kept = 8 * 9 + 8 + 16 + 16 * 8 * 9 + 16 + 32 + 10 * 64 + 10
    assert run.rows(3)[0]["density"] == pytest.approx(kept / (6090 + 96))
    assert run.server["bn2.running_var"][16:].eq(1).all()


def test_local_norms_are_refused_because_nobody_trains_those_beyond_a_clients_width(federation):
    with pytest.raises(TooFewReplies, match="batch-norm is 'local'"):
        federation(**SETTINGS, model="cnn-small-bn", batch_norm="local", fresh=True)


def test_group_norm_is_refused_where_it_would_not_be_the_same_network(federation):
    with pytest.raises(TooFewReplies, match="model is 'cnn-gn'"):
        federation(**SETTINGS, model="cnn-gn", fresh=True)
