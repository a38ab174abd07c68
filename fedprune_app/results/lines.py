"""A round is told in one line: in the log, and beside the progress bar."""

import math

from fedprune_app.results.declarations import MEASURES
from fedprune_app.results.measures import MEGABYTE, Measures, Row
from fedprune_app.results.texts import tested_on


def summary_line(row: Row, measures: Measures | None = None) -> str:
    """Return the log's line on a round: replies, what training told, what it cost, what the evaluation told.

    ``measures`` are all numbers that there are, by default fedprune's own.
    """

    def words(of_training: bool) -> list[str]:
        lines = (measures or MEASURES).lines
        of_kind = [(column, line) for column, line, is_trained in lines if is_trained == of_training]
        entries = [(column, line, row.get(column.name)) for column, line in of_kind]
        return [
            f"{line.log} {line.number(value)}{column.remarked(row)}"
            + (f" ({tested_on(row)})" if line.on_a_text else "")
            for column, line, value in entries
            if value is not None and not math.isnan(value)
        ]

    cost = [f"{(row['bytes_up'] + row['bytes_down']) / MEGABYTE:.2f} MB", f"{row['seconds']:.1f} s"]
    return ", ".join([f"{row['replies']} replies", f"{row['failures']} failures", *words(True), *cost, *words(False)])


def progress_line(row: Row) -> str:
    measured = [(column, line) for column, line, _ in MEASURES.lines if row.get(column.name) is not None]
    parts = [
        f"{line.terminal} {line.number(row[column.name])}{column.remarked(row)}  "
        for column, line in measured
        if line.terminal
    ]
    return "".join([*parts, f"({text})  " if (text := tested_on(row)) else ""])
