"""The client half all systems share, without a server: state, repeated rounds, what is answered for."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError

import pytest
import torch

from clients import node
from clients.context import NodeContext
from clients.dispfl import DisPFLClient
from clients.fedavg import FedAvgClient
from clients.standalone import StandaloneClient
from clients.subfedavg import SubFedAvgClient
from clients.task import Task, reply_from_numpy
from fedprune_app.config import parse_config
from fedprune_app.core.payload import Payload
from fedprune_app.data.splits import client_data, data_config
from fedprune_app.models.vision import state_tensors

QUICK = {"shard-size": 40, "local-epochs": 2, "learning-rate": 0.05, "subfedavg.accuracy-threshold": 0.0}
CLASSES = {"subfedavg": SubFedAvgClient, "fedavg": FedAvgClient, "standalone": StandaloneClient}
NOTHING = Payload({})


@pytest.fixture
def client(tmp_path):
    """``client(system, **settings)``: a new object each time, as for each message; state stays on disk."""

    def make(system="subfedavg", folder=tmp_path, number=0, **settings):
        config = parse_config({**QUICK, "system": system, **{key.replace("_", "-"): v for key, v in settings.items()}})
        return CLASSES[system](config, NodeContext(number, 4, folder))

    return make


def received_model(one, seed=0):
    """Some model other than the initial one."""
    rng = torch.Generator().manual_seed(seed)
    tensors = state_tensors(one.model, include_buffers=True)
    return Payload(
        {name: tensors[name] + 0.05 * torch.randn(tensors[name].shape, generator=rng) for name in one.shared}
    )


def message(one, received, round, state_round):
    received = Payload({}) if one.config.system == "standalone" else received
    return Task(round, received, fields={"state-round": state_round}).to_numpy()


def fit(one, received, round, state_round=None):
    arrays, num_examples, metrics = one.fit(
        *message(one, received, round, round - 1 if state_round is None else state_round)
    )
    sent, told = reply_from_numpy(arrays, metrics)
    told.pop("seconds")
    return sent, num_examples, told


def evaluate(one, received, round):
    newest = one.store.load(before=round + 1)
    return one.evaluate(*message(one, received, round, newest[0] if newest else 0))[2]


def digest_after(one, round):
    return Payload(one.store.load(before=round + 1)[1].tensors).digest()


@pytest.mark.parametrize("system", CLASSES)
def test_a_round_asked_for_again_gets_the_same_reply_and_leaves_the_same_state(client, system):
    received = received_model(client(system))
    fit(client(system), received, 1)
    first, num_examples, metrics = fit(client(system), received, 2)
    state = digest_after(client(system), 2)
    fit(client(system), received, 3)  # a future that is about to be abandoned
    again, num_examples_again, metrics_again = fit(client(system), received, 2)
    assert (again.digest(), num_examples_again, metrics_again) == (first.digest(), num_examples, metrics)
    assert digest_after(client(system), 2) == state


@pytest.mark.parametrize("system", ["subfedavg", "standalone"])
def test_a_client_goes_on_from_the_round_that_the_server_took_in(client, system, tmp_path):
    """What it did in round 2 came too late: it is as if that had not been."""
    received = received_model(client(system))
    for folder, rounds in ((tmp_path / "late", (1, 2)), (tmp_path / "never", (1,))):
        for round in rounds:
            fit(client(system, folder), received, round, state_round=round - 1)
        fit(client(system, folder), received, 3, state_round=1)
    late, never = (digest_after(client(system, tmp_path / name), 3) for name in ("late", "never"))
    assert late == never


@pytest.mark.parametrize("system", ["subfedavg", "fedavg"])
def test_training_starts_from_what_was_received(client, system):
    """With a learning rate of almost nothing, what comes back is what was sent, under the mask."""
    still = {"learning_rate": 1e-30, "local_epochs": 1}
    received = received_model(client(system), seed=1)
    reply, _, _ = fit(client(system, **still), received_model(client(system), seed=2), 1)
    reply, _, _ = fit(client(system, **still), received, 2)
    assert all(torch.equal(reply.tensors[name], tensor) for name, tensor in received.tensors.items())


def test_a_client_alone_starts_from_the_initial_model_and_goes_on_from_its_own(client):
    still = {"learning_rate": 1e-30}
    initial = state_tensors(client("standalone").model)
    fit(client("standalone", **still), Payload({}), 1)
    assert all(torch.equal(w, initial[n]) for n, w in client("standalone").store.load()[1].group("weights").items())
    fit(client("standalone"), Payload({}), 2)
    own = client("standalone").store.load()[1].group("weights")
    fit(client("standalone", **still), Payload({}), 3)
    after = client("standalone").store.load()[1].group("weights")
    assert all(torch.equal(after[name], own[name]) for name in initial)
    assert not any(torch.equal(after[name], initial[name]) for name in initial)


@pytest.mark.parametrize("system", ["subfedavg", "fedavg"])
def test_a_client_that_never_trained_answers_for_the_received_model(client, system):
    received = received_model(client(system))
    metrics = evaluate(client(system), received, 5)
    assert metrics["digest"] == received.digest() or system == "subfedavg"  # there the digest covers full masks too
    assert metrics["accuracy-personal"] == metrics["accuracy-received"] == metrics["accuracy-global"]
    assert metrics["density"] == 1
    assert client(system).store.load() is None


def test_an_evaluation_looks_no_further_than_its_round(client):
    received = received_model(client())
    fit(client(), received, 1)
    after_one = evaluate(client(), received, 1)
    fit(client(), received, 2)
    assert evaluate(client(), received, 1) == after_one
    assert evaluate(client(), received, 2)["digest"] != after_one["digest"]


def test_without_validation_data_there_is_no_validation_accuracy(client):
    one = client("fedavg", validation_fraction=0.0)
    assert one.accuracy(Task(1), "validation") is None
    assert "accuracy-validation" not in evaluate(one, received_model(one), 1)


def test_personal_scores_are_those_of_the_present_model_whatever_was_remembered(client):
    still = {"learning_rate": 1e-30}
    scores = []
    for round in (1, 2):
        received = received_model(client("fedavg"), seed=round)
        fit(client("fedavg", **still), received, round)
        fresh = evaluate(client("fedavg"), received, round)
        assert fresh["accuracy-personal"] == fresh["accuracy-received"]
        assert evaluate(client("fedavg"), received, round) == fresh
        (client("fedavg").store.folder / "scores.json").write_text('{"digest": 3')
        assert evaluate(client("fedavg"), received, round) == fresh
        scores.append(fresh["accuracy-personal"])
    assert scores[0] != scores[1]


def test_the_update_is_on_disk_before_the_reply_leaves(client, monkeypatch):
    def full_disk(*_, **__):
        raise OSError("no space left on device")

    monkeypatch.setattr(node.VersionedStore, "save", full_disk)
    with pytest.raises(OSError, match="no space left"):
        fit(client(), received_model(client()), 1)


def test_properties_describe_the_data(client):
    one = client(number=2)
    properties = one.get_properties({})
    data = client_data(data_config(one.config), 2, 4)
    assert properties["num-examples"] == len(data.train_labels) == sum(properties["labels-train"])
    assert properties["labels-test"] == torch.bincount(data.test_labels, minlength=10).tolist()
    assert properties["labels-validation"] == torch.bincount(data.validation_labels, minlength=10).tolist()
    assert properties["image-shape"] == [1, 8, 8]


def test_the_gradient_is_clipped_only_when_asked(client):
    received = received_model(client("fedavg"))
    plain, clipped, loose = (
        fit(client("fedavg", max_grad_norm=norm), received, 1)[0].digest() for norm in (0.0, 0.01, 1e9)
    )
    assert plain == loose
    assert plain != clipped


def test_a_client_that_diverged_keeps_nothing_of_it_and_trains_again(client):
    with pytest.raises(ValueError, match="diverged"):
        fit(client("standalone", learning_rate=1e4), Payload({}), 1)
    assert client("standalone").store.load() is None
    assert math.isfinite(fit(client("standalone"), Payload({}), 2, state_round=0)[2]["loss"])


def test_scores_on_other_data_are_not_remembered(client, tmp_path):
    def score(folder, **data):
        return evaluate(client("standalone", folder, **data), Payload({}), 1)["accuracy-personal"]

    classes = {"partition": "classes", "shard_size": 0}
    expected = score(tmp_path / "fresh", **classes)
    assert score(tmp_path / "used") != expected
    assert score(tmp_path / "used", **classes) == expected


# --- other clients' payloads, and what a node can bear ----------------------------------------------------------------


def some_payload(seed, masked=True):
    draw = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(4, 3, generator=draw) for name in ("conv1.weight", "layer/1/peer/2/weight", "bias")}
    masks = {name: torch.rand(4, 3, generator=draw) < 0.5 for name in ("layer/1/peer/2/weight", "conv1.weight")}
    return Payload.pruned(tensors, masks if masked else {})


@pytest.mark.parametrize("own", [NOTHING, some_payload(0), some_payload(1, masked=False)])
@pytest.mark.parametrize(
    "updates",
    [
        {},
        {3: some_payload(2)},
        {0: some_payload(3, masked=False), 3: some_payload(4), 30: some_payload(5), 2**31: some_payload(6)},
        {7: some_payload(7), 1: some_payload(8, masked=False)},
    ],
)
def test_peer_updates_survive_flowers_one_list_of_arrays(own, updates):
    task = Task(3, own, updates, {"round": 3, "width": 0.5}, ["peer/9 is left out: it is none"])
    again = Task.from_numpy(*task.to_numpy())
    assert (again.round, again.fields, again.notes) == (3, task.fields, task.notes)
    assert again.payload.digest() == own.digest()
    assert list(again.peer_updates) == list(updates)
    assert {k: one.digest() for k, one in again.peer_updates.items()} == {k: u.digest() for k, u in updates.items()}
    assert again.digest() == task.digest()
    assert (task.digest() == own.digest()) == (not updates)


def test_peer_updates_share_their_memory_with_what_they_came_in():
    arrays, config = Task(1, NOTHING, {4: some_payload(0)}).to_numpy()
    update = Task.from_numpy(arrays, config).peer_updates[4]
    assert [tensor.data_ptr() for tensor in update.tensors.values()] == [a.ctypes.data for a in arrays[:3]]


def test_a_task_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        Task(1).round = 2


def test_what_is_noted_of_a_task_belongs_to_that_task_alone():
    task = Task(1)
    task.notes.append("too large")
    assert Task(1).notes == []
    assert Task.from_numpy(*task.to_numpy()).notes is not task.notes


@pytest.mark.parametrize(
    ("capacity", "settings", "density"),
    [
        (None, {"density": 0.4}, 0.4),
        (None, {"density": 0.4, "dispfl.densities": "0.2 0.8"}, 0.8),
        (0.3, {"density": 0.4}, 0.3),
        (0.3, {"density": 0.4, "dispfl.densities": "0.2 0.8"}, 0.3),
    ],
)
def test_what_a_node_can_bear_goes_before_what_the_run_asks_for(tmp_path, capacity, settings, density):
    one = DisPFLClient(parse_config({**QUICK, "system": "dispfl", **settings}), NodeContext(1, 4, tmp_path, capacity))
    assert one.target_density() == density
    masks = one.initial_masks
    assert one.density(masks) == pytest.approx(density, abs=0.01)
