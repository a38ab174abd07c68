"""Averages of masked updates by secure sums: the model of a run without, and no weight is seen that few keep."""

from __future__ import annotations

import pytest
import torch

from fedprune_app.config import ConfigError
from fedprune_app.core.holders import HELD, Holders
from fedprune_app.engine import wire
from fedprune_app.engine.exchange import TooFewReplies
from fedprune_app.engine.secure_aggregation import INPUT, MASKED, STAGE
from tests.conftest import wrapped_app
from tests.examples import in_test

PRUNING = {
    "system": "subfedavg",
    "min_holders": 3,
    "num_server_rounds": 2,
    "local_epochs": 2,
    "fraction_train": 1.0,
    "subfedavg.target_rate": 80.0,
    "subfedavg.prune_step": 40.0,
    "subfedavg.accuracy_threshold": 0.0,
    "subfedavg.mask_distance": 0.0,
}
ONE_ROUND = {**PRUNING, "num_server_rounds": 1}


def losing(clients, stage, round, values):
    """The real app, some of whose clients fail at a stage of a round's sum of masks, or of values, as if gone."""
    of_values = {}

    def train(message, context, honest):
        fields, client = wire.fields_of(message.content), context.node_config["partition-id"]
        if fields.get(STAGE) == "keys":  # with which each of the two sums begins
            of_values[client] = not of_values.get(client, True)
        is_asked = fields["round"] == round and of_values.get(client, False) == values
        if is_asked and fields.get(STAGE) == stage and client in clients:
            raise OSError("gone")
        return honest(message, context)

    return wrapped_app(train)


@pytest.mark.parametrize("stage", in_test(["keys", "shares", "input"], "input"))
def test_clients_that_are_lost_before_their_masks_came_are_left_out_of_both_sums(federate, stage):
    secure = federate("secure", app=losing({1, 4}, stage, 1, values=False), secure_sums=True, **PRUNING)
    plain = federate("plain", app=losing({1, 4}, None, 1, values=False), **PRUNING)
    assert secure.sha256 == plain.sha256
    assert [row["few_holders"] for row in secure.rounds] == [row["few_holders"] for row in plain.rounds]
    assert secure.rounds[1]["few_holders"] > 0
    assert [row["replies"] for row in secure.rounds] == [4, 6]


@pytest.mark.full
@pytest.mark.parametrize(("lost", "personal_head"), [({1, 4}, False), (set(), True)])
def test_layers_are_summed_that_enough_clients_send(federate, lost, personal_head):
    """Of six clients three send each of the two layers; of the four that are left in round 1 two. All send the last."""
    settings = {"system": "fedp3", "local_epochs": 1, "fraction_train": 1.0, "num_server_rounds": 2, "min_holders": 3}
    settings |= {"fedp3.personal_head": personal_head}
    secure = federate("secure", app=losing(lost, "input", 1, values=False), secure_sums=True, **settings)
    plain = federate("plain", app=losing(lost, None, 1, values=False), **settings)
    assert secure.sha256 == plain.sha256
    assert [row["few_holders"] for row in secure.rounds] == [row["few_holders"] for row in plain.rounds]
    assert (secure.rounds[0]["few_holders"] > 0) == bool(lost)
    assert secure.rounds[1]["few_holders"] == 0


@pytest.mark.parametrize("stage", in_test(["agree", "open"], "open"))
def test_clients_that_are_lost_after_their_values_came_change_nothing(federate, stage):
    secure = federate("secure", app=losing({0, 3}, stage, 1, values=True), secure_sums=True, **ONE_ROUND)
    assert secure.sha256 == federate("plain", **ONE_ROUND).sha256


@pytest.mark.full
@pytest.mark.parametrize("stage", ["keys", "shares", "input"])
def test_a_client_that_is_lost_between_the_sums_stops_the_run_which_resumes_to_the_same_model(
    federate, tmp_path, stage
):
    """Without it a weight might be of fewer clients than were counted, and counting anew would tell its mask."""
    line = (
        rf"^the values that enough clients send: 5 clients are left after stage '{stage}' of the secure sum, "
        r"allowed: 6 or more; first failure: client 2: .*gone"
    )
    secure = {**PRUNING, "secure_sums": True}
    with pytest.raises(TooFewReplies, match=line):
        federate(app=losing({2}, stage, 2, values=True), **secure)
    resumed = federate(resume_from=str(tmp_path / "run"), **secure)
    assert resumed.sha256 == federate("plain", **PRUNING).sha256


@pytest.mark.full
def test_a_private_run_ends_with_the_same_model_with_secure_sums_and_without(federate):
    private = {"dp.enabled": True, "dp.noise_multiplier": 1.0, "subfedavg.gate_split": "none", "model": "cnn-gn"}
    secure = federate("secure", secure_sums=True, **ONE_ROUND, **private)
    plain = federate("plain", **ONE_ROUND, **private)
    assert secure.sha256 == plain.sha256
    assert [row["epsilon"] for row in secure.clients] == [row["epsilon"] for row in plain.clients]


@pytest.mark.full
def test_masks_that_stay_the_same_can_be_summed_with_other_clients(federate):
    """With one local epoch no mask changes, and each round has four other clients."""
    settings = {**PRUNING, "local_epochs": 1, "num_server_rounds": 3, "fraction_train": 0.7}
    secure = federate("secure", secure_sums=True, **settings)
    assert secure.sha256 == federate("plain", **settings).sha256
    trained = [{row["partition"] for row in secure.clients if row["round"] == n and row["bytes_up"]} for n in (1, 2, 3)]
    assert trained[0] != trained[1] or trained[1] != trained[2]


@pytest.mark.full
def test_values_are_sent_where_enough_clients_keep_a_weight_and_nowhere_else(federate):
    """What the clients add up is as long as the weights are many that three keep."""
    kept, chosen, sizes = {}, {}, set()

    def plainly(message, context, honest):
        reply = honest(message, context)
        client, round = context.node_config["partition-id"], wire.fields_of(message.content)["round"]
        kept[round, client] = wire.payload_of(reply.content, 10**8)
        return reply

    def securely(message, context, honest):
        reply, fields = honest(message, context), wire.fields_of(message.content)
        if fields.get("asks") == HELD and fields[STAGE] == INPUT:
            chosen[fields["round"]] = wire.payload_of(message.content, 10**8).masks
            sizes.add((fields["round"], wire.payload_of(reply.content, 10**8).tensors[MASKED].numel()))
        return reply

    federate("plain", app=wrapped_app(plainly), **PRUNING)
    federate("secure", app=wrapped_app(securely), secure_sums=True, **PRUNING)
    for round in (1, 2):
        payloads = [kept[round, client] for client in range(6)]
        for name, mask in chosen[round].items():
            everywhere = torch.ones_like(mask)
            holders = sum(payload.masks.get(name, everywhere).int() for payload in payloads)
            assert torch.equal(mask, holders >= 3)
    totals = {(round, sum(int(mask.sum()) for mask in masks.values())) for round, masks in chosen.items()}
    assert sizes == {(round, total + 1) for round, total in totals}, "and the number of clients"
    assert totals != {(round, payloads[0].num_elements()) for round in (1, 2)}


@pytest.mark.full
def test_a_last_phase_sums_masks_alone(federate):
    """Its updates are discarded, so nobody's weights have to be sent."""
    sizes = []

    def train(message, context, honest):
        reply, fields = honest(message, context), wire.fields_of(message.content)
        if fields.get(STAGE) == INPUT:
            sizes.append(wire.payload_of(reply.content, 10**8).tensors[MASKED].numel())
        return reply

    settings = {**ONE_ROUND, "last_phase": True}
    secure = federate("secure", app=wrapped_app(train), secure_sums=True, **settings)
    plain = federate("plain", **settings)
    assert secure.sha256 == plain.sha256
    assert secure.rounds[0]["accuracy_last_phase_mean"] == plain.rounds[0]["accuracy_last_phase_mean"]
    masks, values, last = (sizes[start : start + 6] for start in (0, 6, 12))
    assert len(sizes) == 18
    assert masks == last
    assert max(masks) < min(values)


# --- a server that lies -------------------------------------------------------------------------------------------


NONE_THAT_CAN_BE = r"^the values that enough clients send: the sum has weight -?\d{6,}, allowed: 6$"


def told_otherwise(change, values):
    """The real app, whose client 0 receives another message for its masks, or its values, than the server sent."""

    def train(message, context, honest):
        fields = wire.fields_of(message.content)
        is_asked = fields.get(STAGE) == INPUT and (fields.get("asks") == HELD) == values
        if is_asked and context.node_config["partition-id"] == 0:
            change(message.content)
        return honest(message, context)

    return wrapped_app(train)


def other_model(content):
    payload = wire.payload_of(content, 10**8)
    changed = {name: tensor + 1e-6 for name, tensor in payload.tensors.items()}
    content[wire.PAYLOAD] = wire.to_arrays(type(payload)(changed))


def other_weights(content):
    """Ask for as many values, of which one is another."""
    masks = {name: mask.clone() for name, mask in wire.payload_of(content, 10**8).masks.items()}
    mask = next(mask for mask in masks.values() if not mask.all())
    kept, dropped = mask.flatten().nonzero()[0], (~mask).flatten().nonzero()[0]
    mask.view(-1)[kept], mask.view(-1)[dropped] = False, True
    content[wire.PAYLOAD] = wire.to_arrays(wire.Payload(masks, masks))


def test_a_client_that_received_another_model_stays_hidden_while_masks_are_summed(federate):
    with pytest.raises(TooFewReplies, match=r"^round 1: the sum has 7 holders of a coordinate, allowed: at most 6$"):
        federate(app=told_otherwise(other_model, values=False), secure_sums=True, **ONE_ROUND)


def test_a_client_that_received_another_model_stays_hidden_while_values_are_summed(federate, monkeypatch):
    """A server that reads no masks makes up what clients hold."""
    honest = Holders.add

    def made_up(holders, payload, members):
        honest(holders, type(payload)({"holders": torch.zeros_like(payload.tensors["holders"])}), members)
        holders.counts = {name: counts + members for name, counts in holders.counts.items()}

    monkeypatch.setattr(Holders, "add", made_up)
    with pytest.raises(TooFewReplies, match=NONE_THAT_CAN_BE):
        federate(app=told_otherwise(other_model, values=False), secure_sums=True, **ONE_ROUND)


def test_a_client_that_is_asked_for_other_weights_than_the_others_stays_hidden(federate):
    with pytest.raises(TooFewReplies, match=NONE_THAT_CAN_BE):
        federate(app=told_otherwise(other_weights, values=True), secure_sums=True, **ONE_ROUND)


# --- settings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("threshold", "holders", "least"), [(0, 1, 3), (0, 2, 3), (5, 4, 5)])
def test_fewer_holders_than_a_sum_needs_are_refused(federate, threshold, holders, least):
    changes = {"min_holders": holders, "secure_sums_threshold": threshold}
    line = f"min-holders is {holders}, allowed with secure-sums: at least {least}"
    with pytest.raises(ConfigError, match=f"^refused setting: {line}$"):
        federate(secure_sums=True, **{**PRUNING, **changes})
