"""What a reader of a number must know stands behind it, in a word or two."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from fedprune_app.results.measures import Remark, Row


def noise_of_mean(deviations: Sequence[float]) -> float | None:
    """Return the standard deviation of the noise in a mean of numbers with these independent ones; None for none."""
    return math.hypot(*deviations) / len(deviations) if deviations else None


def noise_remark(rows: Sequence[Row], column: str) -> str:
    """Say which epsilons are simulated: who knows the seed can subtract noise that derives from it."""
    words = {None: "noise unknown", 0: "", 1: "simulated"}
    return _remarks_with_counts(words.get(row.get("epsilon_simulated"), "partly simulated") for row in rows)


def accuracy_remark(rows: Sequence[Row], column: str) -> str:
    """Give the standard deviation of the noise in a mean of accuracies that clients tell with noise."""
    deviations = ((row.get("noise_by_column") or {}).get(column, row.get("accuracy_noise")) for row in rows)
    noises = [noise for noise in deviations if noise is not None]
    noise = noise_of_mean(noises)
    return "" if noise is None else _remark_with_count(f"noise ± {100 * noise:.1f}", len(noises), len(rows))


def noised_remark(rows: Sequence[Row], column: str) -> str:
    """Say that a number is made of noised accuracies, whose noise moves it in one direction."""
    return _remarks_with_counts("" if row.get("accuracy_noise") is None else "of noised accuracies" for row in rows)


def fewer_remark(rows: Sequence[Row], column: str, count_column: str = "evaluated") -> str:
    """Say over how many clients a mean is, where they are fewer than the run has.

    ``count_column`` names the column of their number, where no column ``clients_by_column`` tells it.
    """

    def remark(row: Row) -> str:
        count, clients = (row.get("clients_by_column") or {}).get(column, row.get(count_column)), row.get("clients")
        return "" if count is None or clients is None or count >= clients else f"{count:.0f} of {clients:.0f} clients"

    return _remarks_with_counts(map(remark, rows))


def both(*remarks: Remark) -> Remark:
    return lambda rows, column: ", ".join(filter(None, (remark(rows, column) for remark in remarks)))


def _remarks_with_counts(texts: Iterable[str]) -> str:
    """Where rows differ, each text stands with the number of runs that have it."""
    counts = Counter(texts)
    return ", ".join(_remark_with_count(text, count, counts.total()) for text, count in sorted(counts.items()) if text)


def _remark_with_count(text: str, count: int, total: int) -> str:
    return text if count == total else f"{text}: {count} of {total} runs"
