"""Differences between systems: intervals over the clients and seeds that two systems share."""

import json
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from fedprune_app.config import OPTIONS
from fedprune_app.config.common import DEALT_BY
from fedprune_app.config.fedltp import public_share
from fedprune_app.results.footnotes import noise_in
from fedprune_app.results.groups import Group, Groups, place_of_data
from fedprune_app.results.reader import Run, last_of_clients

OWN = "accuracy_personal_mean"
DRAWS = 10_000
_DRAWN_AT_ONCE = 2**15  # pairs, so that memory does not grow with them
FEWEST = 10  # clients of one seed: with fewer the percentiles cover the truth far less often than 95 %
_LEVEL = 0.95
_SEED = 0  # of the bootstrap: the same runs give the same page
# By seed and client: the accuracy of a model on the client's data in the last evaluated round.
Paired = dict[tuple[int, int], float]


@dataclass(frozen=True)
class Difference:
    """Mean of one group's accuracies minus another's, over the clients of both, with its uncertainty.

    ``low`` and ``high`` are a 95 % interval of the mean, see :func:`difference`. A pair is a client of one seed.
    ``ahead`` is the share of the pairs in which the first group's client is better, and ``by_seed`` has the mean of
    each seed. ``noise`` is the standard deviation of privacy noise in ``mean``.
    """

    mean: float
    low: float
    high: float
    ahead: float
    pairs: int
    by_seed: tuple[float, ...] = ()
    noise: float = 0.0

    @property
    def doubt(self) -> str:
        if self.pairs < FEWEST and len(self.by_seed) < 2:
            return f"fewer than {FEWEST} clients"
        if is_noise(self.mean, self.noise):
            return f"accuracies have noise of ± {100 * self.noise:.1f} points"
        if self.low <= 0 <= self.high:
            return "the interval holds 0"
        return "" if len({mean > 0 for mean in self.by_seed}) < 2 else "seeds disagree"


def half_interval(std: float, count: int) -> float:
    """Return half of Student's 95 % interval of a mean of ``count`` values with this sample standard deviation."""
    return float(stdtrit(count - 1, (1 + _LEVEL) / 2)) * std / math.sqrt(count)


def is_noise(difference: float, noise: float) -> bool:
    """Return whether a difference is within twice the standard deviation of its noise."""
    return abs(difference) < 2 * noise


def noise_between(first: Group, second: Group, measure: str) -> float:
    """Return the standard deviation of the noise in the difference of two groups' mean accuracies."""
    last_rows = (
        [next((row for row in reversed(run.rounds) if row.get(measure) is not None), {}) for run in group.runs]
        for group in (first, second)
    )
    return math.hypot(*(noise_in(rows, measure) for rows in last_rows))


def difference(first: Paired, second: Paired, *, of_other_seeds: bool = False) -> Difference | None:
    """Return the difference of the first from the second, over the pairs of both; None for fewer than two pairs.

    The interval is a bootstrap over pairs, valid for these seeds. With ``of_other_seeds``, and two seeds or more, it is
    Student's t interval of the seeds' means, valid for other seeds; it is wide for two or three seeds.
    """
    keys = sorted(first.keys() & second.keys())
    if len(keys) < 2:
        return None
    differences: NDArray[np.float64] = np.array([first[key] - second[key] for key in keys])
    seeds = np.array([seed for seed, _ in keys])
    by_seed = tuple(float(differences[seeds == seed].mean()) for seed in dict.fromkeys(seeds))
    ahead, pairs = float((differences > 0).mean()), len(differences)
    if of_other_seeds and len(by_seed) > 1:
        mean = float(np.mean(by_seed))
        # a bootstrap over two or three seeds covers the truth far less often than 95 %
        half = half_interval(float(np.std(by_seed, ddof=1)), len(by_seed))
        return Difference(mean, mean - half, mean + half, ahead, pairs, by_seed)
    low, high = np.quantile(_resampled_means(differences), [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2])
    return Difference(float(differences.mean()), float(low), float(high), ahead, pairs, by_seed)


def between(first: Group, second: Group, measure: str) -> Difference | None:
    """Return how far the first group's clients are ahead of the second's; None for fewer than two pairs."""
    found = difference(accuracies(first, measure), accuracies(second, measure), of_other_seeds=True)
    return found and replace(found, noise=noise_between(first, second, measure))


def _resampled_means(values: NDArray[np.float64]) -> NDArray[np.float64]:
    rng, rows = np.random.default_rng(_SEED), max(1, _DRAWN_AT_ONCE // len(values))
    shapes = ((min(rows, DRAWS - done), len(values)) for done in range(0, DRAWS, rows))
    return np.concatenate([values[rng.integers(len(values), size=shape)].mean(1) for shape in shapes])


def measure_of(groups: Groups) -> str:
    """Return the accuracy that compares these groups: their headline, or that of own models if headlines differ."""
    headlines = {group.first.headline for group in groups}
    return headlines.pop() if len(headlines) == 1 else OWN


def accuracies(group: Group, measure: str = OWN) -> Paired:
    """Return the clients' accuracies, whose mean is the column ``measure``, in each run's last evaluation."""
    field = measure.removesuffix("_mean")
    rows = [(run.seed, row) for run in group.runs for row in last_of_clients(run, field)]
    return {(seed, int(row["partition"])): float(row[field]) for seed, row in rows}


def from_best(groups: Groups) -> tuple[str, list[tuple[Group, Difference]]]:
    """Return the label of the group with the best accuracy (:func:`measure_of`), and its difference from each other.

    The groups must have the same data. The best one is chosen over the clients that all groups evaluated.
    """
    measure = measure_of(groups)
    by_label = {group.label: accuracies(group, measure) for group in groups}
    candidates = [group for group in groups if len(by_label[group.label]) > 1]
    if len(candidates) < 2:
        return "", []
    common_pairs = set.intersection(*(set(by_label[group.label]) for group in candidates))

    means = {
        label: float(np.mean([values[key] for key in common_pairs or values]))
        for label, values in by_label.items()
        if len(values) > 1
    }
    best = max(candidates, key=lambda group: means[group.label])
    distances = []
    for group in candidates:
        if group is not best and (distance := between(best, group, measure)) is not None:
            distances.append((group, distance))
    return best.label, distances


def of_the_same_data(groups: Groups) -> list[list[Group]]:
    """Return families of groups whose runs have the same seeds, and whose clients have the same data."""
    families: dict[object, list[Group]] = {}
    for group in groups:
        families.setdefault(_data(group), []).append(group)
    return [*families.values()]


def _data(group: Group) -> frozenset[tuple[int, str]]:
    """Return by seed a text that identifies the data of a group's clients.

    It has their label counts. If a private run withholds these, it has all settings that determine each client's data.
    """
    return frozenset((run.seed, json.dumps([place_of_data(run), _partition_of(run)])) for run in group.runs)


def _partition_of(run: Run) -> list[Any]:
    counts = run.info.get("partition")
    if any(value for client in counts or () for key, value in client.items() if key != "partition"):
        return [counts, [run.config.get(key) for key in ("dataset", "partition", "test-split")]]
    settings = {key: run.config.get(key, OPTIONS[key].default) for key in DEALT_BY}
    tickets = (run.config.get(key, OPTIONS[key].default) for key in ("fedltp.tickets", "fedltp.public-dataset"))
    settings["public-fraction"] = settings["public-fraction"] or public_share(run.system, *tickets)
    return [len(counts or ()), settings]


def difference_tables(groups: Groups) -> list[tuple[str, str, list[list[str]]]]:
    """Return for each family of equal data its measure, the best group's label, and a row for each other group.

    A row has the group's label, difference, interval, pairs and a verdict. Runs that did not complete, or that
    continued after they lost states, are left out.
    """
    tables = []
    for family in of_the_same_data([group for group in groups if not group.first.flaw]):
        best, distances = from_best(family)
        rows = []
        for group, distance in distances:
            interval = f"{-100 * distance.high:+.2f} to {-100 * distance.low:+.2f}"
            is_of_seeds = len(distance.by_seed) > 1
            pairs = "pairs of client and seed" if is_of_seeds else "clients"
            ahead = f"{1 - distance.ahead:.0%} of {distance.pairs:,} {pairs}"
            clear = "yes" if is_of_seeds else "yes, for this seed"
            verdict = f"no: {distance.doubt}" if distance.doubt else clear
            rows.append([group.label, f"{-100 * distance.mean:+.2f}", interval, ahead, verdict])
        if rows:
            tables.append((measure_of(family), best, rows))
    return tables
