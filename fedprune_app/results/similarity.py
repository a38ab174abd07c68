"""Distances between clients' masks, and their correlation with the similarity of labels (Dis-PFL's Figure 5)."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedprune_app.results.reader import Run

if TYPE_CHECKING:  # so that a report does not import torch
    from fedprune_app.core.payload import Payload


class MaskDistances:
    """Counts, layer by layer, the entries in which the masks of each two clients differ."""

    def __init__(self) -> None:
        self.masks: dict[int, np.ndarray[Any, Any]] = {}
        self.differing: dict[tuple[int, int], int] = {}  # by pair of clients, entries of all layers so far

    def add(self, client: int, update: Payload) -> None:
        flat = np.concatenate([update.masks[name].numpy().reshape(-1) for name in sorted(update.masks)])
        bits = np.packbits(flat)
        self.masks[client] = np.pad(bits, (0, -len(bits) % 8)).view(np.uint64)  # bits are counted 64 at a time

    def close_layer(self, num_entries: int) -> float | None:
        """Return the share of a layer's entries in which two masks differ, as a mean over pairs; None without pairs."""
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
        """Return the distances of all pairs of :meth:`clients`, float64 (clients, clients), over ``num_entries``."""
        clients = self.clients()
        distance = np.zeros((len(clients), len(clients)))
        for (i, a), (j, b) in itertools.combinations(enumerate(clients), 2):
            distance[i, j] = distance[j, i] = self.differing[a, b] / num_entries
        return distance


# --- similarity of labels ---------------------------------------------------------------------------------------------


Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Comparison:
    """Label similarity and mask distance of each two clients after ``round``, ordered by their most frequent label.

    ``label_cosine`` (K, K) is the cosine of their training label counts. ``mask_distance`` (K, K) is the Hamming
    distance of their masks. Both are in [0, 1]. ``pearson`` and ``spearman`` correlate the two over the K (K - 1) / 2
    pairs of different clients, and are None if undefined.
    """

    round: int
    clients: tuple[int, ...]
    label_cosine: Array
    mask_distance: Array
    pearson: float | None
    spearman: float | None


def compare(run: Run) -> Comparison | None:
    """Compare the clients of masks.json that have training examples.

    The result is None without masks, or with fewer than two such clients.
    """
    counts = {row["partition"]: row["train"] for row in run.info.get("partition") or () if any(row.get("train") or ())}
    if run.masks is None:
        return None
    indices = [i for i, client in enumerate(run.masks.clients) if client in counts]
    if len(indices) < 2:
        return None
    counts_in_order = [counts[run.masks.clients[i]] for i in indices]
    cosine = label_cosine(counts_in_order)
    distance = run.masks.distance[np.ix_(indices, indices)]
    pairs = np.triu_indices(len(indices), k=1)
    labels, masks = cosine[pairs], distance[pairs]
    order = np.argsort([np.argmax(label_counts) for label_counts in counts_in_order], kind="stable")
    return Comparison(
        run.masks.round,
        tuple(run.masks.clients[indices[i]] for i in order),
        cosine[np.ix_(order, order)],
        distance[np.ix_(order, order)],
        correlation(labels, masks),
        correlation(ranks(labels), ranks(masks)),
    )


def label_cosine(counts: list[list[int]]) -> Array:
    """Return the cosine similarity (K, K) of K clients' label counts; missing counts at a list's end are 0."""
    matrix = np.array(list(itertools.zip_longest(*counts, fillvalue=0)), dtype=np.float64).T
    unit = matrix / np.linalg.norm(matrix, axis=1, keepdims=True)
    cosine: Array = np.clip(unit @ unit.T, 0, 1)
    return cosine


def correlation(x: Array, y: Array) -> float | None:
    """Return Pearson's coefficient, or None for fewer than three values or a constant ``x`` or ``y``."""
    if len(x) < 3 or np.ptp(x) < 1e-9 or np.ptp(y) < 1e-9:
        return None
    return float(np.corrcoef(x, y)[0, 1])


def ranks(values: Array) -> Array:
    """Return ranks from 1; equal values share the mean of their ranks, as in Spearman's coefficient.

    Values are rounded to 1e-9 first, since equal cosines may differ in their last bits.
    """
    _, inverse, counts = np.unique(np.round(values, 9), return_inverse=True, return_counts=True)
    shared: Array = np.cumsum(counts) - (counts - 1) / 2
    return shared[inverse]
