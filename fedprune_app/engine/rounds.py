"""One exchange with many clients: push, pull in small batches, hand on each reply as it arrives, drop the late ones.

Flower's ``Grid.send_and_receive`` polls every three seconds and returns all replies together, so that the server holds
every client's model at once. Here a reply is yielded when it arrives and dropped when its consumer is done with it.
"""

from __future__ import annotations

import logging
import math
import reprlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fedprune_app.engine import replies, wire

log = logging.getLogger("flwr.fedprune")

IN_FLIGHT_BYTES = 2**30
_PUSH_BATCH = 16
_PUSH_BYTES = 64 * 2**20
_TTL_MARGIN_SECONDS = 10.0
_NAMES_SHOWN = 12
_MOST_VALUES = 2**24  # of an image
_MOST_OUTPUTS = 2**32  # an image's values times the classes: what a linear layer between them would hold
_MOST_LAYERS, _MOST_DOCUMENTS = 1024, 64  # that a client of text names
_POLL_SECONDS = (0.01, 0.25)  # the shortest pause between polls, and the longest
_POLL_SHARE = 0.05  # a reply is seen late by at most this share of the time it was waited for


class TooFewReplies(RuntimeError):
    """A round had fewer good replies than the configuration asks for; the message is one line for the user."""


@dataclass(frozen=True)
class Answer:
    """One client's part in an exchange: its reply's content, or why there is none."""

    partition: int
    bytes_down: int
    bytes_up: int = 0
    content: RecordDict | None = None
    error: str = ""
    late: bool = False


@dataclass(frozen=True)
class Peer:
    """What the server knows of one client, from its answer to the first query."""

    partition: int
    node_id: int
    num_examples: int
    capacity: float | None  # share of the model that its node can bear, where its operator says so
    own_data: bool  # it has data of its own, and its number from the server

    @classmethod
    def read(cls, node_id: int, fields: wire.Fields) -> Self:
        """From the fields of the answer. ``ValueError`` for one that cannot be."""
        return cls(
            partition=int(wire.number(fields, "partition", 0, 2**31)),
            node_id=node_id,
            num_examples=int(wire.number(fields, "num-examples", 1, 2**31)),
            capacity=float(wire.number(fields, "capacity", 1e-9, 1)) if "capacity" in fields else None,
            own_data=fields.get("own-data") is True,
            **cls.facts(fields),
        )

    @classmethod
    def facts(cls, fields: wire.Fields) -> dict[str, Any]:
        """What else a kind of peer says of itself."""
        return {}

    def description(self) -> dict[str, Any]:
        """What the client holds, for run.json."""
        return {}

    def common(self) -> tuple[Any, ...]:
        """What all clients of a run must say alike."""
        return (self.own_data,)

    def unlike(self, first: Peer) -> str:
        """Why this client cannot take part in a run with the ``first`` one; empty if it can."""
        return ""

    def contradicts(self, first: Peer) -> str:
        """Why there can be no run with both, if as many are like the one as like the other; empty if there can."""
        if self.own_data == first.own_data:
            return ""
        own, dealt = (self, first) if self.own_data else (first, self)
        return (
            f"node {own.node_id} has data of its own and node {dealt.node_id} partition-id {dealt.partition}, "
            "allowed: partition-ids on all nodes or on none"
        )


@dataclass(frozen=True)
class ImagePeer(Peer):
    """A client that classifies images."""

    image_shape: tuple[int, int, int]
    num_classes: int
    label_counts: Mapping[str, list[int]] = field(default_factory=dict)
    classes: tuple[str, ...] = ()  # of its own data, their names
    data_dir: str = ""

    @classmethod
    def facts(cls, fields: wire.Fields) -> dict[str, Any]:
        shape = fields.get("image-shape")
        sizes = shape if isinstance(shape, list) else []
        if not (len(sizes) == 3 and all(type(n) is int and 0 < n <= 4096 for n in sizes)):
            raise ValueError(f"field 'image-shape' is {reprlib.repr(shape)}, allowed: three sizes")
        num_classes = int(wire.number(fields, "num-classes", 2, 10**6))
        if math.prod(sizes) > _MOST_VALUES or math.prod(sizes) * num_classes > _MOST_OUTPUTS:
            allowed = f"at most {_MOST_VALUES} values, {_MOST_OUTPUTS} times the classes"
            raise ValueError(f"field 'image-shape' is {sizes!r} with {num_classes} classes, allowed: {allowed}")
        counts = {}
        for part in ("train", "validation", "test"):
            values = fields.get(f"labels-{part}", [])
            is_list = isinstance(values, list) and len(values) in (0, num_classes)
            if not (is_list and all(type(n) is int and 0 <= n < 2**53 for n in values)):
                raise ValueError(f"field 'labels-{part}' is {reprlib.repr(values)}, allowed: counts per class")
            counts[part] = list(values)
        classes = fields.get("classes", [])
        is_list = isinstance(classes, list) and len(classes) in (0, num_classes)
        if not (is_list and all(isinstance(name, str) and len(name) <= 256 for name in classes)):
            raise ValueError(f"field 'classes' is {reprlib.repr(classes)}, allowed: a name per class")
        return {
            "image_shape": (sizes[0], sizes[1], sizes[2]),
            "num_classes": num_classes,
            "label_counts": counts,
            "classes": tuple(classes),
            "data_dir": str(fields.get("data-dir", ""))[:1024],
        }

    def common(self) -> tuple[Any, ...]:
        return (self.own_data, self.own_data and self.classes, self.image_shape, self.num_classes)

    def description(self) -> dict[str, Any]:
        return dict(self.label_counts)

    def contradicts(self, first: Peer) -> str:
        assert isinstance(first, ImagePeer)
        if not (self.own_data and first.own_data):
            return super().contradicts(first)
        if self.classes == first.classes:
            return ""
        here, there = sorted({*self.classes} - {*first.classes}), sorted({*first.classes} - {*self.classes})
        return (
            f"{first._place()} has the classes {_listed(first.classes)}; {self._place()} lacks {_listed(there)} and "
            f"has {_listed(here)} besides; allowed: the same on all nodes (a class's folder may be empty), or the key "
            "classes"
        )

    def _place(self) -> str:
        return f"node {self.node_id}, data-dir {self.data_dir!r},"

    def unlike(self, first: Peer) -> str:
        assert isinstance(first, ImagePeer)
        if (self.image_shape, self.num_classes) == (first.image_shape, first.num_classes):
            return ""
        there = f"{first.image_shape} of {first.num_classes}"
        return f"has images {self.image_shape} of {self.num_classes} classes, allowed: as most have, {there}"


@dataclass(frozen=True)
class TextPeer(Peer):
    """A client that holds text and a language model; ``num_examples`` counts its calibration segments.

    Whether the model is the right one, the strategy knows, which has it.
    """

    shell_digest: str
    layer_digests: tuple[str, ...]
    documents: tuple[str, ...] = ()

    @classmethod
    def facts(cls, fields: wire.Fields) -> dict[str, Any]:
        digests, documents = fields.get("layer-digests", ()), fields.get("documents", [])
        for name, values, most in (("layer-digests", digests, _MOST_LAYERS), ("documents", documents, _MOST_DOCUMENTS)):
            if not (isinstance(values, list) and len(values) <= most) or not all(
                isinstance(v, str) and len(v) <= 256 for v in values
            ):
                raise ValueError(f"field '{name}' is {reprlib.repr(values)}, allowed: at most {most} texts")
        return {
            "shell_digest": str(fields.get("shell-digest"))[:256],
            "layer_digests": tuple(digests),
            "documents": tuple(documents),
        }

    def description(self) -> dict[str, Any]:
        return {"segments": self.num_examples, "documents": list(self.documents)}


Roster = dict[int, Peer]  # by partition id, ascending: Flower's node ids are random and unordered


@dataclass(frozen=True)
class _Sent:
    partition: int
    num_bytes: int
    deadline: float


def exchange(
    grid: Grid,
    messages: Iterable[tuple[int, Message]],
    deadline_seconds: float,
    in_flight_bytes: int = IN_FLIGHT_BYTES,
    reply_bytes: int = 0,
) -> Iterator[Answer]:
    """Send ``messages`` (partition, message) and yield an :class:`Answer` for each, in order of arrival.

    A client that has not replied ``deadline_seconds`` after its message was sent is yielded as late; its reply, should
    it still come, is never fetched. Each reply is handed on before the next is looked at. Messages are made when they
    are sent: while those on their way weigh more than ``in_flight_bytes``, the next one waits for a reply. Replies hold
    tensors of up to ``reply_bytes``; those of more than that and ``replies.FRAMING_BYTES`` are refused, unread.
    """
    queue = iter(messages)
    waiting: dict[str, _Sent] = {}  # by message id
    in_flight, largest = 0, reply_bytes
    all_sent = False
    last_arrival = time.monotonic()
    while waiting or not all_sent:
        while not all_sent and in_flight < in_flight_bytes:
            batch = _next_batch(queue, in_flight_bytes - in_flight)
            all_sent = not batch
            accepted = {str(message_id) for message_id in grid.push_messages([m for _, m, _ in batch]) if message_id}
            deadline = time.monotonic() + deadline_seconds
            for partition, message, num_bytes in batch:
                if message.metadata.message_id in accepted:
                    waiting[message.metadata.message_id] = _Sent(partition, num_bytes, deadline)
                    in_flight += num_bytes
                    largest = max(largest, num_bytes)
                else:
                    yield Answer(partition, 0, error="its node did not accept the message")
                del message  # it has left
            batch.clear()

        arrived = False
        asked_at = time.monotonic()  # what comes while the replies before it are taken in is not late
        deadlines = {message_id: sent.deadline for message_id, sent in waiting.items()}
        for reply in replies.arrived(grid, deadlines, largest, reply_bytes + replies.FRAMING_BYTES):
            sent = waiting.pop(reply.message_id, None)
            if sent is None:
                continue  # a second reply to the same message
            arrived = True
            in_flight -= sent.num_bytes
            yield Answer(sent.partition, sent.num_bytes, reply.num_bytes, reply.content, reply.error)
            del reply  # it is done with before the next is fetched
        now = time.monotonic()
        for message_id in [message_id for message_id, sent in waiting.items() if sent.deadline <= asked_at]:
            sent = waiting.pop(message_id)
            in_flight -= sent.num_bytes
            yield Answer(sent.partition, sent.num_bytes, error=f"no reply in {deadline_seconds:g} s", late=True)
        if arrived:
            last_arrival = now
        elif waiting:
            shortest, longest = _POLL_SECONDS
            pause = min(max(shortest, _POLL_SHARE * (now - last_arrival)), longest)
            nearest = min(sent.deadline for sent in waiting.values())
            time.sleep(min(pause, max(0.0, nearest - now)))


def _next_batch(queue: Iterator[tuple[int, Message]], room: int) -> list[tuple[int, Message, int]]:
    """(partition, message, bytes) of the next messages to push: at least one if any is left, not too many at once."""
    batch = []
    total = 0
    for partition, message in queue:
        num_bytes = wire.num_bytes(message.content)
        batch.append((partition, message, num_bytes))
        total += num_bytes
        if len(batch) == _PUSH_BATCH or total >= min(room, _PUSH_BYTES):
            break
    return batch


def message_to(peer_node: int, content: RecordDict, kind: str, round: int, deadline_seconds: float) -> Message:
    """The one place where a message to a client is made; its time to live keeps work nobody waits for from starting.

    It outlives the deadline a little: who is late is ours to say, not the SuperLink's.
    """
    ttl = deadline_seconds + _TTL_MARGIN_SECONDS
    return Message(content, dst_node_id=peer_node, message_type=kind, group_id=str(round), ttl=ttl)


def gather_roster(
    grid: Grid,
    startup_seconds: float,
    run_key: str,
    kind: type[Peer] = ImagePeer,
    *,
    least: int = 1,
    numbers: Mapping[int, int] | None = None,
    say: Callable[[str], None] = log.debug,
) -> tuple[Roster, list[str]]:
    """Ask every node who it is. Also the warm-up that keeps engine start-up out of the rounds' deadlines.

    Waits for ``least`` nodes, and ``say``s how many there are. Clients with data of their own are numbered by the order
    of their node ids, or as in ``numbers`` (node id to partition), and other nodes are then not asked. Raises
    :class:`TooFewReplies` when fewer than ``least`` come or can start, with the first reason given, and ``ValueError``
    where as many contradict the others as not (:meth:`Peer.contradicts`). What most say is what the run is about
    (:meth:`Peer.common`; among equals what the lowest partition says). Nodes that fail, say something else, or claim
    the same partition are left out of the run; the reasons are returned beside the roster.
    """
    node_ids = _wait_for_nodes(grid, startup_seconds, least, numbers, say)
    numbers = numbers or {node: k for k, node in enumerate(node_ids)}

    def messages() -> Iterator[tuple[int, Message]]:
        for node in node_ids:
            request = wire.pack(None, {"round": 0, "run-key": run_key, "partition": numbers[node]})
            yield node, message_to(node, request, MessageType.QUERY, 0, startup_seconds)

    found: list[Peer] = []
    errors: list[str] = []
    for answer in exchange(grid, messages(), startup_seconds):
        try:
            found.append(_read_peer(answer, kind, numbers))
        except ValueError as error:
            errors.append(wire.one_line(str(error)))
    if not found:
        raise TooFewReplies(f"no client could start: {errors[0]}")
    found.sort(key=lambda peer: (peer.partition, peer.node_id))
    votes = Counter(peer.common() for peer in found)
    first = max(found, key=lambda peer: votes[peer.common()])  # the first of the most
    alike = []
    for peer in found:
        contradiction = peer.contradicts(first)
        if contradiction and votes[peer.common()] == votes[first.common()]:
            raise ValueError(contradiction)
        if reason := contradiction or peer.unlike(first):
            errors.append(wire.one_line(f"client {peer.partition} is unlike most: {reason}"))
        else:
            alike.append(peer)
    claims = Counter(peer.partition for peer in alike)
    peers = {peer.partition: peer for peer in alike if claims[peer.partition] == 1}
    for peer in alike:
        if peer.partition not in peers:
            errors.append(f"node {peer.node_id} and another claim partition-id {peer.partition}, allowed: one each")
    say_left_out(errors)
    if len(peers) < least:
        reason = f"; first reason: {errors[0]}" if errors else ""
        raise TooFewReplies(f"{len(peers)} of the {least} clients that the run waits for can take part{reason}")
    return peers, errors


def say_left_out(reasons: Iterable[str]) -> None:
    """Log why each of these clients takes no part in the run."""
    for reason in reasons:
        log.warning("a client is left out of the run: %s", reason)


def _wait_for_nodes(
    grid: Grid, seconds: float, least: int, known: Mapping[int, int] | None, say: Callable[[str], None]
) -> list[int]:
    """The ids of the connected nodes, of those ``known`` where these are given, as soon as there are ``least``."""
    deadline = time.monotonic() + seconds
    before = -1
    while True:
        node_ids = sorted(node for node in grid.get_node_ids() if known is None or node in known)
        if len(node_ids) >= least:
            return node_ids
        if len(node_ids) != before:
            before = len(node_ids)
            text = f"waiting for clients: {before} of {least} connected"
            log.info(text)
            say(text)
        if time.monotonic() > deadline:
            break
        time.sleep(_POLL_SECONDS[1])
    connected = f"{before} of the {least} clients that the run waits for" if before else "no client"
    raise TooFewReplies(f"{connected} connected within startup-seconds = {seconds:g}")


def _listed(names: Sequence[str]) -> str:
    """The first few names, as prose."""
    shown = ", ".join(repr(name) for name in names[:_NAMES_SHOWN])
    more = len(names) - _NAMES_SHOWN
    return (shown + (f" and {more} more" if more > 0 else "")) or "none"


def _read_peer(answer: Answer, kind: type[Peer], numbers: Mapping[int, int]) -> Peer:
    """What a node says of itself; in this exchange an answer's ``partition`` is the node's id."""
    if answer.content is None:
        raise ValueError(answer.error)
    peer = kind.read(answer.partition, wire.fields_of(answer.content))
    if peer.own_data and peer.partition != numbers[peer.node_id]:
        raise ValueError(f"node {peer.node_id} says that it is {peer.partition}, allowed: its {numbers[peer.node_id]}")
    return peer


def require(good: int, least: int, what: str, failures: Iterable[str]) -> None:
    """Raise :class:`TooFewReplies` unless at least ``least`` replies were good, quoting the first failure."""
    if good < least:
        first = next(iter(failures), "no client was asked")
        raise TooFewReplies(f"{what} had {good} good replies, min-replies asks for {least}; first failure: {first}")
