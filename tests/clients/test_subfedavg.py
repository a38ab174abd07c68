"""Sub-FedAvg's client, without a server: when it prunes, and how much."""

from __future__ import annotations

import math
from dataclasses import fields

import pytest
import torch
from PIL import Image

from clients.context import NodeContext
from clients.subfedavg import SubFedAvgClient
from clients.task import Task
from fedprune_app.config import parse_config
from fedprune_app.core.payload import Payload
from fedprune_app.data.splits import ClientData
from fedprune_app.engine.store import State, grouped
from fedprune_app.models.vision import state_tensors

SIZES = {"conv1.weight": 144, "conv2.weight": 4608, "fc1.weight": 1280}
TOTAL = 6090  # biases included


@pytest.fixture
def client(tmp_path):
    """A client whose gate finds every model right about ``accuracy`` of the time, and notes on which data."""

    def make(accuracy=1.0, **settings):
        values = {key.replace("_", "-").replace("subfedavg-", "subfedavg."): v for key, v in settings.items()}
        config = parse_config({"shard-size": 40, "local-epochs": 2, "learning-rate": 0.05, **values})
        one = SubFedAvgClient(config, NodeContext(0, 4, tmp_path))
        one.asked = []
        if accuracy != "real":
            one.accuracy = lambda task, split, decides: one.asked.append(split) or accuracy
        return one

    return make


def update(one, state=None, round=1):
    received = Payload(state_tensors(one.model, include_buffers=True))
    return one.local_update(Task(round, received), state or State())


def full_masks_less(one, count, name="conv2.weight"):
    """Masks that keep all but the first ``count`` coordinates of one tensor."""
    masks = {name: torch.ones(tensor.shape, dtype=torch.bool) for name, tensor in one.weights(one.prunable).items()}
    masks[name].view(-1)[:count] = False
    return masks


def removed(update):
    return {name: int((~mask).sum()) for name, mask in update.payload.masks.items()}


def share_of_each(percent):
    """What one step takes from full tensors: all below the percentile at place percent/100 * (n - 1)."""
    return {name: math.ceil(percent / 100 * (n - 1)) for name, n in SIZES.items()}


NOTHING = dict.fromkeys(SIZES, 0)


def test_a_full_step_takes_its_percentage_of_each_tensor(client):
    assert (
        removed(update(client())) == share_of_each(10) == {"conv1.weight": 15, "conv2.weight": 461, "fc1.weight": 128}
    )


@pytest.mark.parametrize(("split", "asked"), [("validation", ["validation"]), ("test", ["test"])])
def test_the_gate_asks_once_and_on_its_split_only(client, split, asked):
    one = client(subfedavg_gate_split=split)
    update(one)
    assert one.asked == asked


@pytest.mark.parametrize(("accuracy", "is_open"), [(0.5, False), (0.51, True), (0.0, False), (None, False)])
def test_the_gate_opens_above_the_threshold(client, accuracy, is_open):
    assert (removed(update(client(accuracy))) != NOTHING) == is_open


def test_the_gate_judges_the_pruned_model(client):
    one = client()
    seen = []
    one.accuracy = lambda task, split, decides: seen.append(one.weights(one.prunable)) or 1.0
    masks = update(one).payload.masks
    assert all(not seen[0][name][~mask].any() for name, mask in masks.items())


def test_a_shut_gate_leaves_the_trained_weights_as_they_are(client):
    shut, never = update(client(0.0)), update(client(subfedavg_target_rate=0.0))
    assert shut.payload.digest() == never.payload.digest()


@pytest.mark.parametrize(
    ("pruned", "target"),
    [
        (3045, 50.0),
        (609, 10.0),
    ],
)
def test_a_target_reached_exactly_is_reached(client, pruned, target):
    state = State(grouped(masks=full_masks_less(client(), pruned)))
    just_reached = client(subfedavg_target_rate=target)
    assert removed(update(just_reached, state)) == NOTHING | {"conv2.weight": pruned}


def test_a_target_not_quite_reached_costs_a_weight_of_each_tensor(client):
    state = State(grouped(masks=full_masks_less(client(), 609)))
    taken = removed(update(client(subfedavg_target_rate=10.0001), state))
    assert taken == {"conv1.weight": 1, "conv2.weight": 610, "fc1.weight": 1}


@pytest.mark.parametrize(
    ("target", "percent"),
    [
        (10.0, 10.0),  # a whole step is missing
        (9.0, 5.0),  # less than one: the cap
        (3.0, 3.0),  # all that is missing
    ],
)
def test_the_last_step_takes_what_is_missing_up_to_the_cap(client, target, percent):
    one = client(subfedavg_target_rate=target)
    assert removed(update(one)) == share_of_each(percent)


def test_what_is_missing_counts_against_the_remaining_parameters(client):
    half = State(grouped(masks=full_masks_less(client(), 3045)))
    one = client(subfedavg_target_rate=52.0)
    remaining = SIZES | {"conv2.weight": SIZES["conv2.weight"] - 3045}
    expected = {name: math.ceil(0.04 * (n - 1)) for name, n in remaining.items()}
    expected["conv2.weight"] += 3045
    assert removed(update(one, half)) == expected


def test_a_weight_at_the_percentile_itself_stays(client):
    """Of 4,601 weights the 10 % percentile is one of them: the 461st smallest."""
    state = State(grouped(masks=full_masks_less(client(), 7)))
    assert removed(update(client(), state))["conv2.weight"] == 7 + 460


def test_with_one_local_epoch_there_is_no_distance(client):
    assert removed(update(client(local_epochs=1, subfedavg_mask_distance=0.0))) == NOTHING


def test_a_tensor_that_is_all_pruned_stays_so_and_the_others_go_on(client):
    state = State(grouped(masks=full_masks_less(client(), 144, "conv1.weight")))
    result = update(client(), state)
    assert removed(result) == share_of_each(10) | {"conv1.weight": 144}
    assert math.isfinite(result.training.loss_mean)


def test_a_client_of_one_label_prunes(client):
    one = client("real", partition="classes", classes_per_client=1, shard_size=0)
    assert len(one.data.train_labels.unique()) == 1
    assert removed(update(one)) == share_of_each(10)


def test_norms_and_biases_carry_no_mask(tmp_path):
    for part in ("train", "test"):
        for label, grey in (("dark", 10), ("light", 200)):
            (tmp_path / part / label).mkdir(parents=True)
            for i in range(8):
                Image.new("L", (16, 16), grey + 5 * i).save(tmp_path / part / label / f"{i}.png")
    values = {"dataset": "image-folder", "data-dir": str(tmp_path), "model": "lenet5-bn", "partition": "iid"}
    one = SubFedAvgClient(
        parse_config({**values, "local-epochs": 2, "learning-rate": 0.05}), NodeContext(0, 2, tmp_path / "state")
    )
    one.accuracy = lambda task, split, decides: 1.0
    result = update(one)
    assert set(result.payload.masks) == {f"{layer}.weight" for layer in ("conv1", "conv2", "fc1", "fc2", "fc3")}
    assert all(count > 0 for count in removed(result).values())
    assert {f"bn{i}.{part}" for i in (1, 2) for part in ("weight", "bias", "running_mean", "running_var")} < set(
        result.payload.tensors
    )
    parameters = sum(p.numel() for p in one.model.parameters())  # running statistics are none
    assert one.density(result.payload.masks) == pytest.approx(1 - sum(removed(result).values()) / parameters, abs=1e-12)


def test_the_work_counted_is_that_under_the_mask_in_use(client):
    """FLOPs are of the training that was done: what is pruned after it counts from the next round."""
    received = Payload(state_tensors(client().model))

    def flops(one, round):
        return one.fit(*Task(round, received, fields={"state-round": round - 1}).to_numpy())[2]["flops"]

    dense = flops(client(0.0), 1)  # the gate stays shut
    assert flops(client(), 1) == dense
    assert flops(client(), 2) == pytest.approx(0.9 * dense, rel=0.01)


def test_a_client_without_validation_images_says_that_it_does_not_prune(client):
    one = client(accuracy="real", subfedavg_accuracy_threshold=0)
    parts = {field.name: getattr(one.data, field.name) for field in fields(ClientData)}
    none = {name: tensor[:0] for name, tensor in parts.items() if name.startswith("validation")}
    one.data = ClientData(**{**parts, **none})
    one.images.sizes["validation"] = 0
    task = Task(1, Payload(state_tensors(one.model, include_buffers=True)))
    assert removed(one.local_update(task, State())) == NOTHING
    assert set(task.notes) == {"it has no validation images to decide by, so it does not prune"}
