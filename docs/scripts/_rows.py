"""Rows of data are kept in CSV files, and shown as tables between the marks of a page.

A file whose name ends with .gz is compressed, to the same bytes for the same rows.
"""

from __future__ import annotations

import csv
import gzip
import io
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a data file, none where there is no file."""
    if not path.exists():
        return []
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return list(csv.DictReader(io.StringIO(text.decode(), newline="")))


def append_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Add rows of the same columns to a data file, which begins with their names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else [], lineterminator="\n")
    if not path.exists():
        writer.writeheader()
    writer.writerows(rows)
    if path.suffix == ".gz":
        before = gzip.decompress(path.read_bytes()) if path.exists() else b""
        path.write_bytes(gzip.compress(before + text.getvalue().encode(), mtime=0))
    else:
        with path.open("a", newline="") as file:
            file.write(text.getvalue())


def with_tables(text: str, names: str, made: Callable[[str], str]) -> str:
    """A page with its tables ``made`` anew: each stands between ``<!-- NAME -->`` and ``<!-- end -->``.

    ``names`` is a pattern of the tables' names.
    """

    def table(found: re.Match[str]) -> str:
        return f"<!-- {found[1]} -->\n\n{made(found[1])}\n\n<!-- end -->"

    return re.sub(rf"<!-- ({names}) -->.*?<!-- end -->", table, text, flags=re.DOTALL)


def as_csv(table: str) -> str:
    """A table of a page as the text of a CSV file."""
    lines = [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in table.splitlines() if line[:1] == "|"]
    said = io.StringIO()
    csv.writer(said, lineterminator="\n").writerows([lines[0], *lines[2:]])
    return said.getvalue()
