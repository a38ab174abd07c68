"""The values that travel through a round: the run's context, the round, what is sent, what is known of it."""

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
_LOSS = 300  # characters of what a client says it lost


@dataclass(frozen=True)
class RunContext:
    """Everything that a strategy has of the run beside its model: settings, clients, and where results are kept."""

    config: Config
    clients: Roster
    recorder: Recorder
    checkpoints: VersionedStore
    run_key: str  # names the run on the clients
    point: ResumePoint = START  # from which the run goes on

    def mark_lost(self, client: int, text: str) -> None:
        """Mark the run in run.json: from now on the run is not what it would have been without this loss."""
        line = f"client {client}: {wire.one_line(text)[:_LOSS]}"
        if line not in (losses := list(self.recorder.info.get("losses", []))):
            self.recorder.annotate(losses=[*losses, line])


@dataclass(frozen=True)
class Channel:
    """The server's way to the clients of a run, and what it has to know of them to send and receive."""

    grid: Grid
    context: RunContext
    budgets: Budgets
    state_rounds: dict[int, int]  # by client, the round of the last update that was received from it
    declarations: Declarations  # all numbers that replies of the system may report


@dataclass
class Reply:
    """A client's reply within a round; :func:`fedprune_app.federation.exchanges.exchange` has checked all of it.

    ``update`` is its payload, and ``encoded`` the same as it came; both last until the next reply is asked for.
    ``fields`` are its named values. ``row`` is what the record says of the client once the reply counts.
    """

    client: int
    num_examples: int
    exchange: str  # its name in the log
    is_late: bool = False
    update: Payload = field(default_factory=lambda: Payload({}))
    encoded: ArrayRecord | None = None
    fields: wire.Fields = field(default_factory=dict)
    row: dict[str, Any] = field(default_factory=dict)
    counts: bool = False  # whether it is neither late, refused nor declined


@dataclass
class RoundLog:
    """What is known so far of the exchanges of one round."""

    failures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # losses that clients report
    declined: dict[int, str] = field(default_factory=dict)  # by client: its privacy budget does not bear the round
    stragglers: int = 0
    replies: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    clients: dict[int, dict[str, Any]] = field(default_factory=dict)
    columns: dict[str, Any] = field(default_factory=dict)  # what the system itself records of the round

    def count(self, answer: ReceivedReply) -> dict[str, Any]:
        """Count the bytes of an answer; return the row of its client, in which they are counted too."""
        self.bytes_up += answer.bytes_up
        self.bytes_down += answer.bytes_down
        row = self.clients.setdefault(answer.client, {"bytes_up": 0, "bytes_down": 0})
        row["bytes_up"] += answer.bytes_up
        row["bytes_down"] += answer.bytes_down
        return row

    @contextmanager
    def rejecting(self, reply: Reply) -> Iterator[None]:
        """Leave out a reply for which the block raises ``ValueError``, with the error as the reason."""
        try:
            yield
        except ValueError as error:
            reply.counts = False
            text = f"client {reply.client}: {wire.one_line(str(error))}"
            self.failures.append(text)
            self.stragglers += reply.is_late
            log.warning("%s: %s", reply.exchange, text)

    def note(self, client: int, text: str) -> None:
        """Record, once, what a client lost or what was left out because of it."""
        self.add_note(f"client {client}: {wire.one_line(text)[:_NOTE]}")

    def add_note(self, line: str) -> None:
        """Record, once, a line on the round that its numbers do not tell, and log the line."""
        if line not in self.notes:
            self.notes.append(line)
            log.warning("%s", line)


@dataclass(frozen=True)
class Round:
    """One round: its number from 1, and its clients in ascending order. ``log`` grows while the round goes on."""

    number: int
    sampled: tuple[int, ...]  # drawn from those whose privacy budget bears the round
    dropped: tuple[int, ...] = ()  # of the sampled, those who drop out
    participants: tuple[int, ...] = ()  # who is asked to train
    evaluates: bool = False  # whether clients are evaluated after the round
    log: RoundLog = field(default_factory=RoundLog, compare=False)
    channel: Channel | None = field(default=None, compare=False, repr=False)  # None where nothing is exchanged


@dataclass(frozen=True)
class OutgoingMessage:
    """One message to a client: a payload, other clients' updates by client (encoded as they came), named values.

    A strategy that yields one payload object to several clients in a row has it encoded once.
    """

    client: int
    payload: Payload = field(default_factory=lambda: Payload({}))
    peer_updates: Mapping[int, ArrayRecord] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def to_each(cls, clients: Iterable[int], payload: Payload, **fields: Any) -> Iterator[OutgoingMessage]:
        """Yield one payload, and the same named values, for all of these clients."""
        return (cls(client, payload, fields=fields) for client in clients)
