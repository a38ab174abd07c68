"""What a resumed run may change, and which options keep it from that."""

from __future__ import annotations

import pytest

from fedprune_app.config import OPTIONS, check_resumable, parse_config
from tests.refusing import refuses

PRIVATE = {"dp.enabled": True, "dp.target-epsilon": 8.0, "subfedavg.gate-split": "none", "dp.accuracies": "open"}
NOISED = {**PRIVATE, "dp.accuracies": "noised"}


def resume(before, **changed):
    began = parse_config(before)
    changes = {key.replace("_", "-"): value for key, value in changed.items()}
    check_resumable(began.to_dict(), parse_config({**began.to_dict(), **changes}))


def test_where_how_long_and_how_watched_a_run_is_may_change():
    changeable = {key for key, option in OPTIONS.items() if option.resumable}
    assert changeable == {
        "num-server-rounds",
        "evaluate-every",
        "evaluate-clients",
        "deadline-seconds",
        "startup-seconds",
        "min-clients",
        "min-replies",
        "out-dir",
        "state-dir",
        "resume-from",
        "accept-loss",
        "data-dir",
        "fedltp.public-data-dir",
        "download",
        "tracking",
        "cohort",
        "cuda-graphs",
        "plugins",
    }
    before = parse_config({}).to_dict()
    for key in changeable:
        before[key] = "something else"
    check_resumable(before, parse_config({}))


def test_everything_else_is_as_the_run_began():
    for key in (key for key, option in OPTIONS.items() if not option.resumable):
        with refuses(key, allowed="'another'", condition="when resuming"):
            check_resumable({**parse_config({}).to_dict(), key: "another"}, parse_config({}))


@pytest.mark.parametrize(
    ("before", "why"),
    [
        ({"system": "dispfl"}, "dispfl.prune-rate falls over these rounds"),
        (PRIVATE, "dp.target-epsilon is spread over these rounds"),
        ({**NOISED, "dp.planned-rounds": 5}, "the noise was chosen for so many evaluations"),
        ({**NOISED, "dp.planned-rounds": 5, "evaluate-every": 0}, "the noise was chosen for so many evaluations"),
    ],
)
def test_a_system_says_why_its_number_of_rounds_is_fixed(before, why):
    with refuses("num-server-rounds", 9, allowed="20", hint=why):
        resume(before, num_server_rounds=9)


@pytest.mark.parametrize(
    "before",
    [
        {},
        {"system": "dispfl", "dispfl.annealing-rounds": 20},
        {"system": "dispfl", "dispfl.prune-rate": 0},
        {**PRIVATE, "dp.planned-rounds": 20},
        {"system": "fedp3"},
    ],
)
def test_a_run_whose_rounds_do_not_depend_on_their_number_may_be_longer(before):
    resume(before, num_server_rounds=9)


def test_evaluations_over_which_a_target_is_spread_stay_as_many():
    with refuses("evaluate-every", 2):
        resume(NOISED, evaluate_every=2)
    resume(PRIVATE, evaluate_every=2)
    for system in ("fedavg-ft", "fedltp"):
        with refuses("evaluate-every", 2):
            resume({**PRIVATE, "dp.planned-rounds": 20, "system": system}, evaluate_every=2)


def test_the_ledgers_of_a_private_run_stay_where_they_are():
    with refuses("state-dir", "/b"):
        resume({**PRIVATE, "dp.planned-rounds": 20}, state_dir="/b")
    resume({}, state_dir="/b")
