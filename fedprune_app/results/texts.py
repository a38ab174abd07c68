"""Results in words: test texts and models by name, and a round in one line."""

import math

from fedprune_app.core.named import Values
from fedprune_app.results.declarations import DECLARATIONS
from fedprune_app.results.metrics import MEGABYTE, Declarations, Row

# In place of a test text's name: every client has measured its own model on its own text.
OWN_TEXT = "own"


def windows_of_text(text: str, entry: Values) -> str:
    """Return the name of a test text with the windows of it that were measured, such as ``ptb: 64 × 128 tokens``.

    ``entry`` is the text's entry of ``perplexity_by_text``. Where only some of the windows were measured, the words are
    ``ptb: first 64 of 900 × 128 tokens``. The windows of the clients' own texts are those of all clients together.
    """
    windows, total = entry.get("windows"), entry.get("windows_in_text")
    extent = f"first {windows} of {total}" if windows and total and total > windows else windows
    return f"{'own texts' if text == OWN_TEXT else text}: {extent} × {entry.get('window')} tokens"


def own_models(round: int) -> str:
    """Return the name of the clients' own language models after ``round``.

    The papers' standalone baseline knows nothing of other clients. From the second round on a client prunes what the
    server made of all clients' layers.
    """
    return "standalone" if round == 1 else "clients' own"


def tested_on(row: Values) -> str:
    """Return the text that a round's ``perplexity_global`` was measured on, with its windows.

    That is the first text of ``row``, a row of rounds.jsonl. The name is empty where no perplexity was measured.
    """
    return next((windows_of_text(text, entry) for text, entry in (row.get("perplexity_by_text") or {}).items()), "")


# --- a round in one line ----------------------------------------------------------------------------------------------


def summary_line(row: Row, metrics: Declarations | None = None) -> str:
    """Return the log's line on a round: replies, what training told, what it cost, what the evaluation told.

    ``measures`` are all numbers that there are, by default fedprune's own.
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
