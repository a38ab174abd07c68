"""Messages go wrong on this grid: they are lost, late, doubled, corrupt, in another order, or answer another one.

A fault belongs to a round and a client, so a run that is resumed meets the same faults again. Faults are of two kinds:
those after which a client counts as one that did not answer, and those that must have no effect at all. With secure
sums a fault belongs to one stage of one of the round's sums, too. A client that is lost between two sums ends the run,
and is there again when it is resumed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from flwr.app import Error, Message, MessageType

from devtools.faults.story import Kind, Story
from fedprune_app import testing
from fedprune_app.core import rng
from fedprune_app.engine import wire
from fedprune_app.engine.flower_private import set_answered_id
from fedprune_app.engine.secure_aggregation import AGREE, BODY, KEYS, OPEN, STAGE, STAGES
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


@dataclass(frozen=True)
class Place:
    """A stage of one of a round's secure sums, of which the first is 0."""

    sum: int
    stage: str

    @classmethod
    def drawn(cls, messages: int, round: int, client: int, sums: int) -> Place:
        """Return where the message to a client goes wrong in a round of so many sums, if it does."""
        draw = rng.numpy_generator(messages, "stage of a bad message", client, round)
        return cls(int(draw.integers(sums)), STAGES[draw.integers(len(STAGES))])

    @property
    def loses_addend(self) -> bool:
        """Return whether a client that is lost here is not in the sum."""
        return self.stage not in (AGREE, OPEN)

    @property
    def ends_run(self) -> bool:
        """Return whether a client that is lost here was counted in the sum before."""
        return self.loses_addend and self.sum > 0


def faulty_grid(
    messages: int,
    story: Story | None = None,
    jump: Callable[[float], None] = lambda seconds: None,
    sums: int = 0,
    ended: set[tuple[int, int]] | None = None,
) -> type[InProcessGrid]:
    """Return a grid on which messages go wrong as ``messages`` draws; ``jump`` sets the server's clock ahead.

    A round has so many secure ``sums``. ``ended`` are the rounds and clients of the faults that have ended a run, each
    of which happens once; without it none happens.
    """
    told = story or Story()

    class Faulty(InProcessGrid):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self._kept: dict[str, Message] = {}  # replies that come in the next exchange, by the message's id
            self._begun: Counter[tuple[int, int]] = Counter()  # secure sums, by round and client

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
                fault = self._fault_of(message, round, client)
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

        def _fault_of(self, message: Message, round: int, client: int) -> Fault | None:
            fault = fault_of(messages, round, client)
            if fault is None or not sums:
                return fault
            stage = wire.fields_of(message.content).get(STAGE)
            self._begun[round, client] += stage == KEYS
            place = Place.drawn(messages, round, client, sums)
            if place != Place(self._begun[round, client] - 1, str(stage)):
                return None
            if fault in SPOILS and place.ends_run:
                if ended is None or (round, client) in ended:
                    return None
                ended.add((round, client))
            return fault

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
                reply = _corrupted(reply)
            elif fault is Fault.ANOTHER:
                set_answered_id(reply, "1")  # of the first query, long answered
            elif fault is Fault.OTHER_NODE:
                reply.metadata.__dict__["_src_node_id"] = next(iter(set(self._contexts) - {reply.metadata.src_node_id}))
            yield reply
            if fault is Fault.TWICE:
                yield reply

    return Faulty


def _corrupted(reply: Message) -> Message:
    fields: Any = reply.content["fields"]
    if BODY not in fields:
        return testing.malformed(reply)
    fields[BODY] = fields[BODY][: len(fields[BODY]) // 2]
    return reply


def failing_grid(messages: int, sums: int = 0) -> type[InProcessGrid]:
    """Return a grid on which the clients of spoilt messages answer with an error, and no message goes wrong.

    With secure ``sums`` these are the clients that the first one leaves out.
    """

    def fails(round: int, client: int) -> bool:
        place = Place.drawn(messages, round, client, max(sums, 1))
        is_left_out = not sums or (place.loses_addend and not place.ends_run)
        return is_left_out and fault_of(messages, round, client) in SPOILS

    class Failing(InProcessGrid):
        def pull_messages(self, message_ids: Iterable[str]) -> Iterator[Message]:
            for message_id in message_ids:
                if (message := self._pending.get(message_id)) is None:
                    continue
                client = int(self._contexts[message.metadata.dst_node_id].node_config["partition-id"])
                is_training = message.metadata.message_type == MessageType.TRAIN
                if is_training and fails(int(message.metadata.group_id), client):
                    self._pending.pop(message_id)
                    reply = Message(Error(2, "ValueError: no"), reply_to=message)
                    set_answered_id(reply, message_id)
                    yield reply
                else:
                    yield from super().pull_messages([message_id])

    return Failing
