"""The server meets its clients here: each node is asked who it is, and clients that do not fit are left out.

This first exchange is also the warm-up that keeps the start of an engine out of the rounds' deadlines.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from fedprune_app.engine import wire
from fedprune_app.engine.exchange import POLL_SECONDS, Answer, TooFewReplies, exchange, message_to
from fedprune_app.federation.clients import ClientInfo, ImageClientInfo, Roster

log = logging.getLogger("flwr.fedprune")


def register_clients(
    grid: Grid,
    startup_seconds: float,
    run_key: str,
    kind: type[ClientInfo] = ImageClientInfo,
    *,
    least: int = 1,
    numbers: Mapping[int, int] | None = None,
    say: Callable[[str], None] = log.debug,
) -> tuple[Roster, list[str]]:
    """Ask every node who it is; return the clients by number, and why others are left out.

    The server waits for ``least`` nodes and tells ``say`` how many there are. A node with data of its own gets its
    number from the order of the node ids. ``numbers`` (node id to number) gives the numbers of a run that is resumed;
    other nodes are then not asked. The run is about what most clients say (:meth:`ClientInfo.common`); among equals
    the client of lowest number decides. A client is left out if it fails, says something else, or claims another's
    number.

    Raises :class:`TooFewReplies` with the first reason where fewer than ``least`` clients come or can start, and
    ``ValueError`` where as many clients contradict the others as not (:meth:`ClientInfo.contradicts`).
    """
    node_ids = _wait_for_nodes(grid, startup_seconds, least, numbers, say)
    numbers = numbers or {node: k for k, node in enumerate(node_ids)}
    found, errors = _introductions(grid, node_ids, startup_seconds, run_key, kind, numbers)
    if not found:
        raise TooFewReplies(f"no client could start: {errors[0]}")
    alike, unlike = _those_alike(found)
    errors += unlike
    claims = Counter(info.id for info in alike)
    clients = {info.id: info for info in alike if claims[info.id] == 1}
    for info in alike:
        if info.id not in clients:
            errors.append(f"node {info.node_id} and another claim partition-id {info.id}, allowed: one each")
    log_left_out(errors)
    if len(clients) < least:
        reason = f"; first reason: {errors[0]}" if errors else ""
        raise TooFewReplies(f"{len(clients)} of the {least} clients that the run waits for can take part{reason}")
    return clients, errors


def log_left_out(reasons: Iterable[str]) -> None:
    """Log why each of these clients takes no part in the run."""
    for reason in reasons:
        log.warning("a client is left out of the run: %s", reason)


def _introductions(
    grid: Grid,
    node_ids: Sequence[int],
    seconds: float,
    run_key: str,
    kind: type[ClientInfo],
    numbers: Mapping[int, int],
) -> tuple[list[ClientInfo], list[str]]:
    """Return what the nodes say of themselves, by number, and the reasons of those that say nothing usable."""

    def messages() -> Iterator[tuple[int, Message]]:
        for node in node_ids:
            request = wire.pack(None, {"round": 0, "run-key": run_key, "partition": numbers[node]})
            yield node, message_to(node, request, MessageType.QUERY, 0, seconds)

    found: list[ClientInfo] = []
    errors: list[str] = []
    for answer in exchange(grid, messages(), seconds):
        try:
            found.append(_read_info(answer, kind, numbers))
        except ValueError as error:
            errors.append(wire.one_line(str(error)))
    return sorted(found, key=lambda info: (info.id, info.node_id)), errors


def _read_info(answer: Answer, kind: type[ClientInfo], numbers: Mapping[int, int]) -> ClientInfo:
    """Read a node's answer. In this exchange the answer's ``client`` is the node's id."""
    if answer.content is None:
        raise ValueError(f"node {answer.client}: {answer.error}")
    info = kind.read(answer.client, wire.fields_of(answer.content))
    if info.own_data and info.id != numbers[info.node_id]:
        raise ValueError(f"node {info.node_id} says that it is {info.id}, allowed: its {numbers[info.node_id]}")
    return info


def _those_alike(found: Sequence[ClientInfo]) -> tuple[list[ClientInfo], list[str]]:
    """Return the clients that say what most say, and the reasons why the others cannot join them."""
    votes = Counter(info.common() for info in found)
    first = max(found, key=lambda info: votes[info.common()])  # the first of the most
    alike, errors = [], []
    for info in found:
        contradiction = info.contradicts(first)
        if contradiction and votes[info.common()] == votes[first.common()]:
            raise ValueError(contradiction)
        if reason := contradiction or info.unlike(first):
            errors.append(wire.one_line(f"client {info.id} is unlike most: {reason}"))
        else:
            alike.append(info)
    return alike, errors


def _wait_for_nodes(
    grid: Grid, seconds: float, least: int, known: Mapping[int, int] | None, say: Callable[[str], None]
) -> list[int]:
    """Return the ids of the connected nodes, if given only of those ``known``, as soon as there are ``least``."""
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
        time.sleep(POLL_SECONDS[1])
    connected = f"{before} of the {least} clients that the run waits for" if before else "no client"
    raise TooFewReplies(f"{connected} connected within startup-seconds = {seconds:g}")
