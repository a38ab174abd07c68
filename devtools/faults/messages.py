"""Messages go wrong on this grid: they are lost, late, doubled, corrupt, in another order, or answer another one.

A fault belongs to a round and a client, so a run that is resumed meets the same faults again. Faults are of two kinds:
those after which a client counts as one that did not answer, and those that must have no effect at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from typing import Any

from flwr.app import Error, Message, MessageType

from devtools.faults.story import Kind, Story
from fedprune_app import testing
from fedprune_app.core import rng
from fedprune_app.engine.flower_private import set_answered_id
from fedprune_app.engine.simulated_grid import InProcessGrid

_SHARE = 0.1  # of the messages go wrong
_JUMP_SECONDS = 1e6


class Fault(StrEnum):
    """What happens to a message that asks a client to train, or to its reply."""

    LOST = "the message is lost"
    REPLY_LOST = "the reply is lost"
    LATE = "the reply comes in the next exchange, too late"
    CORRUPT = "the reply is corrupt"
    ANOTHER = "the reply answers another message"
    TWICE = "the reply comes twice"
    AGAIN = "the reply comes again in the next exchange"
    LAST = "the reply comes after those of the others"
    OTHER_NODE = "the reply names another node as its source"
    CLOCK = "the server's clock jumps ahead while the client works"


SPOILS = frozenset({Fault.LOST, Fault.REPLY_LOST, Fault.LATE, Fault.CORRUPT, Fault.ANOTHER})
"""After these a client counts as one that did not answer; the others have no effect."""


def fault_of(messages: int, round: int, client: int) -> Fault | None:
    """Return what happens to the training message to a client in a round, by the draw ``messages``; 0 has no faults."""
    draw = rng.numpy_generator(messages, "bad message", client, round)
    if not messages or draw.random() >= _SHARE:
        return None
    return list(Fault)[draw.integers(len(Fault))]


def faulty_grid(
    messages: int, story: Story | None = None, jump: Callable[[float], None] = lambda seconds: None
) -> type[InProcessGrid]:
    """Return a grid on which messages go wrong as ``messages`` draws; ``jump`` sets the server's clock ahead."""
    told = story or Story()

    class Faulty(InProcessGrid):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self._kept: dict[str, Message] = {}  # replies that come in the next exchange, by the message's id

        def pull_messages(self, message_ids: Iterable[str]) -> Iterator[Message]:
            asked = list(message_ids)
            for message_id in self._kept.keys() - asked:  # of a message that nobody waits for any more
                yield self._kept.pop(message_id)
            last: list[Message] = []
            for message_id in asked:
                if (message := self._pending.get(message_id)) is None:
                    continue
                if message.metadata.message_type != MessageType.TRAIN:
                    yield from super().pull_messages([message_id])
                    continue
                client = int(self._contexts[message.metadata.dst_node_id].node_config["partition-id"])
                round = int(message.metadata.group_id)
                fault = fault_of(messages, round, client)
                told.tell(Kind.ASKED, "is asked to train", round, client)
                if fault is not None:
                    told.tell(Kind.MESSAGE, str(fault), round, client)
                came = list(self._answers(message_id, fault))
                if came and fault not in SPOILS:
                    told.tell(Kind.REPLIED, "has replied", round, client)
                if fault is Fault.LAST:
                    last += came
                else:
                    yield from came
            yield from last

        def _answers(self, message_id: str, fault: Fault | None) -> Iterator[Message]:
            if fault is Fault.LOST:
                self._pending.pop(message_id)
                return
            (reply,) = super().pull_messages([message_id])
            if fault in (Fault.LATE, Fault.AGAIN):
                self._kept[message_id] = reply
            if fault in (Fault.REPLY_LOST, Fault.LATE):
                return
            if fault is Fault.CLOCK:
                jump(_JUMP_SECONDS)
            if fault is Fault.CORRUPT and not reply.has_error():
                reply = testing.malformed(reply)
            elif fault is Fault.ANOTHER:
                set_answered_id(reply, "1")  # of the first query, long answered
            elif fault is Fault.OTHER_NODE:
                reply.metadata.__dict__["_src_node_id"] = next(iter(set(self._contexts) - {reply.metadata.src_node_id}))
            yield reply
            if fault is Fault.TWICE:
                yield reply

    return Faulty


def failing_grid(messages: int) -> type[InProcessGrid]:
    """Return a grid on which the clients of spoilt messages answer with an error, and no message goes wrong."""

    class Failing(InProcessGrid):
        def pull_messages(self, message_ids: Iterable[str]) -> Iterator[Message]:
            for message_id in message_ids:
                if (message := self._pending.get(message_id)) is None:
                    continue
                client = int(self._contexts[message.metadata.dst_node_id].node_config["partition-id"])
                is_training = message.metadata.message_type == MessageType.TRAIN
                if is_training and fault_of(messages, int(message.metadata.group_id), client) in SPOILS:
                    self._pending.pop(message_id)
                    reply = Message(Error(2, "ValueError: no"), reply_to=message)
                    set_answered_id(reply, message_id)
                    yield reply
                else:
                    yield from super().pull_messages([message_id])

    return Failing
