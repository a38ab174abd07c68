"""The tables of docs/concepts/faults.md, made of the rows in docs/data/faults.

    python docs/scripts/fault_tables.py

`python -m devtools.faults --table`, `make planted-bugs` and `benchmarks/kills.py --table` add the rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median

from _rows import read_rows, with_tables

from devtools.faults.campaign import COUNTED

ROOT = Path(__file__).parents[2]
DATA, PAGE = ROOT / "docs" / "data" / "faults", ROOT / "docs" / "concepts" / "faults.md"
Row = dict[str, str]


def read(name: str) -> list[Row]:
    """The rows of a data file."""
    return read_rows(DATA / f"{name}.csv")


def seeds_in(rows: Iterable[Row]) -> int:
    """How many seeds the rows of a system have, each counted once."""
    return len({seed for row in rows for seed in range(int(row["first_seed"]), int(row["end_seed"]))})


def simulated() -> str:
    """Schedules over all systems, processor hours, violations, and what happened."""
    rows = read("simulated")
    systems = {row["system"] for row in rows}
    schedules = sum(seeds_in(row for row in rows if row["system"] == system) for system in systems)
    hours = sum(int(row["processor_seconds"]) for row in rows) / 3600
    counts = [sum(int(row[name]) for row in rows) for name in ("violations", *COUNTED)]
    counted = (name.replace("_", " ") for name in COUNTED)
    line = (str(len(systems)), f"{schedules:,}", f"{hours:,.2f}", *(f"{count:,}" for count in counts))
    return table(("systems", "schedules", "processor hours", "violations, mended", *counted), [line])


def planted() -> str:
    """How many bugs were planted and found, and after how many schedules."""
    schedules = [int(row["schedules"]) for row in read("planted")]
    line = (str(len(schedules)), str(sum(n > 0 for n in schedules)), f"{median(schedules):g}", str(max(schedules)))
    return table(("planted bugs", "found", "schedules until found, median", "most"), [line])


def kills() -> str:
    """Over all systems: the kills on each engine, and how many runs ended with the same models."""
    rows = read("kills")
    engines = list(dict.fromkeys(row["engine"] for row in rows))
    by_engine = [sum(int(row["kills"]) for row in rows if row["engine"] == engine) for engine in engines]
    runs, same = (sum(int(row[name]) for row in rows) for name in ("resumed", "same_models"))
    line = map(str, (len({row["system"] for row in rows}), *by_engine, runs, same))
    return table(("systems", *(f"kills, {engine}" for engine in engines), "runs", "same models"), [tuple(line)])


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table in Markdown; columns of numbers stand on the right."""
    rows = list(lines)
    numbers = [all(re.fullmatch(r"[\d,.]+", row[k]) for row in rows) for k in range(len(head))]
    rule = ["---:" if is_number else "---" for is_number in numbers]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *rows))


def written(text: str) -> str:
    """The page with its tables made anew."""
    made = {"simulated": simulated, "planted": planted, "kills": kills}
    return with_tables(text, "|".join(made), lambda name: made[name]())


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
