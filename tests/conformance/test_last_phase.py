"""After the last round all clients may train once more: that is told beside what the paper's method leaves."""

from __future__ import annotations

import pytest
from rich.console import Console

from fedprune_app.config import check_effects, parse_config
from fedprune_app.preflight.inputs import Placement, RunInputs
from fedprune_app.preflight.prepare import prepare
from fedprune_app.registry import SYSTEMS
from fedprune_app.results.reader import load_run
from fedprune_app.running import Session
from fedprune_app.testing import cut_after, lasting
from tests.conformance.conftest import CLIENTS, PRIVATE, ROUNDS, of_system
from tests.refusing import refuses

IMAGES = [
    of_system(name, full=name not in ("dispfl", "subfedavg"))
    for name, system in SYSTEMS.items()
    if not system.reads_text and name not in ("ldp-fedp3", "dpfed", "fedspa")  # private by nature
]
LAST = {"last_phase": True}
COLUMNS = ("accuracy_last_phase_mean", *(f"last_phase_{cost}" for cost in ("bytes_up", "bytes_down", "flops")))
VALIDATION = "accuracy_last_phase_validation"


def given(system: str) -> dict[str, object]:
    return {"last_phase": True, **({"dp.enabled": False} if system == "fedltp" else {})}


@pytest.mark.parametrize("system", IMAGES)
def test_all_clients_train_once_more_and_change_nothing_of_the_run(conform, system):
    run, without = conform(system, **given(system)), conform(system, **{**given(system), "last_phase": False})
    assert run.sha256 == without.sha256
    after = {row["partition"]: row["accuracy_last_phase"] for row in run.clients if "accuracy_last_phase" in row}
    assert len(after) == CLIENTS
    accuracy, *costs = (run.rounds[-1].get(column) for column in COLUMNS)
    assert accuracy == pytest.approx(sum(after.values()) / CLIENTS)
    if system in ("fedavg-ft", "dpsgd-ft"):
        assert (accuracy, costs) == (run.rounds[-1]["accuracy_personal_mean"], [0, 0, None])
    else:
        assert all(cost > 0 for cost in costs)
    only_here = {*COLUMNS, f"{VALIDATION}_mean"}
    rest = [{key: value for key, value in row.items() if key not in only_here} for row in run.rounds]
    assert lasting(rest) == lasting(without.rounds)
    assert not any("accuracy_last_phase" in row for row in without.clients)


@pytest.mark.parametrize(
    "system", [of_system("dispfl"), of_system("subfedavg", full=True), of_system("ditto", full=True)]
)
def test_a_run_that_is_resumed_has_the_same_last_phase(conform, tmp_path, system):
    whole = conform(system, **LAST)
    cut = cut_after(whole, ROUNDS - 1, tmp_path / "cut")
    resumed = conform(system, resume_from=str(cut), **LAST)
    assert (resumed.sha256, lasting(resumed.clients)) == (whole.sha256, lasting(whole.clients))
    assert lasting(resumed.rounds) == lasting(whole.rounds)


@pytest.mark.parametrize(
    "system",
    [of_system("subfedavg"), *(of_system(name, full=True) for name in ("fedavg", "standalone", "ditto", "mtl"))],
)
def test_a_last_phase_leaves_what_one_more_round_of_all_clients_would(conform, system):
    run = conform(system, fraction_train=1.0, **LAST)
    longer = conform(system, fraction_train=1.0, num_server_rounds=ROUNDS + 1)
    after = [row for row in run.clients if "accuracy_last_phase" in row]
    last = [row for row in longer.clients if row["round"] == ROUNDS + 1]
    assert [row["accuracy_last_phase"] for row in after] == [row["accuracy_personal"] for row in last]
    validation = [row[VALIDATION] for row in after]
    assert run.rounds[-1][f"{VALIDATION}_mean"] == pytest.approx(sum(validation) / CLIENTS)
    if SYSTEMS[system].client.validates == "personal":  # FedAvg's rounds validate the received model
        assert validation == [row["accuracy_validation"] for row in last]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_last_phase_is_the_same_in_worker_processes(conform, settings_of, tmp_path, num_workers):
    values = {**settings_of("subfedavg"), "last-phase": True, "out-dir": str(tmp_path), "deadline-seconds": 600.0}
    with Session(Console(stderr=True)) as session:
        info = session.run(prepare(RunInputs(values), Placement("ray", CLIENTS, num_workers=num_workers)), tmp_path)
    own, run = conform("subfedavg", **LAST), load_run(tmp_path)
    assert info["final_sha256"] == own.sha256
    assert [row["accuracy_last_phase"] for row in run.clients if "accuracy_last_phase" in row] == [
        row["accuracy_last_phase"] for row in own.clients if "accuracy_last_phase" in row
    ]


@pytest.mark.parametrize("settings", [{"system": "fedspallm"}, {"system": "fedavg", **PRIVATE}])
def test_language_models_and_private_runs_have_no_last_phase(settings):
    config = parse_config({**settings, "last-phase": True})
    with refuses("last-phase", True):
        check_effects(["last-phase"], config)
