"""A reply that is late, malformed, not finite, huge, for another message or sent twice, in every system.

It leaves the state and the result as if its client had not been asked.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from flwr.app import Array, ArrayRecord, Error, Message, MessageType

from fedprune_app.core import codec
from fedprune_app.core.payload import Payload
from fedprune_app.engine import exchange, wire
from fedprune_app.engine.inprocess import InProcessGrid
from tests.conformance.conftest import ROUNDS, SYSTEM

LATE, MALFORMED = "2", "3"  # exchanges in which clients misbehave: there is something to spoil before and after each
ANYTHING = 10**7


class Failing(InProcessGrid):
    """Clients 1 to 3 raise when they are asked to train in rounds 2 and 3: as if they had not been asked."""

    misbehaving = (1, 2, 3)

    def pull_messages(self, message_ids):
        for message_id in message_ids:
            message = self._pending.get(message_id)
            if message is None:
                continue
            partition = self._contexts[message.metadata.dst_node_id].node_config["partition-id"]
            is_training = message.metadata.message_type == MessageType.TRAIN
            exchange = message.metadata.group_id
            if not (is_training and exchange in (LATE, MALFORMED) and partition in self.misbehaving):
                yield from super().pull_messages([message_id])
            else:
                yield from self.bad(exchange, partition, message_id)

    def bad(self, exchange, partition, message_id):
        message = self._pending.pop(message_id)
        reply = Message(Error(2, "ValueError: no"), reply_to=message)
        reply.metadata.__dict__["_reply_to_message_id"] = message_id
        yield reply

    def honest(self, message_id):
        (reply,) = InProcessGrid.pull_messages(self, [message_id])
        return reply


def with_values(reply, value):
    """The reply with all its tensors full of a value; what names no tensors says a number that is none."""
    if wire.PAYLOAD not in reply.content:
        reply.content["fields"].update({"num-examples": 10**9})
        return reply
    sent = wire.payload_of(reply.content, ANYTHING)
    tensors = {
        name: torch.full_like(tensor, value) if tensor.is_floating_point() else tensor
        for name, tensor in sent.tensors.items()
    }
    try:
        reply.content[wire.PAYLOAD] = wire.to_arrays(Payload(tensors, sent.masks))
    except ValueError:  # our own encoder does not write such values
        return malformed(reply)
    return reply


def malformed(reply):
    """The reply with bytes that no codec wrote."""
    data = b"\x93no codec wrote this" * 20
    reply.content[wire.PAYLOAD] = ArrayRecord({codec.KEY: Array("uint8", (len(data),), "fedprune.codec", data)})
    return reply


class Misbehaving(Failing):
    """Late in round 2, malformed in round 3.

    In round 2 client 1 answers an hour late, client 2 answers another message than it was sent, client 3 never answers.
    In round 3 client 1 sends bytes that no codec wrote, client 2 values that are not finite, client 3 huge values.
    """

    def bad(self, exchange, partition, message_id):
        if exchange == MALFORMED:
            spoil = {1: malformed, 2: lambda r: with_values(r, math.nan), 3: lambda r: with_values(r, 1e30)}[partition]
            yield spoil(self.honest(message_id))
        elif partition == 2 and message_id in self._pending:
            reply = self.honest(message_id)
            reply.metadata.__dict__["_reply_to_message_id"] = "1"  # of the first query, long answered
            yield reply


class Twice(InProcessGrid):
    """Every reply to a training message comes twice, in one batch."""

    def pull_messages(self, message_ids):
        for reply in super().pull_messages(message_ids):
            yield reply
            if reply.metadata.message_type == MessageType.TRAIN:
                yield reply


@pytest.fixture
def clock(monkeypatch):
    """A clock that moves only while the exchange sleeps: a busy machine makes nobody late."""
    now = SimpleNamespace(seconds=0.0)

    def sleep(seconds):
        now.seconds += max(seconds, 1e-3)

    monkeypatch.setattr(exchange, "time", SimpleNamespace(monotonic=lambda: now.seconds, sleep=sleep))


@SYSTEM
def test_bad_replies_leave_everything_as_if_their_clients_had_not_been_asked(conform, clock, system):
    settings = {"deadline_seconds": 5.0, "evaluate_every": ROUNDS}
    without, with_bad = (conform(system, grid=grid, **settings) for grid in (Failing, Misbehaving))
    failures = [[row["failures"] for row in run.rounds] for run in (with_bad, without)]
    assert failures[0] == failures[1]
    assert sum(failures[0]) == 2 * len(Failing.misbehaving)
    assert with_bad.sha256 == without.sha256
    assert with_bad.sha256 != conform(system).sha256


@SYSTEM
def test_a_reply_that_comes_twice_counts_once(conform, system):
    assert conform(system, grid=Twice).sha256 == conform(system).sha256
