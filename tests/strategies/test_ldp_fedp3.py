"""LDP-FedP3: Algorithm 5 as it is written, what its replies hold, what its noise is, and what it is charged."""

from __future__ import annotations

import math

import pytest
import torch
from flwr.common.serde import recorddict_to_proto

from fedprune_app.core.flops import forward_flops, training_flops
from fedprune_app.core.payload import Payload
from fedprune_app.engine import wire
from fedprune_app.engine.exchange import TooFewReplies
from fedprune_app.engine.store import read_tensors
from fedprune_app.models.vision import architecture
from fedprune_app.preflight.inputs import RunInputs
from fedprune_app.preflight.prepare import prepare
from fedprune_app.privacy import noise
from fedprune_app.privacy.ledger import Ledger
from strategies.ldp_fedp3 import LDPFedP3
from tests.conftest import tampered_app
from tests.examples import full
from tests.known_noise import KnownNoise
from tests.refusing import refuses
from tests.strategies import reference_ldp_fedp3 as reference
from tests.strategies.conftest import config_key
from tests.strategies.reference_ldp_fedp3 import NAMES

SIGMA, CLIP, DELTA, EXAMPLES, BATCH = 0.8, 0.7, 1e-3, 80, 24
SETTINGS = {
    "system": "ldp-fedp3",
    "batch_size": BATCH,
    "num_server_rounds": 2,
    "local_epochs": 1,
    "dp_enabled": True,
    "dp_noise_multiplier": SIGMA,
    "dp_clip_norm": CLIP,
    "dp_delta": DELTA,
    "validation_fraction": 0.0,  # all that a client is dealt is to train on
    "test_split": "labels",
    "dp_accuracies": "none",
}

KEYS = {config_key(name): value for name, value in SETTINGS.items()}


def flat(tensors):
    return torch.cat([tensors[name].flatten() for name in NAMES])


def ledger(run, partition):
    return Ledger(run.folder / "clients" / f"{partition:05d}" / "ledger.jsonl")


def server_after(run, round):
    return flat(read_tensors(run.folder / "checkpoints" / f"round-{round:05d}.safetensors").tensors)


# --- Algorithm 5 --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"clients": 4, "fraction_train": 0.75, "lr_decay": 0.5},
        full({"clients": 3, "fraction_train": 1.0, "momentum": 0.0}),
        full({"clients": 4, "momentum": 0.3, "weight_decay": 0.01, "batch_size": 100, "local_epochs": 3}),
    ],
    ids=["three of four clients", "all clients, no momentum", "full batches, several steps"],
)
def test_it_is_the_slow_reference(federation, monkeypatch, settings):
    def known(secure, seed, role, partition, round, inputs, what):
        return KnownNoise(reference.stream(seed, role, partition, round))

    monkeypatch.setattr(noise, "noise_source", known)
    run = federation(**{**SETTINGS, **settings}, fresh=True)
    expected = reference.federation(run.config, run.num_clients)
    torch.testing.assert_close(run.server, expected.server, rtol=1e-4, atol=3e-6)
    for partition, tensors in expected.clients.items():
        torch.testing.assert_close(run.client(partition)[1].group("weights"), tensors, rtol=1e-4, atol=3e-6)
    assert len(set(expected.batches)) > 2 or run.config.batch_size == 100  # samples differ in size


def test_every_coordinate_of_the_next_model_is_exactly_one_clients_own(federation):
    run = federation(**SETTINGS, fraction_train=0.5)  # two of four: halves and doubles are exact
    replies = run.wiretap.of("train", 2)
    own = torch.stack([flat(run.client(k)[1].group("weights")) for k in replies])  # (2, d)
    says = own == flat(run.server)
    assert (says.sum(0) == 1).all()
    for mine, tensors, message in zip(says, own, replies.values(), strict=True):
        assert torch.equal(message.up.tensors["part"], 2 * tensors[mine])
    tensors = says[0].split([144, 16, 4608, 32, 1280, 10])
    assert int(says[0].sum()) == 6090 // 2
    assert 0.45 < float(tensors[2].float().mean()) < 0.55  # of every tensor a part, whatever the layer


def test_parts_are_dealt_out_anew_in_every_round(federation):
    run = federation(**SETTINGS, fraction_train=1.0)
    sent = {t: run.wiretap.of("train", t)[0].up.tensors["part"] / 4 for t in (1, 2)}
    where = {t: torch.isin(server_after(run, t), sent[t]) for t in (1, 2)}
    assert not torch.equal(where[1], where[2])
    assert 0.04 < float((where[1] & where[2]).float().mean()) < 0.085  # a sixteenth


def test_the_noise_is_the_step_size_times_that_of_the_mean_gradient(federation):
    """One step over everything, with noise beside which the gradients are small."""
    sigma, rate = 200.0, 0.05
    one_step = {"batch_size": EXAMPLES, "num_server_rounds": 1, "fraction_train": 1.0, "learning_rate": rate}
    run = federation(**{**SETTINGS, **one_step, "dp_noise_multiplier": sigma, "momentum": 0.0})
    before = flat(run.wiretap.of("train", 1)[0].down.tensors)
    zeta = (server_after(run, 1) - before) / (rate * sigma * CLIP / EXAMPLES)
    count = len(zeta)
    assert abs(float(zeta.std()) - 1) < 4 / math.sqrt(2 * count)
    assert abs(float(zeta.mean())) < 4 / math.sqrt(count)
    assert abs(float((zeta[1:] * zeta[:-1]).mean())) < 4 / math.sqrt(count)
    assert abs(float(zeta.pow(4).mean()) - 3) < 4 * math.sqrt(96 / count)


# --- what it costs ------------------------------------------------------------------------------------------------


def test_each_upload_is_one_entry_and_epsilon_is_that_of_the_sampled_gaussian(federation):
    sigma = 2.5
    run = federation(**{**SETTINGS, "num_server_rounds": 3, "dp_noise_multiplier": sigma}, fraction_train=0.5)
    steps = math.ceil(EXAMPLES / BATCH)
    for partition in range(4):
        joined = [t for t in (1, 2, 3) if partition in run.wiretap.of("train", t)]
        assert len(ledger(run, partition)) == len(joined)
        row = run.rows(3)[partition]
        expected = renyi_epsilon(len(joined) * steps, sigma, BATCH / EXAMPLES, DELTA)
        # of whole orders alone, so at most a little above the product's
        assert expected / 1.01 < row["epsilon_rdp"] <= expected * (1 + 1e-6) or not joined


def renyi_epsilon(steps, sigma, q, delta):
    """Mironov, Talwar, Zhang 2019, equation for whole orders; converted as in Balle et al. 2020, Theorem 21."""
    best = math.inf
    for order in range(2, 100):
        terms = [
            math.lgamma(order + 1) - math.lgamma(k + 1) - math.lgamma(order - k + 1)
            + (order - k) * math.log1p(-q) + k * math.log(q) + k * (k - 1) / (2 * sigma**2)
            for k in range(order + 1)
        ]  # fmt: skip
        most = max(terms)
        divergence = steps * (most + math.log(sum(math.exp(t - most) for t in terms))) / (order - 1)
        best = min(best, divergence + math.log1p(-1 / order) - (math.log(delta) + math.log(order)) / (order - 1))
    return best


def test_the_ledger_is_charged_before_the_reply_leaves(federate, tmp_path):
    written = []

    def look(request, reply, partition):
        path = tmp_path / "run" / "clients" / f"{partition:05d}" / "ledger.jsonl"
        written.append((request.content["fields"]["round"], path.read_text().splitlines()))
        return reply

    federate(**KEYS, clients=2, fraction_train=1.0, app=tampered_app(look))
    for round, lines in written:
        assert len(lines) == 1 + round  # the first names the data
        assert f'"what": "train, round {round}"' in lines[-1]
        assert f'"noise_multiplier": {SIGMA}, "sample_rate"' in lines[-1]


@pytest.mark.full
def test_a_target_epsilon_chooses_the_noise_and_is_kept(federation):
    settings = {**SETTINGS, "dp_noise_multiplier": 0.0, "dp_target_epsilon": 4.0, "num_server_rounds": 2}
    run = federation(**settings, fraction_train=1.0)
    assert all(3.97 < row["epsilon"] <= 4.0 for row in run.rows(2).values())


@pytest.mark.parametrize(
    ("settings", "examples"),
    [({}, 4 * 24), ({"steps_per_epoch": 5, "local_epochs": 2}, 2 * 5 * 24), ({"batch_size": 100}, 80)],
    ids=["four steps of 24 for 80 examples", "five steps", "all in every step"],
)
def test_the_flops_are_those_of_the_expected_batches(federation, settings, examples):
    run = federation(**{**SETTINGS, "num_server_rounds": 1, **settings}, fraction_train=1.0)
    layers = forward_flops(architecture("cnn-small", (1, 8, 8), 10), (1, 8, 8))
    assert {row["flops"] for row in run.rows(1).values()} == {training_flops(layers, examples)}


def test_parts_of_a_network_count_expected_batches_too(federation):
    """Parts that are the whole network take as much as the network."""
    private = {**SETTINGS, "system": "fedp3", "num_server_rounds": 1, "fraction_train": 1.0, "density": 1.0}
    whole = {"fedp3_local": "uniform", "fedp3_local_density": 1.0}
    layers = forward_flops(architecture("cnn-small", (1, 8, 8), 10), (1, 8, 8))
    for settings, examples, flops in (
        (whole, 4 * 24, 3 * sum(layers.values())),
        ({}, 4 * 24, 3 * sum(layers.values())),
    ):
        run = federation(**{**private, **settings})
        assert {row["flops"] for row in run.rows(1).values()} == {examples * flops}


# --- the wire -----------------------------------------------------------------------------------------------------


def test_a_reply_holds_one_nth_of_the_values_and_nothing_else(federate):
    sent = {}

    def listen(request, reply, partition):
        sent[partition] = (request.content, reply.content)
        return reply

    settings = KEYS | {"num-server-rounds": 1}
    run = federate(**settings, fraction_train=1.0, app=tampered_app(listen))
    dimension = 6090
    for partition, (request, reply) in sent.items():
        payload = wire.payload_of(reply, 10**9)
        assert {name: tuple(t.shape) for name, t in payload.tensors.items()} == {"part": (dimension // 6,)}
        assert not payload.masks
        assert reply.keys() == {"payload", "fields"}
        told = {"density", "flops", "num-examples", "budget-spent"}
        told |= {"epsilon", "epsilon-pld", "epsilon-rdp", "epsilon-paper", "epsilon-simulated"}
        assert set(reply["fields"]) == told
        up = len(recorddict_to_proto(reply).SerializeToString())
        assert 4 * dimension / 6 < up < 4 * dimension / 6 + 500
        assert len(recorddict_to_proto(request).SerializeToString()) > 4 * dimension
        row = next(row for row in run.clients if row["partition"] == partition)
        assert row["bytes_up"] == up
    (last,) = run.rounds
    assert (last["paper_bytes_down"], last["paper_bytes_up"]) == (6 * 4 * dimension, 4 * dimension)
    assert last["paper_bytes_up"] < last["bytes_up"] < last["paper_bytes_up"] + 6 * 500


def test_a_part_whose_client_does_not_reply_stays_as_it_was(federate):
    parts, before = {}, {}

    def longer(request, reply, partition):
        before.update(wire.payload_of(request.content, 10**9).tensors)
        parts[partition] = wire.payload_of(reply.content, 10**9).tensors["part"]
        if partition == 2:
            reply.content["payload"] = wire.to_arrays(Payload({"part": torch.zeros(1000)}))
        return reply

    settings = KEYS | {"num-server-rounds": 1}
    run = federate(**settings, clients=4, fraction_train=1.0, app=tampered_app(longer))
    assert run.rounds[0]["replies"] == 3
    assert "tensor 'part' has shape (1000,), allowed: (152" in run.rounds[0]["failure_reasons"][0]
    stayed = flat(before) == server_after(run, 1)
    assert int(stayed.sum()) == len(parts[2])
    others = torch.cat([parts[k] for k in (0, 1, 3)]) / 4
    assert torch.equal(server_after(run, 1)[~stayed].sort().values, others.sort().values)


# --- determinism, and what is refused -----------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_run_and_another_another(federation):
    run = federation(**SETTINGS)
    assert federation(fresh=True, **SETTINGS).sha256 == run.sha256
    assert federation(**SETTINGS, seed=1).sha256 != run.sha256


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"dp.enabled": False}, ("dp.enabled", False)),
        ({"dp.noise-multiplier": 0.0}, ("dp.noise-multiplier", 0.0)),
        ({"model": "cnn-small-bn"}, ("model", "cnn-small-bn")),
    ],
)
def test_settings_that_cannot_be_are_refused_on_one_line(settings, said):
    with refuses(*said):
        prepare(RunInputs({"system": "ldp-fedp3", "dp.enabled": True, "dp.noise-multiplier": 1.0, **settings}))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"clients": 5}, "clients is 5 and place [01], allowed: 1 to 4 clients"),
        ({"clients": 0}, "clients is 0 and place [01], allowed: 1 to 4 clients"),
        ({"place": 2}, "clients is 2 and place 2, allowed: 1 to 4 clients, and a place below their number"),
        ({"place": "first"}, "clients is 2 and place 'first', allowed: 1 to 4 clients"),
    ],
)
def test_a_client_refuses_a_place_that_cannot_be_and_spends_nothing(federation, monkeypatch, tmp_path, fields, said):
    honest = LDPFedP3.send

    def wrong(self, round):
        for outgoing in honest(self, round):
            outgoing.fields.update(fields)
            yield outgoing

    monkeypatch.setattr(LDPFedP3, "send", wrong)
    with pytest.raises(TooFewReplies, match=said):
        federation(**SETTINGS, out_dir=str(tmp_path / "run"))
    assert not any(Ledger(path).spent for path in tmp_path.glob("run/clients/*/ledger.jsonl"))
