"""FedP3 against an independent slow reference: masks exactly, weights closely, over rounds with few participants."""

from __future__ import annotations

import pytest
import torch

from tests.examples import in_test
from tests.strategies import reference_fedp3 as reference

COMMON = {
    "model": "cnn-gn",
    "clients": 6,
    "num_server_rounds": 4,
    "fraction_train": 0.5,
    "batch_size": 24,
    "density": 0.7,
    "lr_decay": 0.9,
    "momentum": 0.0,
}
UNEQUAL = {"partition": "dirichlet-class", "shard_size": 0, "samples_per_client": 80}
TRAINED = {
    "opu2": {
        "seed": 4,  # with seed 0 a rounding difference moves a weight across a threshold on some processors
        "fedp3_layer_set": "opu2",
        "momentum": 0.5,
        "weight_decay": 5e-3,
        "max_grad_norm": 1.5,
        **UNEQUAL,
    },
    "lowerb, the released code's choices": {
        "fedp3_layer_set": "lowerb",
        "fedp3_personal_head": True,
        "max_grad_norm": 10.0,
    },
    "opu1-2-3, weighted, half of the others pruned": {
        "fedp3_layer_set": "opu1-2-3",
        "fedp3_aggregation": "weighted",
        "density": 0.5,
        "fraction_train": 1.0,
    },
    "opu2-3, counting the last layer": {
        "seed": 3,  # with seed 0 a rounding difference grows to 1e-3 in the weights of one client
        "fedp3_layer_set": "opu2-3",
        "fedp3_assignment": "random",
        "fedp3_aggregation": "weighted-with-head",
        "fraction_train": 0.7,
    },
    "everything drawn anew every round, weighted as printed": {
        "fedp3_layer_set": "opu1-2-3",
        "fedp3_assignment": "per-round",
        "fedp3_aggregation": "weighted-literal",
    },
    "by hand, uniform local pruning": {
        "fedp3_layer_set": "by-hand",
        "fedp3_layers": "-conv2; conv1 conv3; conv2",
        "fedp3_local": "uniform",
        "fedp3_local_density": 0.5,
        "momentum": 0.4,
        "weight_decay": 5e-3,
    },
    "lowerb, ordered dropout": {
        "fedp3_layer_set": "lowerb",
        "fedp3_local": "ordered-dropout",
        "fedp3_local_density": 0.3,
        "momentum": 0.4,
        "weight_decay": 5e-3,
        "max_grad_norm": 1.5,
    },
    "opu2, attention": {
        "fedp3_layer_set": "opu2",
        "fedp3_local": "ordered-dropout",
        "fedp3_local_density": 0.4,
        "fedp3_aggregation": "attention",
        "fraction_train": 1.0,
    },
}


@pytest.fixture(scope="module", params=in_test(TRAINED, "opu2"))
def both(request, federation):
    run = federation(system="fedp3", **{**COMMON, **TRAINED[request.param]})
    return run, reference.federation(run.config, run.num_clients)


def close(actual, expected):
    torch.testing.assert_close(dict(actual), dict(expected), rtol=1e-4, atol=2e-6)


def test_every_clients_masks_are_the_references_exactly(both):
    run, expected = both
    for partition, client in expected.clients.items():
        if not client.round:
            assert run.client(partition) is None
            continue
        round, state = run.client(partition)
        assert round == client.round
        masks = state.group("masks")
        assert masks.keys() == client.masks.keys()
        assert all(torch.equal(masks[name], mask) for name, mask in client.masks.items())


def test_every_clients_weights_and_the_servers_are_close_to_the_references(both):
    run, expected = both
    for partition, client in expected.clients.items():
        if client.round:
            close(run.client(partition)[1].group("weights"), client.tensors)
    head = reference.LAYERS["out"] if run.config.fedp3.personal_head else ()
    close(run.server, {name: tensor for name, tensor in expected.server.items() if name not in head})


def test_what_travels_is_what_the_algorithm_says(both):
    """Down own layers in full and the others masked; up own layers alone, without masks."""
    run, expected = both
    for round, sets in enumerate(expected.sets, start=1):
        messages = run.wiretap.of("train", round)
        assert list(messages) == list(sets)
        for partition, message in messages.items():
            own = (*sets[partition], *(() if run.config.fedp3.personal_head else ("out",)))
            names = {name for layer in own for name in reference.LAYERS[layer]}
            assert message.up.tensors.keys() == names
            assert not message.up.masks
            pruned = {reference.WEIGHT[layer] for layer in reference.HIDDEN if layer not in sets[partition]}
            density = run.config.density
            assert message.down.masks.keys() == (pruned if density < 1 else set())
            for name, mask in message.down.masks.items():
                assert not message.down.tensors[name][~mask].any()


def test_no_decision_is_within_float_noise(both):
    run, expected = both
    trained = {k: client for k, client in expected.clients.items() if client.round}
    noise = max(
        float((run.client(k)[1].group("weights")[name] - tensor).abs().max())
        for k, client in trained.items()
        for name, tensor in client.tensors.items()
    )
    assert noise < 2e-6
    assert len(expected.margins) >= 6
