"""Dis-PFL and its baselines against an independent slow reference: masks exactly, weights closely, accuracies."""

from __future__ import annotations

import pytest
import torch

from tests.examples import in_test
from tests.strategies import reference_dispfl as reference
from tests.strategies.reference import WEIGHTS

COMMON = {"fraction_train": 1.0, "lr_decay": 0.9, "momentum": 0.0, "weight_decay": 5e-3, "max_grad_norm": 1.5}
UNEQUAL = {"partition": "dirichlet-class", "shard_size": 0, "samples_per_client": 80}
TRAINED = {
    "dispfl": {
        "num_server_rounds": 4,
        "clients": 5,
        "dispfl_neighbours": 2,
        "density": 0.2,
        **UNEQUAL,
    },
    "dispfl, the released scripts' choices": {
        "dispfl_growth": "random",
        "dispfl_topology": "random-in",
        "dispfl_neighbours": 1,
        "density": 0.3,
    },
    "dispfl, clipped, in a ring": {"max_grad_norm": 0.7, "dispfl_topology": "ring", "seed": 1},
    "dispfl, of all densities, some away": {
        "dispfl_densities": "0.2 0.4 0.6 0.8 1.0",
        "clients": 6,
        "dispfl_neighbours": 2,
        "drop_probability": 0.3,
        "num_server_rounds": 5,
        "momentum": 0.5,
    },
    "dpsgd": {"dpsgd_neighbours": 2, **UNEQUAL},
    "dpsgd, under one mask": {"dpsgd_density": 0.5, "dpsgd_topology": "exponential"},
    "dpsgd-ft, under one mask": {"dpsgd_density": 0.4, "dpsgd_topology": "full"},
    "fedavg-ft": {"fraction_train": 0.75, **UNEQUAL},
    "ditto": {"fraction_train": 0.75, "ditto_pull": 2.0, **UNEQUAL},
    "fedfomo": {
        "seed": 1,  # with 0 one step of one client has an activation within float noise of zero
        "partition": "iid",
        "fraction_train": 0.6,
        "learning_rate": 0.1,
        "clients": 5,
        "samples_per_client": 100,
        "shard_size": 0,
        "fedfomo_candidates": 2,
        "validation_fraction": 0.4,
        "num_server_rounds": 5,
    },
}
SPARSE = [name for name in TRAINED if name.startswith("dispfl")]


@pytest.fixture(scope="module", params=in_test(TRAINED, "dispfl"))
def both(request, federation):
    settings = {**COMMON, **TRAINED[request.param]}
    run = federation(system=request.param.partition(",")[0], **settings)
    return run, reference.federation(run.config, run.num_clients)


def close(actual, expected):
    torch.testing.assert_close(dict(actual), dict(expected), rtol=1e-4, atol=1e-5)


def equal(actual, expected):
    return {name: torch.equal(actual[name], mask) for name, mask in expected.items()}


def test_every_clients_masks_are_the_references_exactly(both):
    run, expected = both
    for partition, client in expected.clients.items():
        round, state = run.client(partition)
        assert round == client.round
        assert equal(state.group("masks"), client.masks) == dict.fromkeys(client.masks, True)
        if run.config.system == "dispfl":
            assert equal(state.group("next-masks"), client.next_masks) == dict.fromkeys(WEIGHTS, True)
            assert equal(client.next_masks, client.masks) != dict.fromkeys(WEIGHTS, True) or all(
                mask.all() for mask in client.masks.values()
            )


def test_every_clients_weights_are_close_to_the_references(both):
    run, expected = both
    for partition, client in expected.clients.items():
        close(run.client(partition)[1].group("weights"), client.tensors)


def test_no_decision_of_a_mask_search_is_within_float_noise(both):
    """The last coordinate that is chosen and the first that is not are further apart than the two runs, everywhere."""
    run, expected = both
    if run.config.system == "dispfl":
        noise = max(
            float((run.client(k)[1].group("weights")[name] - tensor).abs().max())
            for k, client in expected.clients.items()
            for name, tensor in client.tensors.items()
        )
        assert noise < 3e-7
        assert len(expected.margins) > 20
        assert min(expected.margins) > 2 * noise


def test_the_global_or_consensus_model_is_the_references(both):
    run, expected = both
    if run.config.system in ("dispfl", "fedfomo"):
        assert not (run.folder / "models").exists()  # there is none
    else:
        close(run.server, expected.server)


def test_every_client_is_as_accurate_as_in_the_reference(both):
    """To one test image: no more than that may stand on the edge between two classes."""
    run, expected = both
    rows = run.rows(run.config.num_server_rounds)
    for partition, row in rows.items():
        one = 1.01 / len(expected_labels(run, partition))
        assert row["accuracy_personal"] == pytest.approx(float(expected.personal_accuracies[partition]), abs=one)
        if row["accuracy_global"] is not None:
            assert row["accuracy_global"] == pytest.approx(float(expected.global_accuracies[partition]), abs=one)
        if run.config.system == "dispfl" and "loss" in row and row["loss"] is not None:
            before = expected.clients[partition].received_accuracy
            assert row["accuracy_received"] == pytest.approx(float(before), abs=one)


def expected_labels(run, partition):
    return reference.client_data(reference.data_config(run.config), partition, run.num_clients).test_labels


def test_the_same_clients_took_part(both):
    run, expected = both
    rounds = range(1, len(expected.participants) + 1)
    assert [list(run.wiretap.of("train", round)) for round in rounds] == expected.participants


def test_fedfomos_clients_take_from_others_and_some_keep_what_they_had(federation):
    """That the reference's run takes every branch of the algorithm."""
    run = federation(system="fedfomo", **COMMON | TRAINED["fedfomo"])
    kept = [client.kept for client in reference.federation(run.config, run.num_clients).clients.values()]
    from_others = [weight for k, weights in enumerate(kept) for j, weight in weights.items() if j != k]
    assert any(0 < weight < 1 for weight in from_others)
    assert 0.0 in from_others
