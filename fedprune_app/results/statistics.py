"""How the numbers of all clients become one."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Summary(NamedTuple):
    """A summary holds mean, population standard deviation and worst decile of one number per client."""

    mean: float
    std: float
    worst_decile: float


def worst_decile(values: Sequence[float] | NDArray[np.floating]) -> float:
    """Return the mean of the lowest ceil(n / 10) of n values; for n <= 10 this is the worst client itself.

    The result is NaN for no values, and where a value is NaN: a value that was not measured is never the best or the
    worst.

    >>> worst_decile([0.9, 0.2, 0.7])
    0.2
    """
    sorted_values = np.sort(np.asarray(values, dtype=np.float64))  # NaN sorts last
    if sorted_values.size == 0 or np.isnan(sorted_values[-1]):
        return float("nan")
    return float(sorted_values[: -(-sorted_values.size // 10)].mean())


def summary(values: Sequence[float] | NDArray[np.floating]) -> Summary:
    """Return mean over clients (each counts once, not per sample), population standard deviation and worst decile.

    The clients are the population, not a sample of one, hence ``ddof = 0``. All three are NaN for no values
    (a record shows NaN as null).
    """
    array = np.asarray(values, dtype=np.float64)
    if array.size == 0:
        return Summary(float("nan"), float("nan"), float("nan"))
    return Summary(float(array.mean()), float(array.std()), worst_decile(array))


def noise_of_mean(deviations: Sequence[float]) -> float | None:
    """Return the standard deviation of the noise in a mean of numbers with these independent ones; None for none."""
    return math.hypot(*deviations) / len(deviations) if deviations else None


def mean(values: Sequence[float]) -> float:
    """Return the mean, which counts each client once; NaN for no values."""
    return summary(values).mean


def spread(values: Sequence[float]) -> float:
    """Return the population's standard deviation; NaN for no values."""
    return summary(values).std


def running_mean(values: Sequence[float]) -> float | None:
    """Return the mean by adding the values from the first to the last; None for no values.

    It may differ from :func:`mean` in the last bit, so a column stays with the one that it had first.
    """
    return sum(values) / len(values) if values else None


def number(values: Sequence[float]) -> float | None:
    return len(values) or None


def largest(values: Sequence[float]) -> float | None:
    return max(values, default=None)
