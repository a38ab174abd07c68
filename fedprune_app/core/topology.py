"""Topologies: from which clients each client of a decentralised round receives models."""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

Neighbours = dict[int, tuple[int, ...]]

TOPOLOGIES = ("random", "random-in", "ring", "full", "exponential")


def neighbours(
    topology: str, clients: Sequence[int], active: Sequence[int], limit: int, rng: np.random.Generator
) -> Neighbours:
    """Return the senders of each active client this round: sorted active clients, never the client itself.

    ``clients`` are all partition ids, in the order that "ring" and "exponential" use. ``active`` are this round's
    participants, in any order. The fixed topologies omit inactive neighbours and use neither ``limit`` nor ``rng``. The
    random ones draw ``min(limit, len(active) - 1)`` of the active clients. ``ValueError`` for an unknown topology.

    Source: Dis-PFL, section 4.1, bounds the links of the busiest node. "random" bounds these links in both directions.
    The authors' code draws "random-in", which bounds the downloads alone.

    >>> neighbours("ring", clients=range(4), active=[3, 0, 1], limit=2, rng=np.random.default_rng(0))
    {0: (1, 3), 1: (0,), 3: (0,)}
    """
    if topology not in TOPOLOGIES:
        raise ValueError(f"topology is '{topology}', allowed: {', '.join(TOPOLOGIES)}")
    active_set, size = set(active), len(clients)
    members = [client for client in clients if client in active_set]  # independent of the order of arrival
    if topology == "random":
        return _random_regular(members, limit, rng)
    if topology == "random-in":
        return _random_in(members, limit, rng)
    senders_by_client = {}
    for place, client in enumerate(clients):
        if client not in active_set:
            continue
        places = _senders(topology, place, size)
        senders_by_client[client] = tuple(sorted({clients[p] for p in places if p != place} & active_set))
    return senders_by_client


def _random_regular(members: Sequence[int], limit: int, rng: np.random.Generator) -> Neighbours:
    """Draw a circulant digraph with random labels: place i receives from places i + s for distinct shifts s.

    Each place also sends to one place per shift, so both degrees are exact without any retries.
    """
    size = len(members)
    order = rng.permutation(members).tolist()
    shifts = rng.permutation(np.arange(1, size))[:limit].tolist()
    senders_by_client = {client: tuple(sorted(order[(i + s) % size] for s in shifts)) for i, client in enumerate(order)}
    return {client: senders_by_client[client] for client in members}


def _random_in(members: Sequence[int], limit: int, rng: np.random.Generator) -> Neighbours:
    senders_by_client = {}
    for client in members:
        candidates = [candidate for candidate in members if candidate != client]
        senders_by_client[client] = tuple(sorted(rng.permutation(candidates)[:limit].tolist()))
    return senders_by_client


def _senders(topology: str, place: int, size: int) -> list[int]:
    """Return the places from which ``place`` receives in a fixed topology, possibly including itself."""
    if topology == "ring":
        return [(place - 1) % size, (place + 1) % size]
    if topology == "exponential":
        return [(place - (1 << j)) % size for j in range((size - 1).bit_length())]  # 2^j < size
    return list(range(size))


def links(received: Mapping[int, Sequence[int]]) -> tuple[dict[int, int], dict[int, int]]:
    """Return in-degree and out-degree of every client in ``received``, as receiver or sender.

    >>> links({0: (1, 3), 1: (0,), 3: (0,)})
    ({0: 2, 1: 1, 3: 1}, {0: 2, 1: 1, 3: 1})
    """
    out_degrees = Counter(sender for senders in received.values() for sender in senders)
    names = sorted(received.keys() | out_degrees.keys())
    return {name: len(received.get(name, ())) for name in names}, {name: out_degrees[name] for name in names}
