"""Texts for results: names of test texts and models, and a line about a round."""

import math

from fedprune_app.core.named import Values
from fedprune_app.results.declarations import DECLARATIONS
from fedprune_app.results.metrics import MEGABYTE, Declarations, Row

# In place of a test text's name: every client's own text, on which its own model is evaluated.
OWN_TEXT = "own"


def windows_of_text(text: str, entry: Values) -> str:
    """Return the name of a test text with its measured windows, such as ``ptb: 64 × 128 tokens``.

    ``entry`` is the text's entry of ``perplexity_by_text``. If only some windows were measured, the result is
    ``ptb: first 64 of 900 × 128 tokens``. Windows of the clients' own texts are counted over all clients.
    """
    windows, total = entry.get("windows"), entry.get("windows_in_text")
    extent = f"first {windows} of {total}" if windows and total and total > windows else windows
    return f"{'own texts' if text == OWN_TEXT else text}: {extent} × {entry.get('window')} tokens"


def own_models(round: int) -> str:
    """Return the name of the clients' own language models after ``round``.

    Only in round 1 are they the papers' standalone baseline: from round 2 on a client prunes the merged layers.
    """
    return "standalone" if round == 1 else "clients' own"


def tested_on(row: Values) -> str:
    """Return the text of a round's ``perplexity_global``, with its windows; empty if no perplexity was measured.

    It is the first text of ``row``, a row of rounds.jsonl.
    """
    return next((windows_of_text(text, entry) for text, entry in (row.get("perplexity_by_text") or {}).items()), "")


# --- a round in one line ----------------------------------------------------------------------------------------------


def summary_line(row: Row, metrics: Declarations | None = None) -> str:
    """Return the log's line on a round: replies, metrics of training, costs, metrics of the evaluation.

    ``metrics`` are all declarations, by default fedprune's own.
    """

    def words(of_training: bool) -> list[str]:
        lines = (metrics or DECLARATIONS).lines
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
    measured = [(column, line) for column, line, _ in DECLARATIONS.lines if row.get(column.name) is not None]
    parts = [
        f"{line.terminal} {line.number(row[column.name])}{column.remarked(row)}  "
        for column, line in measured
        if line.terminal
    ]
    return "".join([*parts, f"({text})  " if (text := tested_on(row)) else ""])
