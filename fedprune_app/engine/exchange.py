"""Exchanges with many clients: send messages, yield each reply as it arrives, and drop late clients.

Flower's ``Grid.send_and_receive`` polls every three seconds and returns all replies together, so the server holds every
client's model at once. Here a reply is yielded on arrival, and freed when the caller is done with it.
"""

import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedprune_app.engine import replies, wire
from fedprune_app.engine.flower_private import ObjectPushError

log = logging.getLogger("flwr.fedprune")

IN_FLIGHT_BYTES = 2**30
POLL_SECONDS = (0.01, 0.25)  # the shortest pause between polls, and the longest
_PUSH_BATCH = 16
_PUSH_BYTES = 64 * 2**20
_TTL_MARGIN_SECONDS = 10.0
_POLL_SHARE = 0.05  # polling delays a reply by at most this share of its time


class TooFewReplies(RuntimeError):
    """Raised for a round with fewer valid replies than the configuration requires; the message is one line."""


@dataclass(frozen=True)
class ReceivedReply:
    """One client's part in an exchange: the content of its reply, or why there is none."""

    client: int
    bytes_down: int
    bytes_up: int = 0
    content: RecordDict | None = None
    error: str = ""
    late: bool = False


@dataclass(frozen=True)
class _SentMessage:
    client: int
    num_bytes: int
    deadline: float


def send_and_receive(
    grid: Grid,
    messages: Iterable[tuple[int, Message]],
    deadline_seconds: float,
    in_flight_bytes: int = IN_FLIGHT_BYTES,
    reply_bytes: int = 0,
) -> Iterator[ReceivedReply]:
    """Send ``messages`` (client, message) and yield a :class:`ReceivedReply` for each, in order of arrival.

    A client without a reply ``deadline_seconds`` after its message was sent is yielded as late. In a simulation the
    time starts with the client's work (see :func:`_extend_deadlines`). Its later reply, if any, is never fetched. Each
    reply is yielded before the next one is read. A message is created when it is sent. While the messages in flight
    exceed ``in_flight_bytes``, the next one waits for a reply. Replies have tensors of up to ``reply_bytes``. A reply
    larger than that plus ``replies.FRAMING_BYTES`` is rejected unread.
    """
    queue = iter(messages)
    pending: dict[str, _SentMessage] = {}  # by message id
    in_flight, largest = 0, reply_bytes
    all_sent = False
    last_arrival = time.monotonic()
    while pending or not all_sent:
        while not all_sent and in_flight < in_flight_bytes:
            batch = _next_batch(queue, in_flight_bytes - in_flight)
            all_sent = not batch
            accepted_ids = _push(grid, [message for _, message, _ in batch])
            deadline = time.monotonic() + deadline_seconds
            for client, message, num_bytes in batch:
                if message.metadata.message_id in accepted_ids:
                    pending[message.metadata.message_id] = _SentMessage(client, num_bytes, deadline)
                    in_flight += num_bytes
                    largest = max(largest, num_bytes)
                else:
                    yield ReceivedReply(client, 0, error="its node did not accept the message")
                del message  # frees the memory of a sent message
            batch.clear()

        has_reply = False
        poll_start = time.monotonic()  # a reply that arrives while earlier ones are processed is not late
        pending = _extend_deadlines(grid, pending, deadline_seconds, poll_start)
        deadlines = {message_id: entry.deadline for message_id, entry in pending.items()}
        for reply in replies.arrived(grid, deadlines, largest, reply_bytes + replies.FRAMING_BYTES):
            entry = pending.pop(reply.message_id, None)
            if entry is None:
                continue  # a second reply to the same message
            has_reply = True
            in_flight -= entry.num_bytes
            yield ReceivedReply(entry.client, entry.num_bytes, reply.num_bytes, reply.content, reply.error)
            del reply  # frees its memory before the next reply is fetched
        now = time.monotonic()
        late_ids = [message_id for message_id, entry in pending.items() if entry.deadline <= poll_start]
        if late_ids and hasattr(grid, "discard"):
            grid.discard(late_ids)
        for message_id in late_ids:
            entry = pending.pop(message_id)
            in_flight -= entry.num_bytes
            yield ReceivedReply(entry.client, entry.num_bytes, error=f"no reply in {deadline_seconds:g} s", late=True)
        if has_reply:
            last_arrival = now
        elif pending:
            shortest, longest = POLL_SECONDS
            # a grid that can wait returns as soon as a reply arrives
            wait = getattr(grid, "wait_for_reply", time.sleep)
            wait(min(max(shortest, _POLL_SHARE * (now - last_arrival)), longest))


def _extend_deadlines(
    grid: Grid, pending: dict[str, _SentMessage], seconds: float, now: float
) -> dict[str, _SentMessage]:
    """Return ``pending`` with later deadlines for simulated clients that had to queue for a worker.

    A grid with such a queue reports when each working client began (``begun``, by message id): after the last reply of
    its cohort. A queued client keeps its full time as long as a client that is not late is working. So a worker that
    hangs makes no client wait forever.
    """
    if not hasattr(grid, "begun"):
        return pending
    begin_times: Mapping[str, float] = grid.begun()
    others_begin = -math.inf if begin_times.keys().isdisjoint(pending) else now
    return {
        message_id: replace(entry, deadline=max(entry.deadline, begin_times.get(message_id, others_begin) + seconds))
        for message_id, entry in pending.items()
    }


def _push(grid: Grid, messages: Sequence[Message]) -> set[str]:
    """Push messages and return the ids of the accepted ones.

    A SuperLink that was restarted in between does not know an upload that had begun. So the messages are pushed once
    more; it recognises those that it already has.
    """
    try:
        message_ids = grid.push_messages(messages)
    except ObjectPushError as error:
        log.warning("%s The messages are sent again.", error)
        message_ids = grid.push_messages(messages)
    return {str(message_id) for message_id in message_ids if message_id}


def _next_batch(queue: Iterator[tuple[int, Message]], room: int) -> list[tuple[int, Message, int]]:
    """Return (client, message, bytes) of the next messages to push: at least one if any is left, and not too many."""
    batch = []
    total = 0
    for client, message in queue:
        num_bytes = wire.num_bytes(message.content)
        batch.append((client, message, num_bytes))
        total += num_bytes
        if len(batch) == _PUSH_BATCH or total >= min(room, _PUSH_BYTES):
            break
    return batch


def message_to(node_id: int, content: RecordDict, kind: str, round: int, deadline_seconds: float) -> Message:
    """Create a message to a client; all messages are created here.

    The message's time to live keeps a client from starting work after the deadline. It exceeds the deadline a little:
    the server decides which client is late, not the SuperLink.
    """
    return Message(
        content,
        dst_node_id=node_id,
        message_type=kind,
        group_id=str(round),
        ttl=deadline_seconds + _TTL_MARGIN_SECONDS,
    )


def require(num_good: int, minimum: int, exchange_name: str, failures: Iterable[str]) -> None:
    """Raise :class:`TooFewReplies`, quoting the first failure, for fewer than ``minimum`` valid replies."""
    if num_good < minimum:
        first = next(iter(failures), "")
        failure_text = f"first failure: {first}" if first else "no reply failed: fewer clients were asked"
        raise TooFewReplies(
            f"{exchange_name} had {num_good} good replies, min-replies asks for {minimum}; {failure_text}"
        )
