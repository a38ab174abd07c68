"""How far systems are apart, client by client: a paired bootstrap over the clients and seeds that two systems share."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedprune_app.results.reader import Run
from fedprune_app.results.tables import Group

DRAWS = 10_000
_LARGEST = 1_000_000  # so many drawn pairs are in memory at once
_SEED = 0  # of the bootstrap: the same runs give the same page
Paired = dict[tuple[int, int], float]
"""By seed and client: the accuracy of the client's own model in the last evaluated round."""


@dataclass(frozen=True)
class Difference:
    """A difference is the mean of one group's personal accuracies less another's, over the clients of both.

    ``low`` and ``high`` are a 95 % interval of the mean by the bootstrap: percentiles over resampled pairs. With
    several seeds a client of each seed is a pair of its own. ``ahead`` is the share of the pairs in which the first
    group's client is better.
    """

    mean: float
    low: float
    high: float
    ahead: float
    pairs: int

    @property
    def is_clear(self) -> bool:
        """The interval does not hold 0."""
        return self.low > 0 or self.high < 0


def difference(first: Paired, second: Paired) -> Difference | None:
    """Return how far the first is ahead of the second, over the pairs of both; None for fewer than two pairs."""
    keys = sorted(first.keys() & second.keys())
    if len(keys) < 2:
        return None
    apart: NDArray[np.float64] = np.array([first[key] - second[key] for key in keys])
    rng, at_once = np.random.default_rng(_SEED), max(1, _LARGEST // len(apart))
    sizes = [min(at_once, DRAWS - start) for start in range(0, DRAWS, at_once)]
    means = [apart[rng.integers(len(apart), size=(size, len(apart)))].mean(axis=1) for size in sizes]
    low, high = np.percentile(np.concatenate(means), [2.5, 97.5])
    return Difference(float(apart.mean()), float(low), float(high), float((apart > 0).mean()), len(apart))


def personal_accuracies(group: Group) -> Paired:
    """Return the personal accuracies of a group's clients after the last round in which all were evaluated."""
    return {(run.seed, client): value for run in group.runs for client, value in _of_run(run).items()}


def _of_run(run: Run) -> dict[int, float]:
    rows = [row for row in run.clients if row.get("accuracy_personal") is not None]
    last = max((row["round"] for row in rows), default=0)
    return {int(row["partition"]): float(row["accuracy_personal"]) for row in rows if row["round"] == last}


def from_best(groups: Sequence[Group]) -> tuple[str, list[tuple[Group, Difference]]]:
    """Return the label of the group with the best personal accuracy, and how far each other group is behind.

    Groups whose clients have other data than those of the best are left out: nothing pairs them.
    """
    found = {group.label: personal_accuracies(group) for group in groups}
    able = [group for group in groups if len(found[group.label]) > 1]
    if len(able) < 2:
        return "", []
    best = max(able, key=lambda group: float(np.mean(list(found[group.label].values()))))
    data = _data(best)
    others = []
    for group in able:
        alike = {seed for seed, known in _data(group).items() if data.get(seed) == known}
        first, second = (
            {key: value for key, value in found[each.label].items() if key[0] in alike} for each in (best, group)
        )
        if group is not best and (apart := difference(first, second)) is not None:
            others.append((group, apart))
    return best.label, others


def _data(group: Group) -> Mapping[int, str]:
    """Return by seed what the clients of a group have, as text."""
    keys = ("dataset", "partition", "test-split")
    return {
        run.seed: json.dumps([run.info.get("partition"), [run.config.get(key) for key in keys]]) for run in group.runs
    }


def difference_rows(groups: Sequence[Group]) -> tuple[str, list[list[str]]]:
    """Return the best group's label, and for each other group: label, distance, interval, pairs and a verdict."""
    best, others = from_best(groups)
    rows = []
    for group, apart in others:
        verdict = "yes" if apart.is_clear else "no: the interval holds 0"
        interval = f"{-100 * apart.high:+.2f} to {-100 * apart.low:+.2f}"
        ahead = f"{1 - apart.ahead:.0%} of {apart.pairs:,}"
        rows.append([group.label, f"{-100 * apart.mean:+.2f}", interval, ahead, verdict])
    return best, rows
