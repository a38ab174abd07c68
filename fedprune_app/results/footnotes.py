"""Footnotes, shown in parentheses after a number: its noise, and the number of its clients."""

from collections.abc import Iterable, Sequence

from fedprune_app.results.metrics import (
    Footnote,
    Row,
)
from fedprune_app.results.statistics import noise_of_mean


def noise_footnote(rows: Sequence[Row], column: str) -> str:
    """Return whether the epsilons are simulated: anyone with the seed can subtract the noise that derives from it.

    The protected unit is added if it is not a single example.
    """
    words = {None: "noise unknown", 0: "", 1: "simulated"}
    noise = [words.get(row.get("epsilon_simulated"), "partly simulated") for row in rows]
    units = {row.get("protected_unit", "example") for row in rows} - {"example"}
    return _each_once([*(f"per {unit}" for unit in units), *noise])


def noise_in(rows: Sequence[Row], column: str) -> float:
    """Return the standard deviation of the noise in the mean of the rows' accuracies; 0 without noise."""
    deviations = ((row.get("noise_by_column") or {}).get(column, row.get("accuracy_noise")) for row in rows)
    return noise_of_mean([deviation or 0 for deviation in deviations]) or 0.0


def accuracy_footnote(rows: Sequence[Row], column: str) -> str:
    """Return the standard deviation of the noise in a mean of noised accuracies."""
    noise = noise_in(rows, column)
    return f"noise ± {100 * noise:.1f}" if noise else ""


def noised_footnote(rows: Sequence[Row], column: str) -> str:
    """Return that a number comes from noised accuracies."""
    return _each_once("" if row.get("accuracy_noise") is None else "of noised accuracies" for row in rows)


def fewer_footnote(rows: Sequence[Row], column: str, count_column: str = "evaluated") -> str:
    """Return the number of clients in a mean, if it is smaller than the run's.

    It is in ``clients_by_column``, or else in ``count_column``.
    """

    def footnote(row: Row) -> str:
        count, clients = (row.get("clients_by_column") or {}).get(column, row.get(count_column)), row.get("clients")
        return "" if count is None or clients is None or count >= clients else f"{count:.0f} of {clients:.0f} clients"

    return _each_once(map(footnote, rows))


def both(*remarks: Footnote) -> Footnote:
    return lambda rows, column: ", ".join(filter(None, (footnote(rows, column) for footnote in remarks)))


def _each_once(texts: Iterable[str]) -> str:
    return ", ".join(sorted({text for text in texts if text}))
