"""Do clients with alike labels get alike masks? Dis-PFL's Figure 5 answers with two matrices and their correlation."""

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedprune_app.results.reader import Run

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Comparison:
    """A comparison has the clients' similarities, pair by pair, after ``round``, ordered by their most frequent label.

    ``label_cosine`` (K, K) is the cosine of their training label counts. ``mask_distance`` (K, K) is the Hamming
    distance of their masks. Both are in [0, 1]. ``pearson`` and ``spearman`` correlate the two over the K (K - 1) / 2
    pairs of different clients, and are None where that is undefined.
    """

    round: int
    clients: tuple[int, ...]
    label_cosine: Array
    mask_distance: Array
    pearson: float | None
    spearman: float | None


def compare(run: Run) -> Comparison | None:
    """Compare the clients of masks.json that have training examples.

    The result is None where there are no masks, or fewer than two such clients.
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
    """Return the cosine similarity (K, K) of K clients' label counts; a shorter list has none of the later classes."""
    matrix = np.array(list(itertools.zip_longest(*counts, fillvalue=0)), dtype=np.float64).T
    unit = matrix / np.linalg.norm(matrix, axis=1, keepdims=True)
    cosine: Array = np.clip(unit @ unit.T, 0, 1)
    return cosine


def correlation(x: Array, y: Array) -> float | None:
    """Return Pearson's coefficient, or None for fewer than three values and where one of the two never varies."""
    if len(x) < 3 or np.ptp(x) < 1e-9 or np.ptp(y) < 1e-9:
        return None
    return float(np.corrcoef(x, y)[0, 1])


def ranks(values: Array) -> Array:
    """Return ranks that count from 1; equal values share the mean of theirs, as Spearman's coefficient wants.

    Values are equal where they are the same after rounding to 1e-9: equal cosines may differ in their last bits.
    """
    _, inverse, counts = np.unique(np.round(values, 9), return_inverse=True, return_counts=True)
    shared: Array = np.cumsum(counts) - (counts - 1) / 2
    return shared[inverse]
