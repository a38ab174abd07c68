"""Replies become rows: a client's of clients.jsonl, and a round's of rounds.jsonl."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedprune_app.results.declarations import MEASURES, noise_of_mean
from fedprune_app.results.measures import Kind, Measure, Measures, Recorded, Reply, Row, Take

# Accuracies by class are recorded of so many classes at most.
MOST_CLASSES = 1000


def number_in(name: str, fields: Row, *, about: str | None = None, most: float | None = None) -> float:
    """Return the number ``name`` from the fields of a reply, checked as :meth:`Measure.of` says."""
    return MEASURES.of_clients[name].of(fields, about=about, most=most)


def row_of(
    reply: Reply,
    fields: Row,
    *,
    private: bool = False,
    layers: Iterable[str] = (),
    num_classes: int = 0,
    declared: Measures | None = None,
) -> dict[str, Any]:
    """Return the numbers of this kind of reply by name, each checked.

    An optional number that is not told is None. In a ``private`` run what is withheld is None whatever the reply says.
    Numbers by layer are asked of ``layers`` alone, and numbers by class of so many classes. ``declared`` are all
    numbers that there are, by default fedprune's own. ``ValueError`` names the first field that is missing or out of
    bounds.
    """
    names = {"layer": sorted(layers), "class": [str(number) for number in range(min(num_classes, MOST_CLASSES))]}
    return {
        measure.name: None if private and measure.withheld else measure.value_in(fields, reply, names, private)
        for measure in (declared or MEASURES).told_in(reply)
    }


def from_training(row: Row, trained: Row) -> dict[str, Any]:
    """Return the numbers that the ``row`` of an evaluation lacks and the training of the round told."""
    names = (name for name, measure in MEASURES.of_clients.items() if _is_of_either(measure))
    return {name: trained.get(name) for name in names if row[name] is None}


def _is_of_either(measure: Measure) -> bool:
    return {Reply.TRAINING, Reply.EVALUATION} <= measure.replies


def recorded_of_client(row: Row) -> dict[str, Any]:
    """Clients.jsonl records these fields of a row: no number of the round alone, and no object that was not told."""
    left_out = {name for name, measure in MEASURES.of_clients.items() if measure.recorded is Recorded.NEVER}
    objects = MEASURES.kinds[Kind.BY_NAME]
    return {
        name: value for name, value in row.items() if name not in left_out and not (value is None and name in objects)
    }


def round_columns(
    rows: Iterable[Row], reply: Reply, others: Sequence[Row] = (), declared: Measures | None = None
) -> dict[str, Any]:
    """Return the columns of a round, by name, that the clients' rows of one kind of reply make.

    A client that lacks a number is left out of its columns. Numbers by layer or class become a column of numbers by
    name, in the order in which the clients tell of the names. ``others`` are the training rows of clients that were not
    evaluated in the round: what either reply may tell is taken over them, too. ``declared`` are all numbers that there
    are, by default fedprune's own.
    """
    rows = list(rows)
    columns: dict[str, Any] = {}
    for measure in (declared or MEASURES).told_in(reply):
        if measure.is_evaluated and not reply.is_evaluation:
            continue
        values = [row[measure.name] for row in _rows_telling(measure, rows, others)]
        for column in measure.columns:
            if column.take is not None:
                columns[column.name] = _by_name(values, column.take) if measure.by else column.take(values)
    return columns | (_columns_of_fewer(rows, others) if reply is Reply.EVALUATION else {})


def _rows_telling(measure: Measure, rows: Sequence[Row], others: Sequence[Row]) -> list[Row]:
    candidates = (*rows, *others) if _is_of_either(measure) else rows
    return [row for row in candidates if row.get(measure.name) is not None]


def _columns_of_fewer(rows: Sequence[Row], others: Sequence[Row]) -> dict[str, Any]:
    """Return two columns, with an entry for each column of accuracies that some of the clients did not tell.

    One says how many clients told the number. The other has the noise in their mean, where they told how much of it is
    noise: a client whose privacy budget is spent tells no accuracy, and a client without test images has none.
    """
    clients: dict[str, float] = {}
    noises: dict[str, float | None] = {}
    for measure in (measure for measure in MEASURES.told_in(Reply.EVALUATION) if measure.may_be_noised):
        telling_rows = _rows_telling(measure, rows, others)
        if len(telling_rows) not in (0, len(rows)):
            clients |= {column.name: len(telling_rows) for column in measure.columns if column.remark}
            if deviations := [row["accuracy_noise"] for row in telling_rows if row.get("accuracy_noise") is not None]:
                noises |= {
                    column.name: noise_of_mean(deviations) for column in measure.columns if column.is_noised_mean
                }
    columns = {"clients_by_column": clients, "noise_by_column": noises}
    return {name: entries for name, entries in columns.items() if entries}


def _by_name(rows: Iterable[Mapping[str, float]], take: Take) -> dict[str, float | None]:
    values: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            values.setdefault(name, []).append(value)
    return {name: take(numbers) for name, numbers in values.items()}
