"""The values of a round: the run's context, the round and its log, messages and replies."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from flwr.app import ArrayRecord
from flwr.serverapp import Grid

from fedprune_app.config import Config
from fedprune_app.core.payload import Payload
from fedprune_app.engine import wire
from fedprune_app.engine.exchange import ReceivedReply
from fedprune_app.engine.store import START, ResumePoint, VersionedStore
from fedprune_app.federation.budgets import Budgets
from fedprune_app.federation.clients import Roster
from fedprune_app.results.metrics import Declarations
from fedprune_app.results.recorder import Recorder

log = logging.getLogger("flwr.fedprune")
_NOTE = 200  # characters of a note
_LOSS = 300  # characters of a reported loss


@dataclass(frozen=True)
class RunContext:
    """What a strategy knows of its run: settings, clients, recorder and checkpoints."""

    config: Config
    clients: Roster
    recorder: Recorder
    checkpoints: VersionedStore
    run_key: str  # names the run on the clients
    point: ResumePoint = START  # from which the run starts or resumes

    def mark_lost(self, client: int, text: str) -> None:
        """Record a loss in run.json: from now on the run's results may differ from those without the loss."""
        line = f"client {client}: {wire.one_line(text)[:_LOSS]}"
        if line not in (losses := list(self.recorder.info.get("losses", []))):
            self.recorder.annotate(losses=[*losses, line])


@dataclass(frozen=True)
class Channel:
    """Flower's grid, with the server's knowledge of the clients that every exchange needs."""

    grid: Grid
    context: RunContext
    budgets: Budgets
    state_rounds: dict[int, int]  # by client, the round of its last accepted update
    declarations: Declarations  # all metrics that replies of the system may report


@dataclass
class Reply:
    """What a client returned in a round, checked by :func:`fedprune_app.federation.exchanges.exchange`.

    ``update`` is the payload, and ``encoded`` its encoded form; both are freed before the next reply is fetched.
    ``fields`` are the named values. ``row`` are the client's columns, recorded if the reply counts. A secure sum of
    several clients' replies is one reply, of the client -1. Its ``rows`` have the columns of each client.
    """

    client: int
    num_examples: int
    exchange: str  # its name in the log
    is_late: bool = False
    update: Payload = field(default_factory=lambda: Payload({}))
    encoded: ArrayRecord | None = None
    fields: wire.Fields = field(default_factory=dict)
    row: dict[str, Any] = field(default_factory=dict)
    counts: bool = False  # whether it is neither late, rejected nor declined
    rows: dict[int, dict[str, Any]] = field(default_factory=dict)

    @property
    def by_client(self) -> dict[int, dict[str, Any]]:
        """The columns of each client whose reply this is."""
        return self.rows or {self.client: self.row}


@dataclass
class RoundLog:
    """Counts, failures, notes and columns of one round's exchanges so far."""

    failures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # losses that clients report
    declined: dict[int, str] = field(default_factory=dict)  # by client, the reason
    stragglers: int = 0
    replies: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    clients: dict[int, dict[str, Any]] = field(default_factory=dict)
    columns: dict[str, Any] = field(default_factory=dict)  # the system's own columns of the round

    def count(self, answer: ReceivedReply) -> dict[str, Any]:
        """Count the bytes of a reply in the round and in its client's row; return the row."""
        self.bytes_up += answer.bytes_up
        self.bytes_down += answer.bytes_down
        row = self.clients.setdefault(answer.client, {"bytes_up": 0, "bytes_down": 0})
        row["bytes_up"] += answer.bytes_up
        row["bytes_down"] += answer.bytes_down
        return row

    @contextmanager
    def rejecting(self, reply: Reply) -> Iterator[None]:
        """Reject ``reply`` if the block raises ``ValueError``, with the error as the reason."""
        try:
            yield
        except ValueError as error:
            reply.counts = False
            sender = reply.exchange if reply.rows else f"client {reply.client}"
            text = f"{sender}: {wire.one_line(str(error))}"
            self.failures.append(text)
            self.stragglers += reply.is_late
            log.warning("%s: %s", reply.exchange, text)

    def note(self, client: int, text: str) -> None:
        """Note, once, a client's loss or what is left out because of the client."""
        self.add_note(f"client {client}: {wire.one_line(text)[:_NOTE]}")

    def add_note(self, line: str) -> None:
        """Note a line on the round, once, and log it."""
        if line not in self.notes:
            self.notes.append(line)
            log.warning("%s", line)


@dataclass(frozen=True)
class Round:
    """The number of a round, from 1, and its clients in ascending order. ``log`` grows during the round."""

    number: int
    sampled: tuple[int, ...]  # drawn from those whose privacy budget allows the round
    dropped: tuple[int, ...] = ()  # sampled clients that drop out
    participants: tuple[int, ...] = ()  # clients that train
    evaluates: bool = False  # whether clients are evaluated after the round
    log: RoundLog = field(default_factory=RoundLog, compare=False)
    channel: Channel | None = field(default=None, compare=False, repr=False)  # None outside a run


@dataclass(frozen=True)
class OutgoingMessage:
    """A payload for one client, with other clients' encoded updates (by client) and named values.

    If messages in a row share one payload object, it is encoded only once.
    """

    client: int
    payload: Payload = field(default_factory=lambda: Payload({}))
    peer_updates: Mapping[int, ArrayRecord] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def to_each(cls, clients: Iterable[int], payload: Payload, **fields: Any) -> Iterator[OutgoingMessage]:
        """Yield messages with the same payload and named values for all of these clients."""
        return (cls(client, payload, fields=fields) for client in clients)
