"""The table of the papers' tables and figures names what there is, and has the numbers of the claims."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
with (ROOT / "docs" / "data" / "tables" / "papers.csv").open(newline="", encoding="utf-8") as file:
    ROWS = list(csv.DictReader(file))
SHOWN = {  # by paper: its tables and figures with measured results
    "Dis-PFL": [*(f"Table {n}" for n in range(1, 10)), *(f"Figure {n}" for n in range(3, 7))],
    "Sub-FedAvg": ["Table 1", "Table 2", "Figure 1", "Figure 2", "Figure 3"],
    "FedP3": ["Table 1", "Table 2", "Figure 2", "Figure 4", "Figure 5", "Figure 6"],
    "Fed-LTP": ["Table 2", "Table 3", *(f"Figure {n}" for n in range(3, 12))],
    "FedSpaLLM": ["Table 1", "Table 2", "Table 3"],
}


@pytest.mark.parametrize("paper", SHOWN)
def test_each_table_and_figure_of_a_paper_has_a_row_without_empty_cells(paper):
    rows = [row for row in ROWS if row["paper"] == paper]
    assert not {name for row in rows for name, cell in row.items() if not cell.strip()}
    assert {*SHOWN[paper]} <= {row["table or figure"].partition(",")[0] for row in rows}


@pytest.mark.parametrize("row", ROWS, ids=[f"{row['paper']}, {row['table or figure']}" for row in ROWS])
def test_what_a_row_names_is_there(row):
    text = " ".join(row.values())
    for name in re.findall(r"`([\w./*-]+\.(?:yaml|csv|csv\.gz|md|py))`", text):
        places = [ROOT / name, ROOT / "configs" / "matrices" / name]
        assert any(place.parent.is_dir() and [*place.parent.glob(place.name)] for place in places), name


def test_the_differences_are_those_of_the_claims():
    tables = ROOT / "docs" / "data" / "tables"
    known = "".join((tables / f"{name}.csv").read_text() for name in ("claims", "smollm-claims"))
    cells = [row["what we found"] for row in ROWS if "laim" in row["what we found"]]
    numbers = {number for cell in cells for number in re.findall(r"[+-]\d+\.\d\d\b", cell)}
    assert len(numbers) > 20
    assert not {number for number in numbers if number not in known}
