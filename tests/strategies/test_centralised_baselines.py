"""FedProx, LG-FedAvg and MTL: what must hold of them, and where they become another system."""

from __future__ import annotations

import pytest
import torch

from fedprune_app.core import rng
from fedprune_app.core.payload import Payload
from fedprune_app.data.splits import client_data, data_config
from fedprune_app.engine.exchange import TooFewReplies
from fedprune_app.exports.find import find_model
from fedprune_app.models.initial import initial_model
from tests.strategies.reference import logits

ALL = {"clients": 4, "fraction_train": 1.0}


def initial(seed=0):
    model = initial_model("cnn-small", "digits", (1, 8, 8), 10, init="default", seed=seed)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def distance(a, b):
    return float(sum((a[name] - b[name]).double().square().sum() for name in b)) ** 0.5


# --- FedProx ------------------------------------------------------------------------------------------------------


def test_without_a_proximal_term_fedprox_is_fedavg_to_the_bit(federation):
    assert federation(system="fedprox", fedprox_mu=0.0).sha256 == federation(system="fedavg").sha256


def test_a_stronger_proximal_term_keeps_clients_nearer_to_what_they_received(federation):
    moved = []
    for mu in (0.01, 1.0, 10.0):
        run = federation(system="fedprox", fedprox_mu=mu, num_server_rounds=1, **ALL)
        sent = run.wiretap.of("train", 1)
        moved.append(sum(distance(m.up.tensors, m.down.tensors) for m in sent.values()))
    assert moved[0] > 1.2 * moved[1] > 1.5 * moved[2]


def test_a_fedprox_step_is_sgd_on_the_loss_with_the_proximal_term(federation):
    """One client's local training again, with the term in the loss and autograd's gradient of it."""
    run = federation(system="fedprox", fedprox_mu=0.7, num_server_rounds=1, momentum=0.0, **ALL)
    config = run.config
    data = client_data(data_config(config), 2, 4)
    start = run.wiretap.of("train", 1)[2].down.tensors
    w = {name: tensor.clone().requires_grad_() for name, tensor in start.items()}
    optimizer = torch.optim.SGD(w.values(), lr=config.learning_rate)
    order = rng.generator(config.seed, "train", 2, 1)
    for _ in range(config.local_epochs):
        for batch in torch.randperm(len(data.train_labels), generator=order).split(config.batch_size):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(logits(w, data.train_images[batch]), data.train_labels[batch])
            loss = loss + 0.35 * sum((w[name] - start[name]).square().sum() for name in w)
            loss.backward()
            optimizer.step()
    sent = run.wiretap.of("train", 1)[2].up.tensors
    torch.testing.assert_close(dict(sent), {n: t.detach() for n, t in w.items()}, rtol=1e-4, atol=1e-5)


# --- LG-FedAvg ----------------------------------------------------------------------------------------------------


def test_only_the_upper_layers_travel_and_the_lower_ones_stay_different(federation):
    run = federation(system="lg-fedavg", lgfedavg_global_layers=1, **ALL)
    for message in run.wiretap.messages:
        if message.kind == "train":
            assert message.up.tensors.keys() == message.down.tensors.keys() == {"fc1.weight", "fc1.bias"}
    assert run.server.keys() == {"fc1.weight", "fc1.bias"}
    states = [run.client(k)[1].group("weights") for k in range(4)]
    assert all(state.keys() == initial().keys() for state in states)
    assert distance({"w": states[0]["conv1.weight"]}, {"w": states[1]["conv1.weight"]}) > 0.01


def test_a_client_goes_on_from_its_own_lower_layers_under_the_servers_upper_ones(federation):
    """With a learning rate of almost nothing, what was trained is what was started from."""
    run = federation(system="lg-fedavg", lgfedavg_global_layers=1, **ALL)
    still = federation(system="lg-fedavg", lgfedavg_global_layers=1, learning_rate=1e-30, **ALL)
    assert still.sha256 != run.sha256
    for k in range(4):
        torch.testing.assert_close(dict(still.client(k)[1].group("weights")), initial(), rtol=0, atol=1e-12)
    rows = run.rows(3)
    assert all(row["accuracy_received"] is not None for row in rows.values())
    assert run.rounds[-1]["accuracy_global"] is None


def test_a_client_answers_for_its_own_lower_layers_under_the_averaged_upper_ones(federation):
    run = federation(system="lg-fedavg", lgfedavg_global_layers=1, **ALL)
    for partition, row in run.rows(3).items():
        own = run.client(partition)[1].group("weights")
        model = {**own, **run.server}
        assert distance({"w": own["fc1.weight"]}, {"w": model["fc1.weight"]}) > 0.01
        assert run.wiretap.of("evaluate", 3)[partition].told["digest"] == Payload(model).digest()
        data = client_data(data_config(run.config), partition, 4)
        correct = (logits(model, data.test_images).argmax(1) == data.test_labels).float().mean().item()
        assert row["accuracy_personal"] == pytest.approx(correct, abs=1.01 / len(data.test_labels))
        exported = find_model(run.folder, partition).payload.tensors
        assert all(torch.equal(exported[name], tensor) for name, tensor in model.items())


@pytest.mark.full
def test_lg_fedavg_after_rounds_of_fedavg_begins_from_fedavgs_model(federation):
    """Two rounds of FedAvg, then two in which the lower layers stay at home."""
    fedavg = federation(system="fedavg", num_server_rounds=2, **ALL)
    settings = {"lgfedavg_global_layers": 1, "lgfedavg_pretrain_rounds": 2, "clients": 4, "fraction_train": 0.5}
    run = federation(system="lg-fedavg", num_server_rounds=4, **settings | ALL)
    for partition, message in run.wiretap.of("train", 3).items():
        assert {n: t.tolist() for n, t in message.down.tensors.items()} == {
            n: t.tolist() for n, t in fedavg.server.items()
        }, partition
    for message in run.wiretap.of("train", 4).values():
        assert message.up.tensors.keys() == message.down.tensors.keys() == {"fc1.weight", "fc1.bias"}
    lower = {name: tensor for name, tensor in fedavg.server.items() if not name.startswith("fc1")}
    assert all(torch.equal(run.server[name], tensor) for name, tensor in lower.items())  # as FedAvg left them


def test_a_client_that_slept_since_fedavg_gets_its_lower_layers_too(federation):
    settings = {"lgfedavg_global_layers": 1, "lgfedavg_pretrain_rounds": 1, "clients": 5, "fraction_train": 0.2}
    run = federation(system="lg-fedavg", num_server_rounds=3, **settings)
    awake = {partition for round in (2, 3) for partition in run.wiretap.of("train", round)}
    for partition, message in run.wiretap.of("evaluate", 3).items():
        assert (set(message.down.tensors) == {"fc1.weight", "fc1.bias"}) == (partition in awake)
    assert 0 < len(awake) < 5


def test_with_all_layers_global_lg_fedavg_ends_with_fedavgs_model(federation):
    lg = federation(system="lg-fedavg", lgfedavg_global_layers=3, **ALL)
    assert {n: t.tolist() for n, t in lg.server.items()} == {
        n: t.tolist() for n, t in federation(system="fedavg", **ALL).server.items()
    }


def test_more_global_layers_than_the_model_has_fail_the_run_on_one_line(federation):
    with pytest.raises(TooFewReplies, match="the last 4 layers of a model with 3, allowed: 1 to 3"):
        federation(system="lg-fedavg", lgfedavg_global_layers=4)


# --- MTL ----------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_without_a_regulariser_mtl_is_standalone(federation):
    mtl = federation(system="mtl", mtl_strength=0.0, **ALL)
    alone = federation(system="standalone", **ALL)
    for k in range(4):
        torch.testing.assert_close(
            dict(mtl.client(k)[1].group("weights")), dict(alone.client(k)[1].group("weights")), rtol=0, atol=0
        )


@pytest.mark.full
def test_what_a_client_is_sent_gives_the_gradient_of_the_regulariser(federation):
    """Against autograd of 1/2 tr(W P Wᵀ), with P from the models that were published the round before."""
    run = federation(system="mtl", num_server_rounds=2, **ALL)
    published = {k: m.up.tensors for k, m in run.wiretap.of("train", 1).items()}
    columns = torch.stack([torch.cat([t.double().reshape(-1) for t in published[k].values()]) for k in range(4)], 1)
    values, vectors = torch.linalg.eigh(columns.T @ columns)
    root = vectors @ torch.diag(values.clamp(min=0).sqrt()) @ vectors.T
    precision = torch.linalg.inv(root / root.trace() + 0.1 * torch.eye(4, dtype=torch.float64))
    columns.requires_grad_()
    (0.5 * torch.trace(columns @ precision @ columns.T)).backward()
    for k, message in run.wiretap.of("train", 2).items():
        anchor = torch.cat([t.double().reshape(-1) for t in message.down.tensors.values()])
        mine = columns[:, k].detach()
        gradient = float(precision[k, k]) * (mine - anchor)
        torch.testing.assert_close(gradient, columns.grad[:, k], rtol=1e-4, atol=1e-5)


@pytest.mark.full
def test_a_stronger_regulariser_brings_the_models_together(federation):
    spread = []
    for strength in (0.0, 0.01, 0.1):
        run = federation(system="mtl", mtl_strength=strength, **ALL)
        models = [run.client(k)[1].group("weights") for k in range(4)]
        spread.append(sum(distance(models[0], other) for other in models[1:]))
    assert spread[0] > 1.05 * spread[1] > 1.3 * spread[2]
