"""How far the masks of clients are apart: of a model at once, or layer by layer and over a whole round."""

import itertools
from typing import Any

import numpy as np

from fedprune_app.core.payload import Payload


class MaskDistances:
    """Mask distances hold the clients' masks of the layer in work, and count the entries that differ so far."""

    def __init__(self) -> None:
        self.masks: dict[int, np.ndarray[Any, Any]] = {}
        self.differing: dict[tuple[int, int], int] = {}  # by pair of clients, entries of all layers so far

    def add(self, client: int, update: Payload) -> None:
        flat = np.concatenate([update.masks[name].numpy().reshape(-1) for name in sorted(update.masks)])
        bits = np.packbits(flat)
        self.masks[client] = np.pad(bits, (0, -len(bits) % 8)).view(np.uint64)  # bits are counted 64 at a time

    def close_layer(self, num_entries: int) -> float | None:
        """Return the mean share of a layer's entries that one client keeps and another does not; None of one client."""
        shares = []
        for a, b in itertools.combinations(sorted(self.masks), 2):
            num_differing = int(np.bitwise_count(self.masks[a] ^ self.masks[b]).sum(dtype=np.int64))
            self.differing[a, b] = self.differing.get((a, b), 0) + num_differing
            shares.append(num_differing / num_entries)
        self.masks = {}
        return sum(shares) / len(shares) if shares else None

    def clients(self) -> list[int]:
        return sorted({client for pair in self.differing for client in pair})

    def matrix(self, num_entries: int) -> np.ndarray[Any, Any]:
        """Return the distances of all pairs of :meth:`clients`, float64 (clients, clients), over so many entries."""
        clients = self.clients()
        distance = np.zeros((len(clients), len(clients)))
        for (i, a), (j, b) in itertools.combinations(enumerate(clients), 2):
            distance[i, j] = distance[j, i] = self.differing[a, b] / num_entries
        return distance
