"""The server meets its clients here: each node is asked who it is, and clients that do not fit are left out.

This first exchange is also the warm-up that keeps the start of an engine out of the rounds' deadlines.
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from fedprune_app.engine import wire
from fedprune_app.engine.exchange import POLL_SECONDS, TooFewReplies, message_to, send_and_receive
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
    say: Callable[[str], None] = log.debug,
) -> tuple[Roster, list[str]]:
    """Ask every node who it is; return the clients by number, and why others are left out.

    The server waits for ``min_clients`` nodes and tells ``say`` how many there are. If fewer of them can take part, it
    also asks each node that comes until ``startup_seconds`` are over, and again those that it left out, which their
    operators may have mended. A node with data of its own gets its number from the order of the node ids. ``numbers``
    (node id to number) gives the numbers of a run that is resumed; other nodes are then not asked. ``ids`` are the
    clients of such a run, and any other client is left out. The run is about what most clients say
    (:meth:`ClientInfo.common`). A client is left out if it fails, says something else, or claims another's number.

    Raises :class:`TooFewReplies` with the first reason where fewer than ``min_clients`` come or can take part. Where
    none of the first ``min_clients`` can start, the run itself is most likely wrong, so that is raised at once. Raises
    ``ValueError`` where as many clients differ from the others as not (:meth:`ClientInfo.difference`).
    """
    num_nodes = getattr(grid, "num_nodes", math.inf)  # in a simulation nobody comes later
    deadline, next_time = time.monotonic() + startup_seconds, 0.0
    number_by_node: dict[int, int] = {}  # the number of each node that was asked
    answers: dict[int, ClientInfo | str] = {}  # what each of them said of itself, or why that is not usable
    clients: Roster = {}
    errors: list[str] = []
    status = ""
    while True:
        connected = sorted(node for node in grid.get_node_ids() if numbers is None or node in numbers)
        accepted = {info.node_id for info in clients.values()}
        candidates = [node for node in connected if node not in accepted]
        is_time = time.monotonic() > next_time or not number_by_node.keys() >= set(candidates)
        if not number_by_node and len(connected) < min_clients:
            status = _tell(f"waiting for clients: {len(connected)} of {min_clients} connected", status, say)
        elif candidates and is_time:
            for node in candidates:
                number_by_node.setdefault(node, numbers[node] if numbers else len(number_by_node))
            # an operator may have started a node anew, with another id
            answers = {node: answer for node, answer in answers.items() if node in accepted or node in connected}
            answers |= _introductions(grid, candidates, startup_seconds, run_key, kind, number_by_node)
            infos = [answer for answer in answers.values() if not isinstance(answer, str)]
            failures = [answer for answer in answers.values() if isinstance(answer, str)]
            if failures and not infos:
                raise TooFewReplies(f"no client could start: {failures[0]}")
            previous_errors = errors
            clients, misfits = _select_clients(infos, ids)
            errors = failures + misfits
            log_left_out(reason for reason in errors if reason not in previous_errors)
            if len(clients) >= min_clients:
                return clients, errors
            status = _tell(f"waiting for clients: {len(clients)} of {min_clients} can take part", status, say)
            next_time = time.monotonic() + _AGAIN_SECONDS
        if time.monotonic() > deadline or len(number_by_node) >= num_nodes:
            break
        time.sleep(POLL_SECONDS[1])
    if not number_by_node:
        raise TooFewReplies(
            f"{len(connected)} of the {min_clients} clients that the run waits for connected within "
            f"startup-seconds = {startup_seconds:g}"
        )
    reason = f"; first reason: {errors[0]}" if errors else ""
    raise TooFewReplies(f"{len(clients)} of the {min_clients} clients that the run waits for can take part{reason}")


def log_left_out(reasons: Iterable[str]) -> None:
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

    def messages() -> Iterator[tuple[int, Message]]:
        for node in node_ids:
            request = wire.pack(None, {"round": 0, "run-key": run_key, "partition": numbers[node]})
            yield node, message_to(node, request, MessageType.QUERY, 0, seconds)

    answers: dict[int, ClientInfo | str] = {}
    for answer in send_and_receive(grid, messages(), seconds):
        node = answer.client
        try:
            if answer.content is None:
                raise ValueError(f"node {node}: {answer.error}{' (startup-seconds)' * answer.late}")
            info = kind.read(node, wire.fields_of(answer.content))
            if info.own_data and info.id != numbers[node]:
                raise ValueError(f"node {node} says that it is {info.id}, allowed: its {numbers[node]}")
            answers[node] = info
        except ValueError as error:
            answers[node] = wire.one_line(str(error))
    return answers


def _select_clients(infos: Iterable[ClientInfo], ids: Collection[int] | None) -> tuple[Roster, list[str]]:
    errors = []
    candidates = []
    for info in sorted(infos, key=lambda info: (info.id, info.node_id)):
        if ids is None or info.id in ids:
            candidates.append(info)
        else:
            errors.append(f"client {info.id} is no part of the run, allowed when resuming: the clients of run.json")
    members, misfits = _select_majority(candidates)
    errors += misfits
    claims = Counter(info.id for info in members)
    for info in members:
        if claims[info.id] > 1:
            errors.append(f"node {info.node_id} and another claim partition-id {info.id}, allowed: one each")
    return {info.id: info for info in members if claims[info.id] == 1}, errors


def _select_majority(infos: Sequence[ClientInfo]) -> tuple[list[ClientInfo], list[str]]:
    """Return the clients that say what most say, and the reasons why the others cannot join them."""
    if not infos:
        return [], []
    votes = Counter(info.common() for info in infos)
    first = max(infos, key=lambda info: votes[info.common()])  # the first of the most
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


def _tell(text: str, last: str, say: Callable[[str], None]) -> str:
    if text != last:
        log.info(text)
        say(text)
    return text
