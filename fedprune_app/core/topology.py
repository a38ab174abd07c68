"""A topology says from whom each client of a decentralised round receives models: index lists only, no messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Neighbours = dict[int, tuple[int, ...]]

TOPOLOGIES = {
    "random": "new every round: each client receives from a fixed number of others and sends to as many",
    "random-in": "new every round: each client draws its senders by itself, so some send far more than they receive",
    "ring": "the client before and the client after",
    "full": "all others",
    "exponential": "the clients 1, 2, 4, 8, ... places before",
    "file": "as an adjacency matrix says",
}


def neighbours(
    topology: str,
    clients: Sequence[int],
    active: Sequence[int],
    limit: int,
    rng: np.random.Generator,
    adjacency: NDArray[np.bool_] | None = None,
) -> Neighbours:
    """Return from whom each active client receives this round: sorted active clients, never the client itself.

    ``clients`` are all partition ids, in the order to which "ring", "exponential" and "file" refer. ``active`` are
    those that take part this round, in any order. The fixed topologies leave an inactive neighbour out. The random ones
    draw ``min(limit, len(active) - 1)`` among the active. The fixed ones use neither ``limit`` nor ``rng``.
    ``adjacency`` is for "file": bool (clients, clients). Its row k marks the clients from which client k receives; its
    diagonal is ignored.

    ``ValueError`` for an unknown topology, a negative limit, a client that is repeated or unknown, and for "file"
    without an adjacency of the right size.

    Source: Dis-PFL, section 4.1, bounds the links of the busiest node. "random" bounds these links in both directions.
    The authors' code draws "random-in", which bounds the downloads alone.

    >>> neighbours("ring", clients=range(4), active=[3, 0, 1], limit=2, rng=np.random.default_rng(0))
    {0: (1, 3), 1: (0,), 3: (0,)}
    """
    if topology not in TOPOLOGIES:
        raise ValueError(f"topology is '{topology}', allowed: {', '.join(TOPOLOGIES)}")
    if limit < 0:
        raise ValueError(f"limit of neighbours is {limit}, allowed: 0 or more")
    present, size = set(active), len(clients)
    if len(set(clients)) != size:
        raise ValueError(f"clients are {list(clients)}, allowed: each once")
    if not present <= set(clients):
        raise ValueError(f"active clients {sorted(present - set(clients))} are not among the {size} clients")
    members = [client for client in clients if client in present]  # the order of arrival must not matter
    if topology == "random":
        return _random_regular(members, limit, rng)
    if topology == "random-in":
        return _random_in(members, limit, rng)
    received = {}
    for place, client in enumerate(clients):
        if client not in present:
            continue
        places = _senders(topology, place, size, adjacency)
        received[client] = tuple(sorted({clients[p] for p in places if p != place} & present))
    return received


def _random_regular(members: Sequence[int], limit: int, rng: np.random.Generator) -> Neighbours:
    """Draw a circulant digraph under a random relabelling: place i receives from places i + s, s the distinct shifts.

    Each place also sends to one place per shift, so both degrees are exact without any retries.
    """
    size = len(members)
    order = rng.permutation(members).tolist()
    shifts = rng.permutation(np.arange(1, size))[:limit].tolist()
    placed = {client: tuple(sorted(order[(i + s) % size] for s in shifts)) for i, client in enumerate(order)}
    return {client: placed[client] for client in members}


def _random_in(members: Sequence[int], limit: int, rng: np.random.Generator) -> Neighbours:
    """Draw each client's senders by itself: in-degrees are exact, out-degrees random."""
    received = {}
    for client in members:
        others = [other for other in members if other != client]
        received[client] = tuple(sorted(rng.permutation(others)[:limit].tolist()))
    return received


def _senders(topology: str, place: int, size: int, adjacency: NDArray[np.bool_] | None) -> list[int]:
    """Return the places from which ``place`` receives in a fixed topology; the list may name ``place`` itself."""
    if topology == "ring":
        return [(place - 1) % size, (place + 1) % size]
    if topology == "exponential":
        return [(place - (1 << j)) % size for j in range((size - 1).bit_length())]  # 2^j < size
    if topology == "full":
        return list(range(size))
    if adjacency is None or adjacency.shape != (size, size):
        shape = "missing" if adjacency is None else f"of shape {adjacency.shape}"
        raise ValueError(f"adjacency for topology 'file' is {shape}, allowed: ({size}, {size})")
    return list(np.flatnonzero(adjacency[place]))


def read_adjacency(text: str, num_clients: int) -> NDArray[np.bool_]:
    r"""Read a bool (num_clients, num_clients) matrix from text: a line per row, 0 or 1 separated by blanks or commas.

    Row k marks the clients from which client k receives. ``#`` starts a comment. Blank lines do not count.
    ``ValueError`` naming the line for any other symbol, a row of another length, or another number of rows.

    >>> read_adjacency("0 1  # client 0 receives from client 1\n1,0", num_clients=2).tolist()
    [[False, True], [True, False]]
    """
    rows = []
    for number, line in enumerate(text.splitlines(), start=1):
        symbols = line.partition("#")[0].replace(",", " ").split()
        if not symbols:
            continue
        for symbol in symbols:
            if symbol not in ("0", "1"):
                raise ValueError(f"adjacency line {number} has {symbol[:20]!r}, allowed: 0 or 1")
        if len(symbols) != num_clients:
            raise ValueError(
                f"adjacency line {number} has {len(symbols)} entries, allowed: {num_clients}, one a client"
            )
        rows.append([symbol == "1" for symbol in symbols])
    if len(rows) != num_clients:
        raise ValueError(f"adjacency has {len(rows)} rows, allowed: {num_clients}")
    return np.array(rows, dtype=np.bool_).reshape(num_clients, num_clients)


def links(received: Mapping[int, Sequence[int]]) -> tuple[dict[int, int], dict[int, int]]:
    """Return in-degree and out-degree of every client that ``received`` names, as receiver or as sender.

    >>> links({0: (1, 3), 1: (0,), 3: (0,)})
    ({0: 2, 1: 1, 3: 1}, {0: 2, 1: 1, 3: 1})
    """
    sent = Counter(sender for senders in received.values() for sender in senders)
    names = sorted(received.keys() | sent.keys())
    return {name: len(received.get(name, ())) for name in names}, {name: sent[name] for name in names}
