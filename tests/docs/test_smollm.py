"""The page of the real language model says what its rows of data say, and its claims are runs of its matrices."""

from __future__ import annotations

import csv
from math import exp

import pytest

from fedprune_app.preflight.inputs import RunInputs
from fedprune_app.sweeps.matrix import read_matrix
from tests.docs.blocks import ROOT
from tests.docs.scripts import script

smollm, one_upload = script("smollm"), script("one_upload")


def test_the_tables_of_the_page_are_those_of_the_data():
    assert smollm.written(smollm.PAGE.read_text()) == smollm.PAGE.read_text()
    assert smollm.as_csv(smollm.claims_table()) == smollm.ALL_CLAIMS.read_text()


def test_the_tables_of_one_upload_are_those_of_its_data_and_each_claim_is_of_two_models():
    assert one_upload.written(smollm.PAGE.read_text()) == smollm.PAGE.read_text()
    assert one_upload.as_csv(one_upload.claims_table()) == one_upload.ALL_CLAIMS.read_text()
    names = {model.name for model in one_upload.MODELS}
    assert {name for claim in one_upload.CLAIMS for name in (claim.better, claim.other)} <= names
    assert {model.source for model in one_upload.MODELS} <= names | {""}


def test_the_clients_own_models_count_by_their_geometric_mean(tmp_path, monkeypatch):
    monkeypatch.setattr(smollm, "DATA", tmp_path / "rows.csv")
    smollm.append_rows(smollm.DATA, [row(0, "a", [exp(1), exp(5)], exp(3))])
    assert smollm.gains("kinds", 2, 0.5) == {(0, 0): pytest.approx(0.0)}


def test_no_run_has_two_rows_for_a_text():
    rows = list(csv.DictReader(smollm.DATA.read_text().splitlines()))
    keys = [tuple(row[key] for key in smollm.KEY) for row in rows]
    assert len(set(keys)) == len(keys)
    assert all(len(row["own"].split()) == int(row["clients"]) for row in rows if row["rule"] == "mean")


def test_every_claim_is_of_a_cell_that_a_matrix_runs():
    cells = set()
    for name in ("table1", "table2", "table3", "kinds", "genres", "rules"):
        matrix = read_matrix(ROOT / "configs" / "matrices" / f"smollm_{name}.yaml")
        for cell in matrix.cells(RunInputs(out=ROOT)):
            deal = smollm.deal_of(cell.config.fedspallm.deal, matrix.num_clients)
            rule = smollm.rule_of(cell.config.to_dict())
            cells.add((rule, deal, matrix.num_clients, cell.config.density, cell.config.seed))
    for claim in smollm.CLAIMS:
        for rule in {claim.rule or "mean", claim.against or "mean"}:
            wanted = {(rule, claim.deal, claim.clients, claim.density, seed) for seed in range(smollm.SEEDS)}
            assert wanted <= cells, claim


def row(seed: int, text: str, own: list[float], of_all: float, rule: str = "mean") -> dict[str, str]:
    key = {"rule": rule, "deal": "kinds", "clients": 2, "density": 0.5, "segments": 8, "seed": seed, "text": text}
    more = {"own": " ".join(map(str, own)), "global": of_all, "dense": 1.0, "megabytes_up": 1.0, "minutes": 1.0}
    return {name: str(value) for name, value in (key | more).items()}


def test_gains_are_differences_of_logarithms_and_the_seeds_decide(tmp_path, monkeypatch):
    monkeypatch.setattr(smollm, "DATA", tmp_path / "rows.csv")
    rows = [row(seed, text, [exp(2), exp(2)], exp(2 - 0.1 * (seed + 1))) for seed in range(2) for text in ("a", "b")]
    smollm.append_rows(smollm.DATA, rows)
    claim = smollm.Claim("x", "kinds", 2, 0.5)
    apart = smollm.compared(claim)
    assert apart.by_seed == pytest.approx((0.1, 0.2))
    assert smollm.verdict(apart) == "open: 2 of 3 seeds"
    smollm.append_rows(smollm.DATA, [row(2, text, [exp(2), exp(2)], exp(1.85)) for text in ("a", "b")])
    assert smollm.verdict(smollm.compared(claim)) == "shown"
    monkeypatch.setattr(smollm, "CLAIMS", (claim,))
    assert smollm.left_by_holm() == ({"x"}, 1)
    smollm.append_rows(smollm.DATA, [row(n, text, [], exp(1.5), "alps") for n in range(3) for text in ("a", "b")])
    ahead = smollm.compared(smollm.Claim("z", "kinds", 2, 0.5, rule="alps", against="mean"))
    assert ahead.by_seed == pytest.approx((0.4, 0.3, 0.35))
    at_home = smollm.compared(smollm.Claim("y", "kinds", 2, 0.5, own=True))
    assert at_home.by_seed == pytest.approx((-0.1, -0.2, -0.15))
    assert smollm.verdict(at_home) == "does not hold here"
    assert "| 50% | 3 | 7 / 7 / 6 | 7 / 7 / 6 |" in smollm.kinds_table()
