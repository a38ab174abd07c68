"""Averages by secure sums: the model is that of those who are left, and a server that lies reads nothing."""

from __future__ import annotations

import errno
import json

import pytest

from fedprune_app.engine import wire
from fedprune_app.engine.exchange import TooFewReplies
from fedprune_app.engine.secure_aggregation import BODY, INPUT, STAGE
from fedprune_app.engine.store import VersionedStore
from tests.conftest import wrapped_app
from tests.examples import in_test
from tests.strategies.test_fedspallm_secure import losing

ONE_ROUND = {"system": "fedavg", "num_server_rounds": 1, "local_epochs": 1, "fraction_train": 1.0}


@pytest.mark.parametrize("stage", in_test(["keys", "shares", "input"], "input"))
def test_the_average_is_of_those_that_are_left_wherever_the_others_are_lost(federate, stage):
    """Six clients of unequal weights, of which two go: the scale of the sum stays that of all six."""
    uneven = {**ONE_ROUND, "partition": "dirichlet-client", "dirichlet_alpha": 1.0}
    secure = federate("secure", app=losing({stage: {1, 4}}), secure_sums=True, **uneven)
    plain = federate("plain", app=losing({None: {1, 4}}), **uneven)
    assert secure.sha256 == plain.sha256
    assert secure.rounds[0]["replies"] == plain.rounds[0]["replies"] == 4
    assert sorted({text.split(":")[0] for text in secure.rounds[0]["failure_reasons"]}) == ["client 1", "client 4"]


@pytest.mark.parametrize("stage", in_test(["agree", "open"], "open"))
def test_an_average_is_opened_by_those_that_are_left_after_it(federate, stage):
    secure = federate("secure", app=losing({stage: {0, 3}}), secure_sums=True, **ONE_ROUND)
    assert secure.sha256 == federate("plain", **ONE_ROUND).sha256
    assert secure.rounds[0]["replies"] == 6


def test_a_round_of_which_the_server_lost_the_sum_is_repeated_with_the_same_members(federate, tmp_path, monkeypatch):
    """They refuse another sum for the same message, though the lost client is well again."""
    settings = {**ONE_ROUND, "secure_sums": True}
    whole = federate("whole", app=losing({"input": {1, 4}}), **settings)
    monkeypatch.setattr(VersionedStore, "save", full_disk)
    with pytest.raises(OSError, match="No space"):
        federate(app=losing({"input": {1, 4}}), **settings)
    monkeypatch.undo()
    resumed = federate(resume_from=str(tmp_path / "run"), **settings)
    assert resumed.sha256 == whole.sha256


SAVE = VersionedStore.save


def full_disk(self, round, *more, **named):
    """Save the clients' states, and no checkpoint of the server after round 0."""
    if round and self.folder.name == "checkpoints":
        raise OSError(errno.ENOSPC, "No space left on device")
    return SAVE(self, round, *more, **named)


@pytest.mark.full
@pytest.mark.parametrize("away", [{"fraction_train": 0.75}, {"drop_probability": 0.3}])
def test_a_run_goes_on_after_a_last_phase(federate, tmp_path, away):
    """Whose sum, of all clients' updates of the next round's model, was not opened."""
    settings = {**ONE_ROUND, "secure_sums": True, "last_phase": True, **away}
    whole = federate("whole", **settings | {"num_server_rounds": 2})
    federate(**settings)
    longer = federate(resume_from=str(tmp_path / "run"), **settings | {"num_server_rounds": 2})
    assert longer.sha256 == whole.sha256


def test_below_the_threshold_the_round_ends_with_one_line(federate):
    line = (
        "round 1: 3 clients are left after stage 'input' of the secure sum, allowed: 4 or more; first failure: client 0"
    )
    with pytest.raises(TooFewReplies, match=line):
        federate(app=losing({"input": {0, 1, 2}}), secure_sums=True, **ONE_ROUND)


def told_otherwise(change):
    """The real app, whose client 0 receives another message for its addend than the server sent to all."""

    def train(message, context, honest):
        is_input = wire.fields_of(message.content).get(STAGE) == INPUT
        if is_input and context.node_config["partition-id"] == 0:
            change(message.content)
        return honest(message, context)

    return wrapped_app(train)


def other_scale(content):
    body = json.loads(content["fields"][BODY])
    content["fields"][BODY] = json.dumps({**body, "terms": {**body["terms"], "max-weight": 1}})


def other_model(content):
    payload = wire.payload_of(content, 10**8)
    changed = {name: tensor + 1e-6 for name, tensor in payload.tensors.items()}
    content[wire.PAYLOAD] = wire.to_arrays(type(payload)(changed))


@pytest.mark.parametrize("change", [other_scale, other_model])
def test_a_member_that_was_told_another_scale_or_model_stays_hidden(federate, change):
    """Else a scale of its own would leave the others' addends too small to hide it, or a model make them known."""
    with pytest.raises(TooFewReplies, match=r"the sum has weight -?\d{6,}, allowed: \d+|has magnitude \S+, allowed"):
        federate(app=told_otherwise(change), secure_sums=True, **ONE_ROUND)
