"""The server meets its clients here: each node is asked who it is, and clients that do not fit are left out.

This first exchange is also the warm-up that keeps the start of an engine out of the rounds' deadlines.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from fedprune_app.engine import wire
from fedprune_app.engine.exchange import POLL_SECONDS, Answer, TooFewReplies, exchange, message_to
from fedprune_app.federation.clients import ClientInfo, ImageClientInfo, Roster

log = logging.getLogger("flwr.fedprune")
_AGAIN_SECONDS = 10.0


def register_clients(
    grid: Grid,
    startup_seconds: float,
    run_key: str,
    kind: type[ClientInfo] = ImageClientInfo,
    *,
    least: int = 1,
    numbers: Mapping[int, int] | None = None,
    ids: Collection[int] | None = None,
    say: Callable[[str], None] = log.debug,
) -> tuple[Roster, list[str]]:
    """Ask every node who it is; return the clients by number, and why others are left out.

    The server waits for ``least`` nodes and tells ``say`` how many there are. If fewer of them can take part, it also
    asks each node that comes until ``startup_seconds`` are over, and again those that it left out, which their
    operators may have mended. A node with data of its own gets its number from the order of the node ids. ``numbers``
    (node id to number) gives the numbers of a run that is resumed; other nodes are then not asked. ``ids`` are the
    clients of such a run, and any other client is left out. The run is about what most clients say
    (:meth:`ClientInfo.common`); among equals the client of lowest number decides. A client is left out if it fails,
    says something else, or claims another's number.

    Raises :class:`TooFewReplies` with the first reason where fewer than ``least`` clients come or can take part. Where
    none of the first ``least`` can start, the run itself is most likely wrong, so that is raised at once. Raises
    ``ValueError`` where as many clients contradict the others as not (:meth:`ClientInfo.contradicts`).
    """
    asked: dict[int, int] = {}  # the number of each node that was asked
    answers: dict[int, ClientInfo | str] = {}  # what each of them said of itself, or why that is not usable
    left_out: set[int] = set()
    clients: Roster = {}
    errors: list[str] = []
    told = ""
    for nodes, connected in _arrivals(grid, startup_seconds, least, numbers, left_out, say):
        for node in nodes:
            asked.setdefault(node, numbers[node] if numbers else len(asked))
        for node in left_out.difference(connected):  # its operator may have started it anew, with another id
            answers.pop(node, None)
        answers |= _introductions(grid, nodes, startup_seconds, run_key, kind, asked)
        found = [answer for answer in answers.values() if not isinstance(answer, str)]
        failures = [answer for answer in answers.values() if isinstance(answer, str)]
        if failures and not found:
            raise TooFewReplies(f"no client could start: {failures[0]}")
        before = errors
        clients, misfits = _those_that_fit(found, ids)
        errors = failures + misfits
        log_left_out(reason for reason in errors if reason not in before)
        if len(clients) >= least:
            return clients, errors
        left_out.clear()
        left_out.update(asked.keys() - {info.node_id for info in clients.values()})
        if told != (told := f"waiting for clients: {len(clients)} of {least} can take part"):
            _tell(told, say)
    reason = f"; first reason: {errors[0]}" if errors else ""
    raise TooFewReplies(f"{len(clients)} of the {least} clients that the run waits for can take part{reason}")


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
) -> dict[int, ClientInfo | str]:
    """Return by node what it says of itself, or why it says nothing usable."""

    def messages() -> Iterator[tuple[int, Message]]:
        for node in node_ids:
            request = wire.pack(None, {"round": 0, "run-key": run_key, "partition": numbers[node]})
            yield node, message_to(node, request, MessageType.QUERY, 0, seconds)

    answers: dict[int, ClientInfo | str] = {}
    for answer in exchange(grid, messages(), seconds):
        try:
            answers[answer.client] = _read_info(answer, kind, numbers)
        except ValueError as error:
            answers[answer.client] = wire.one_line(str(error))
    return answers


def _read_info(answer: Answer, kind: type[ClientInfo], numbers: Mapping[int, int]) -> ClientInfo:
    """Read a node's answer. In this exchange the answer's ``client`` is the node's id."""
    if answer.content is None:
        raise ValueError(f"node {answer.client}: {answer.error}{' (startup-seconds)' * answer.late}")
    info = kind.read(answer.client, wire.fields_of(answer.content))
    if info.own_data and info.id != numbers[info.node_id]:
        raise ValueError(f"node {info.node_id} says that it is {info.id}, allowed: its {numbers[info.node_id]}")
    return info


def _those_that_fit(found: Iterable[ClientInfo], ids: Collection[int] | None) -> tuple[Roster, list[str]]:
    """Return the clients that can take part, and the reasons why the others cannot."""
    errors = []
    candidates = []
    for info in sorted(found, key=lambda info: (info.id, info.node_id)):
        if ids is None or info.id in ids:
            candidates.append(info)
        else:
            errors.append(f"client {info.id} is no part of the run, allowed when resuming: the clients of run.json")
    alike, unlike = _those_alike(candidates)
    errors += unlike
    claims = Counter(info.id for info in alike)
    for info in alike:
        if claims[info.id] > 1:
            errors.append(f"node {info.node_id} and another claim partition-id {info.id}, allowed: one each")
    return {info.id: info for info in alike if claims[info.id] == 1}, errors


def _those_alike(found: Sequence[ClientInfo]) -> tuple[list[ClientInfo], list[str]]:
    """Return the clients that say what most say, and the reasons why the others cannot join them."""
    if not found:
        return [], []
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


def _arrivals(
    grid: Grid,
    seconds: float,
    least: int,
    known: Mapping[int, int] | None,
    left_out: Collection[int],
    say: Callable[[str], None],
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the ids of the nodes to ask, and of all that are connected.

    The first are asked as soon as there are ``least``, and then those that come later. Those ``left_out`` are asked
    again every :data:`_AGAIN_SECONDS`. If ``known`` is given, other nodes do not count. This ends when the time is
    over; in a simulation, where nobody mends a node, it ends when all nodes were yielded.
    """
    most = getattr(grid, "num_nodes", math.inf)
    deadline = time.monotonic() + seconds
    before = -1
    yielded: set[int] = set()
    while len(yielded) < (len(known) if known and most < math.inf else most):
        node_ids = sorted(node for node in grid.get_node_ids() if known is None or node in known)
        new = [node for node in node_ids if node not in yielded]
        if new and (yielded or len(new) >= least):
            yielded.update(new)
            yield new, node_ids
            again = time.monotonic() + _AGAIN_SECONDS
            continue
        if not yielded and len(node_ids) != before:
            before = len(node_ids)
            _tell(f"waiting for clients: {before} of {least} connected", say)
        if time.monotonic() > deadline:
            break
        if yielded and time.monotonic() > again:
            if perhaps_mended := [node for node in node_ids if node in left_out]:
                yield perhaps_mended, node_ids
            again = time.monotonic() + _AGAIN_SECONDS
        time.sleep(POLL_SECONDS[1])
    if not yielded:
        connected = f"{before} of the {least} clients that the run waits for" if before else "no client"
        raise TooFewReplies(f"{connected} connected within startup-seconds = {seconds:g}")


def _tell(text: str, say: Callable[[str], None]) -> None:
    log.info(text)
    say(text)
