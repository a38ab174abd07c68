"""The page of evidence says what its rows of data say."""

from __future__ import annotations

import csv
import json

import pytest

import fedprune_app
from fedprune_app.config import OPTIONS
from fedprune_app.results.differences import Difference
from tests.docs.scripts import script

evidence = script("evidence")
CLAIMS, PAGE, Claim = evidence.CLAIMS, evidence.PAGE, evidence.Claim
chosen, verdict, written = evidence.chosen, evidence.verdict, evidence.written


def test_the_tables_of_the_page_are_those_of_the_data():
    assert written(PAGE.read_text()) == PAGE.read_text()


def test_every_row_is_a_run_with_its_clients():
    for path in evidence.DATA.glob("*.csv"):
        rows = list(csv.DictReader(path.read_text().splitlines()))
        keys = [(row["system"], row["settings"], row["seed"], row.get("client"), row.get("round")) for row in rows]
        assert len(set(keys)) == len(keys), path
        assert all(json.loads(row["settings"]).keys() <= OPTIONS.keys() for row in rows)
    for claim in CLAIMS:
        rows = evidence.read(claim.data)
        clients = evidence.read(f"{claim.data}.clients")
        for row in rows:
            key = [row[name] for name in ("system", "settings", "seed")]
            own = [float(each["personal"]) for each in clients if [each[name] for name in list(row)[:3]] == key]
            assert 100 * sum(own) / len(own) == pytest.approx(float(row["personal"]), abs=0.01)


CLAIM = Claim("x", "somewhere", "more", "none", {"system": "dispfl"}, {"system": "standalone"}, seeds=2, margin=1.0)


@pytest.mark.parametrize(
    ("low", "high", "by_seed", "said"),
    [
        (0.01, 0.03, [0.02, 0.02], "shown"),
        (-0.005, 0.03, [0.02, 0.0], "shown"),
        (-0.03, -0.02, [-0.02, -0.03], "refuted"),
        (-0.03, 0.02, [-0.02, 0.03], "undecided"),
        (0.01, 0.03, [0.05, -0.02], "undecided"),
        (0.01, 0.03, [0.02], "open: 1 of 2 seeds"),
    ],
)
def test_a_verdict_needs_the_interval_and_every_seed(low, high, by_seed, said):
    assert verdict(CLAIM, Difference((low + high) / 2, low, high, 0.5, 100), by_seed) == said


def test_a_claim_finds_its_rows_and_no_others():
    def row(system, **settings):
        return {"system": system, "settings": json.dumps({k.replace("_", "."): v for k, v in settings.items()})}

    plain, sparse = row("dispfl"), row("dispfl", density=0.8)
    at_random = row("dispfl", dispfl_growth="random")
    rows = [plain, sparse, at_random, row("standalone")]
    assert chosen(rows, {"system": "dispfl", "density": 0.5}) == [plain]
    assert chosen(rows, {"system": "dispfl", "density": 0.8}) == [sparse]
    assert chosen(rows, {"system": "dispfl", "density": 0.5, "dispfl.growth": "random"}) == [at_random]
    assert chosen(rows, {"system": "standalone"}) == [rows[3]]


def test_a_run_becomes_a_row_once(tmp_path, monkeypatch):
    quick = {"system": "fedavg", "num_server_rounds": 1, "engine": "inprocess", "progress": False}
    run = fedprune_app.run(clients=3, out=tmp_path / "run", **quick)
    monkeypatch.setattr(evidence, "DATA", tmp_path / "data")
    assert evidence.add("some", [run.folder]) == 1
    assert evidence.add("some", [run.folder]) == 0
    (row,) = evidence.read("some")
    assert row["final_sha256"] == run.info["final_sha256"]
    assert len(evidence.read("some.clients")) == 3
