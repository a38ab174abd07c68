"""What a run reports: accuracies of all clients, recomputed from the files it left, and bytes, weighed on their way."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from fedprune_app.core.flops import forward_flops
from fedprune_app.data import splits
from fedprune_app.data.splits import client_data, data_config
from fedprune_app.models.initial import initial_model
from tests.examples import full, in_test
from tests.strategies.reference import BIASES, WEIGHTS, logits, share_correct

SYSTEMS = ("subfedavg", "fedavg", "standalone")


@pytest.fixture(scope="module", params=in_test(SYSTEMS, "subfedavg"))
def many(request, federation):
    """Twelve clients, of which three a round take part: some never do."""
    return federation(system=request.param, clients=12, shard_size=20, fraction_train=0.25, evaluate_every=3)


# --- accuracies ---------------------------------------------------------------------------------------------------


def recomputed(run, partition):
    """(personal, received, global, validation) accuracy from the models on disk."""
    data = client_data(data_config(run.config), partition, run.num_clients)
    found = run.client(partition)
    if run.config.system == "standalone":
        initial = initial_model("cnn-small", "digits", (1, 8, 8), 10, init="default", seed=run.config.seed)
        personal = found[1].group("weights") if found else dict(initial.named_parameters())
        received = None
    else:
        masks = found[1].group("masks") if found else {}
        received = {name: w * masks[name] if name in masks else w for name, w in run.server.items()}
        personal = found[1].group("weights") if found else run.server

    def on_test(tensors):
        return share_correct(tensors, data.test_images, data.test_labels)

    validated = run.server if run.config.system == "fedavg" else personal
    return (
        on_test(personal),
        on_test(received) if received else None,
        on_test(run.server) if received else None,
        share_correct(validated, data.validation_images, data.validation_labels),
    )


def test_every_client_is_evaluated_and_its_accuracies_are_those_of_the_models_on_disk(many):
    rows = many.rows(3)
    trained = [partition for partition in rows if many.client(partition)]
    assert 3 <= len(trained) < 12
    names = ("accuracy_personal", "accuracy_received", "accuracy_global", "accuracy_validation")
    for partition, row in rows.items():
        expected = recomputed(many, partition)
        assert [row.get(name) for name in names] == [e if e is None else pytest.approx(float(e)) for e in expected]


def test_mean_std_and_worst_decile_are_over_all_clients(many):
    personal = sorted(float(recomputed(many, partition)[0]) for partition in range(12))
    last = many.rounds[-1]
    mean = sum(personal) / 12
    assert last["accuracy_personal_mean"] == pytest.approx(mean)
    assert last["accuracy_personal_std"] == pytest.approx((sum((a - mean) ** 2 for a in personal) / 12) ** 0.5)
    assert last["accuracy_personal_worst_decile"] == pytest.approx((personal[0] + personal[1]) / 2)  # ceil(12 / 10)
    for name, column in (("accuracy_received_mean", 1), ("accuracy_global", 2), ("accuracy_validation_mean", 3)):
        values = [recomputed(many, partition)[column] for partition in range(12)]
        expected = None if None in values else pytest.approx(float(sum(values)) / 12)
        assert last[name] == expected


def test_a_prediction_costs_what_the_masks_leave_of_each_layer(many):
    initial = initial_model("cnn-small", "digits", (1, 8, 8), 10, init="default", seed=0)
    dense = forward_flops(initial, (1, 8, 8))
    for partition, row in many.rows(3).items():
        found = many.client(partition)
        masks = found[1].group("masks") if found else {}
        share = {name: float(masks[f"{name}.weight"].double().mean()) if masks else 1.0 for name in dense}
        assert row["inference_flops"] == pytest.approx(sum(count * share[name] for name, count in dense.items()))
        assert row["channel_density"] is None
    costs = [row["inference_flops"] for row in many.rows(3).values()]
    assert many.rounds[-1]["inference_flops_mean"] == pytest.approx(sum(costs) / 12)
    assert (min(costs) < max(costs)) == (many.config.system == "subfedavg")


def test_rounds_between_evaluations_have_no_accuracies(many):
    for row in many.rounds[:-1]:
        assert row["accuracy_personal_mean"] is None
        assert row["loss_mean"] > 0
    assert [len([row for row in many.clients if row["round"] == round]) for round in (1, 2, 3)] == [3, 3, 12]


def test_the_first_loss_reported_is_that_of_the_data(federation):
    """One epoch of one step from the initial model: the loss of all the client's examples under it."""
    run = federation(
        system="fedavg", clients=2, num_server_rounds=1, local_epochs=1, batch_size=100, fraction_train=1.0
    )
    initial = initial_model("cnn-small", "digits", (1, 8, 8), 10, init="default", seed=0)
    for partition, row in run.rows(1).items():
        data = client_data(data_config(run.config), partition, 2)
        outputs = logits(dict(initial.named_parameters()), data.train_images).detach()
        chosen = outputs.log_softmax(1)[range(len(outputs)), data.train_labels]
        assert row["loss"] == pytest.approx(-float(chosen.mean()), rel=1e-5)
    assert run.rounds[0]["loss_mean"] == pytest.approx(sum(row["loss"] for row in run.rows(1).values()) / 2)


@pytest.mark.parametrize(("gate_split", "is_moved"), [("validation", False), full("test", True)])
def test_only_a_gate_on_test_data_sees_test_labels(federation, monkeypatch, gate_split, is_moved):
    """The same data but for the labels of the test images, in a folder of another name."""
    real = splits.load_dataset

    def load(name, data_dir, *more, **how):
        dataset = real(name, data_dir, *more, **how)
        if data_dir != "/other-test-labels":
            return dataset
        return replace(dataset, test_labels=np.random.default_rng(0).permutation(dataset.test_labels))

    monkeypatch.setattr(splits, "load_dataset", load)
    settings = {"subfedavg_gate_split": gate_split, "subfedavg_accuracy_threshold": 60.0}
    plain, permuted = federation(**settings), federation(data_dir="/other-test-labels", **settings)
    accuracies = [[row["accuracy_personal"] for row in run.rows(3).values()] for run in (plain, permuted)]
    assert accuracies[0] != accuracies[1]
    assert (plain.sha256 != permuted.sha256) == is_moved


# --- bytes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_bytes_reported_are_those_of_the_messages(federation, system):
    run = federation(system=system)
    for row in run.rounds:
        exchanged = run.wiretap.of("train", row["round"])
        of_client = run.rows(row["round"])
        for partition in range(4):
            message = exchanged.get(partition)
            assert of_client[partition]["bytes_up"] == (message.bytes_up if message else None)
            assert of_client[partition]["bytes_down"] == (message.bytes_down if message else None)
        assert row["bytes_up"] == sum(message.bytes_up for message in exchanged.values())
        assert row["bytes_down"] == sum(message.bytes_down for message in exchanged.values())
        assert row["busiest_node_bytes"] == max(row["bytes_up"], row["bytes_down"])
        evaluated = run.wiretap.of("evaluate", row["round"]).values()
        assert row["evaluation_bytes_up"] == sum(message.bytes_up for message in evaluated)
        assert row["evaluation_bytes_down"] == sum(message.bytes_down for message in evaluated)


def test_uploads_shrink_with_the_density_and_downloads_stay_dense(federation):
    run = federation(fraction_train=1.0)
    num_bytes = {name: 4 * tensor.numel() for name, tensor in run.server.items()}
    for partition in range(4):
        ups = [run.wiretap.of("train", round)[partition] for round in (1, 2, 3)]
        densities = [message.up.density() for message in ups]
        assert densities == sorted(densities, reverse=True)
        for message in ups:
            values = sum(4 * int(message.up.masks[name].sum()) for name in WEIGHTS)
            values += sum(num_bytes[name] for name in BIASES)
            bitmaps = sum(num_bytes[name] for name in WEIGHTS) / 32
            assert values < message.bytes_up < values + bitmaps + 600  # names, shapes and the reply's numbers
            assert sum(num_bytes.values()) < message.bytes_down < sum(num_bytes.values()) + 600
        sizes = [message.bytes_up for message in ups]
        for (size, density), (next_size, next_density) in pairwise(zip(sizes, densities, strict=True)):
            assert (next_size < size) == (next_density < density)


def test_standalone_exchanges_no_model(federation):
    run = federation(system="standalone")
    for message in run.wiretap.messages:
        assert not message.up.tensors
        assert not message.down.tensors
        assert message.bytes_up < 1000
        assert message.bytes_down < 1000


# --- known faults -------------------------------------------------------------------------------------------------


def test_every_row_of_a_client_names_its_partition(federation):
    run = federation()
    assert [row["partition"] for row in run.clients if row["round"] == 3] == [0, 1, 2, 3]
