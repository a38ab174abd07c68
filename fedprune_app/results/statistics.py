"""Statistics over the numbers of all clients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # the command line imports this module
    import numpy as np
    from numpy.typing import NDArray


class Summary(NamedTuple):
    """Mean, population standard deviation and worst decile of one number per client."""

    mean: float
    std: float
    worst_decile: float


def worst_decile(values: Sequence[float] | NDArray[np.floating]) -> float:
    """Return the mean of the lowest ceil(n / 10) of n values; for n <= 10 this is the worst client itself.

    The result is NaN for no values, and if any value is NaN, since an unmeasured value is neither best nor worst.

    >>> worst_decile([0.9, 0.2, 0.7])
    0.2
    """
    import numpy as np

    sorted_values = np.sort(np.asarray(values, dtype=np.float64))  # NaN sorts last
    if sorted_values.size == 0 or np.isnan(sorted_values[-1]):
        return float("nan")
    return float(sorted_values[: -(-sorted_values.size // 10)].mean())


def summary(values: Sequence[float] | NDArray[np.floating]) -> Summary:
    """Return mean over clients (each counts once, not per sample), population standard deviation and worst decile.

    The clients are the whole population, hence ``ddof = 0``. All three are NaN for no values (null in records).
    """
    import numpy as np

    array = np.asarray(values, dtype=np.float64)
    if array.size == 0:
        return Summary(float("nan"), float("nan"), float("nan"))
    return Summary(float(array.mean()), float(array.std()), worst_decile(array))


def noise_of_mean(deviations: Sequence[float]) -> float | None:
    """Return the standard deviation of the noise in a mean, from those of its independent parts; None for none."""
    return math.hypot(*deviations) / len(deviations) if deviations else None


def mean(values: Sequence[float]) -> float:
    """Return the mean, which counts each client once; NaN for no values."""
    return summary(values).mean


def spread(values: Sequence[float]) -> float:
    """Return the population's standard deviation; NaN for no values."""
    return summary(values).std


def running_mean(values: Sequence[float]) -> float | None:
    """Return the mean by adding the values from first to last; None for no values.

    It may differ from :func:`mean` in the last bit, so no column may switch from one to the other.
    """
    return sum(values) / len(values) if values else None


def number(values: Sequence[float]) -> float | None:
    return len(values) or None


def largest(values: Sequence[float]) -> float | None:
    return max(values, default=None)
