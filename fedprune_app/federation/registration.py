"""Registration: each node reports its properties, and clients that do not match the others are left out.

This first exchange also warms the engine up, so that its start does not count in the rounds' deadlines.
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from fedprune_app.engine import wire
from fedprune_app.engine.exchange import POLL_SECONDS, ReceivedReply, TooFewReplies, message_to, send_and_receive
from fedprune_app.federation.clients import ClientInfo, ImageClientInfo, Roster

log = logging.getLogger("flwr.fedprune")
_AGAIN_SECONDS = 10.0


def register_clients(
    grid: Grid,
    startup_seconds: float,
    run_key: str,
    kind: type[ClientInfo] = ImageClientInfo,
    *,
    min_clients: int = 1,
    numbers: Mapping[int, int] | None = None,
    ids: Collection[int] | None = None,
    notify: Callable[[str], None] = log.debug,
) -> tuple[Roster, list[str]]:
    """Register every node; return the clients by number, and the reasons why others are left out.

    The server waits until ``min_clients`` nodes are connected, and calls ``notify`` with their number. If too few of
    them can take part, it also queries each node that connects within ``startup_seconds``, and repeats the query to
    those left out, which their operators may have repaired. A node with data of its own gets its number by the order of
    node ids. For a resumed run ``numbers`` (node id to number) has the numbers, and other nodes are not queried;
    ``ids`` are its clients, or those of ``only-clients``, and other clients are left out. The majority's properties
    (:meth:`ClientInfo.common`) are the run's. A client is left out if it fails, reports other properties, or claims
    another's number.

    Raises :class:`TooFewReplies` with the first reason if fewer than ``min_clients`` connect or can take part. If none
    of the first ``min_clients`` can start, the run's settings are most likely wrong: that is raised at once. Raises
    ``ValueError`` if clients are divided equally (:meth:`ClientInfo.difference`).
    """
    registration = _Registration(grid, startup_seconds, run_key, kind, min_clients, numbers, ids, notify)
    num_nodes = getattr(grid, "num_nodes", math.inf)  # fixed in a simulation: no node connects later
    deadline = time.monotonic() + startup_seconds
    while True:
        connected = registration.connected()
        if not registration.number_by_node and len(connected) < min_clients:
            registration.report(f"{len(connected)} of {min_clients} connected")
        elif nodes := registration.to_ask(connected):
            registration.ask(nodes, connected)
            if len(registration.clients) >= min_clients:
                return registration.clients, registration.errors
            registration.report(f"{len(registration.clients)} of {min_clients} can take part")
        if time.monotonic() > deadline or len(registration.number_by_node) >= num_nodes:
            raise registration.too_few(len(connected))
        time.sleep(POLL_SECONDS[1])


@dataclass
class _Registration:
    """State of the registration: the nodes' replies so far, and the clients selected from them."""

    grid: Grid
    seconds: float
    run_key: str
    kind: type[ClientInfo]
    min_clients: int
    numbers: Mapping[int, int] | None
    ids: Collection[int] | None
    notify: Callable[[str], None]
    number_by_node: dict[int, int] = field(default_factory=dict)  # of each queried node
    # by node, its properties, or why they are invalid
    answers: dict[int, ClientInfo | str] = field(default_factory=dict)
    clients: Roster = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    next_time: float = 0.0
    status: str = ""

    def connected(self) -> list[int]:
        return sorted(node for node in self.grid.get_node_ids() if self.numbers is None or node in self.numbers)

    def to_ask(self, connected: Iterable[int]) -> list[int]:
        """Return the nodes to query now: new ones, and from time to time those that were left out."""
        candidates = [node for node in connected if node not in self._accepted()]
        is_time = time.monotonic() > self.next_time or not self.number_by_node.keys() >= set(candidates)
        return candidates if is_time else []

    def ask(self, nodes: Sequence[int], connected: Collection[int]) -> None:
        """Query these nodes, and select the clients anew."""
        for node in nodes:
            self.number_by_node.setdefault(node, self.numbers[node] if self.numbers else len(self.number_by_node))
        # forget disconnected nodes: an operator may have restarted one, with another id
        known = {*self._accepted(), *connected}
        self.answers = {node: answer for node, answer in self.answers.items() if node in known}
        for answer in send_and_receive(self.grid, self._questions(nodes), self.seconds):
            self.answers[answer.client] = self._read(answer)
        infos = [answer for answer in self.answers.values() if not isinstance(answer, str)]
        failures = [answer for answer in self.answers.values() if isinstance(answer, str)]
        if failures and not infos:
            raise TooFewReplies(f"no client could start: {failures[0]}")
        previous_errors = self.errors
        self.clients, misfits = _select_clients(infos, self.ids)
        self.errors = failures + misfits
        log_left_out(reason for reason in self.errors if reason not in previous_errors)
        self.next_time = time.monotonic() + _AGAIN_SECONDS

    def report(self, text: str) -> None:
        status = f"waiting for clients: {text}"
        if status != self.status:
            log.info(status)
            self.notify(status)
        self.status = status

    def too_few(self, num_connected: int) -> TooFewReplies:
        expected = f"of the {self.min_clients} clients that the run waits for"
        if not self.number_by_node:
            return TooFewReplies(f"{num_connected} {expected} connected within startup-seconds = {self.seconds:g}")
        reason = f"; first reason: {self.errors[0]}" if self.errors else ""
        return TooFewReplies(f"{len(self.clients)} {expected} can take part{reason}")

    def _accepted(self) -> set[int]:
        return {info.node_id for info in self.clients.values()}

    def _questions(self, nodes: Iterable[int]) -> Iterator[tuple[int, Message]]:
        for node in nodes:
            fields = {"round": 0, "run-key": self.run_key, "partition": self.number_by_node[node]}
            yield node, message_to(node, wire.pack(None, fields), MessageType.QUERY, 0, self.seconds)

    def _read(self, answer: ReceivedReply) -> ClientInfo | str:
        node = answer.client
        try:
            if answer.content is None:
                raise ValueError(f"node {node}: {answer.error}{' (startup-seconds)' * answer.late}")
            info = self.kind.read(node, wire.fields_of(answer.content))
            if info.own_data and info.id != self.number_by_node[node]:
                raise ValueError(f"node {node} says that it is {info.id}, allowed: its {self.number_by_node[node]}")
            if 0 < info.num_partitions <= info.id:
                raise ValueError(f"node {node} says that it is {info.id}, allowed: below {info.num_partitions}")
        except ValueError as error:
            return wire.one_line(str(error))
        return info


def log_left_out(reasons: Iterable[str]) -> None:
    for reason in reasons:
        log.warning("a client is left out of the run: %s", reason)


def _select_clients(infos: Iterable[ClientInfo], ids: Collection[int] | None) -> tuple[Roster, list[str]]:
    errors = []
    candidates = []
    for info in sorted(infos, key=lambda info: (info.id, info.node_id)):
        if ids is None or info.id in ids:
            candidates.append(info)
        else:
            errors.append(f"client {info.id} is no part of the run, allowed: only-clients, or when resuming run.json's")
    members, misfits = _select_majority(candidates)
    errors += misfits
    claims = Counter(info.id for info in members)
    for info in members:
        if claims[info.id] > 1:
            errors.append(f"node {info.node_id} and another claim partition-id {info.id}, allowed: one each")
    return {info.id: info for info in members if claims[info.id] == 1}, errors


def _select_majority(infos: Sequence[ClientInfo]) -> tuple[list[ClientInfo], list[str]]:
    """Return the clients with the majority's properties, and the reasons why the others cannot join them."""
    if not infos:
        return [], []
    votes = Counter(info.common() for info in infos)
    first = max(infos, key=lambda info: votes[info.common()])  # the majority's first client
    members, errors = [], []
    for info in infos:
        difference = info.difference(first)
        if difference and votes[info.common()] == votes[first.common()]:
            raise ValueError(difference)
        if difference:
            errors.append(wire.one_line(f"client {info.id} is unlike most: {difference}"))
        else:
            members.append(info)
    return members, errors
