"""Grids whose clients misbehave, and a clock that makes no other client late."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from flwr.app import Array, ArrayRecord, Error, Message, MessageType

from fedprune_app.core import codec
from fedprune_app.core.payload import Payload
from fedprune_app.engine import exchange, wire
from fedprune_app.engine.flower_private import set_answered_id
from fedprune_app.engine.simulated_grid import InProcessGrid

LATE, MALFORMED = "2", "3"
"""The rounds in which clients misbehave: there is something to spoil before and after each."""


_ANYTHING = 10**7


class Failing(InProcessGrid):
    """Clients 1 to 3 raise an error in their training of rounds 2 and 3."""

    misbehaving = (1, 2, 3)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterator[Message]:
        """Yield replies; :meth:`bad` makes those of misbehaving clients."""
        for message_id in message_ids:
            message = self._pending.get(message_id)
            if message is None:
                continue
            partition = int(self._contexts[message.metadata.dst_node_id].node_config["partition-id"])
            is_training = message.metadata.message_type == MessageType.TRAIN
            exchanged = message.metadata.group_id
            if is_training and exchanged in (LATE, MALFORMED) and partition in self.misbehaving:
                yield from self.bad(exchanged, partition, message_id)
            else:
                yield from super().pull_messages([message_id])

    def bad(self, exchanged: str, partition: int, message_id: str) -> Iterator[Message]:
        """Yield the replies of a misbehaving client in the round ``exchanged``, if any."""
        message = self._pending.pop(message_id)
        reply = Message(Error(2, "ValueError: no"), reply_to=message)
        set_answered_id(reply, message_id)
        yield reply

    def honest(self, message_id: str) -> Message:
        """Return a client's correct reply."""
        (reply,) = InProcessGrid.pull_messages(self, [message_id])
        return reply


class Misbehaving(Failing):
    """Clients 1 to 3 reply late in round 2, and malformed in round 3.

    In round 2 client 1 replies an hour late, client 2 to another message than its own, and client 3 never. In round 3
    client 1 sends bytes that no codec wrote, client 2 values that are not finite, client 3 huge values.
    """

    def bad(self, exchanged: str, partition: int, message_id: str) -> Iterator[Message]:
        if exchanged == MALFORMED:
            reply = self.honest(message_id)
            yield malformed(reply) if partition == 1 else _with_values(reply, math.nan if partition == 2 else 1e30)
        elif partition == 2 and message_id in self._pending:
            reply = self.honest(message_id)
            set_answered_id(reply, "1")  # the first query, whose reply came long ago
            yield reply


class Twice(InProcessGrid):
    """All clients send every training reply twice, in one batch."""

    def pull_messages(self, message_ids: Iterable[str]) -> Iterator[Message]:
        for reply in super().pull_messages(message_ids):
            yield reply
            if reply.metadata.message_type == MessageType.TRAIN:
                yield reply


def _with_values(reply: Message, value: float) -> Message:
    """Return the reply with all tensors filled with ``value``; without tensors, with an invalid number."""
    if wire.PAYLOAD not in reply.content:
        fields: Any = reply.content["fields"]
        fields.update({"num-examples": 10**9})
        return reply
    payload = wire.payload_of(reply.content, _ANYTHING)
    tensors = {
        name: torch.full_like(tensor, value) if tensor.is_floating_point() else tensor
        for name, tensor in payload.tensors.items()
    }
    try:
        reply.content[wire.PAYLOAD] = wire.to_arrays(Payload(tensors, payload.masks))
    except ValueError:  # the encoder rejects such values
        return malformed(reply)
    return reply


def malformed(reply: Message) -> Message:
    """Return the reply with bytes that no codec wrote."""
    data = b"\x93no codec wrote this" * 20
    reply.content[wire.PAYLOAD] = ArrayRecord({codec.KEY: Array("uint8", (len(data),), "fedprune.codec", data)})
    return reply


@contextmanager
def patient_clock() -> Iterator[SimpleNamespace]:
    """Measure deadlines on a clock that moves only while the server sleeps, so that a busy machine has no effect.

    Yields the clock, whose ``seconds`` may be set.
    """
    now = SimpleNamespace(seconds=0.0)

    def sleep(seconds: float) -> None:
        now.seconds += max(seconds, 1e-3)

    with mock.patch.object(exchange, "time", SimpleNamespace(monotonic=lambda: now.seconds, sleep=sleep)):
        yield now
