"""Secure sums in every system that has them: the models and records are those of a run without, but for bytes."""

from __future__ import annotations

import pytest

from fedprune_app.config import ConfigError
from fedprune_app.registry import SYSTEMS
from fedprune_app.testing import cut_after, lasting
from tests.conformance.conftest import ROUNDS, VARIANTS, of_system

SUMMED = [name for name, system in SYSTEMS.items() if not system.client.not_summed]
CASES = [*SUMMED, *(name for name, more in VARIANTS.items() if more["system"] in SUMMED)]
ALL = pytest.mark.parametrize("case", [of_system(case, full=case != "fedavg") for case in CASES])
PUBLIC = [case for case in CASES if case != "dpfed"]  # private by nature, with no last phase


def test_systems_whose_server_adds_replies_up_and_no_others_have_secure_sums():
    assert {*SUMMED} == {"fedavg", "fedavg-ft", "fedprox", "dpfed", "ditto", "lg-fedavg"}


@ALL
def test_a_run_with_secure_sums_is_the_run_without(conform, case):
    plain, secure = conform(case), conform(case, secure_sums=True)
    assert secure.sha256 == plain.sha256
    assert lasting(secure.rounds) == lasting(plain.rounds)
    assert lasting(secure.clients) == lasting(plain.clients)


@ALL
def test_a_run_with_secure_sums_that_is_resumed_has_the_same_models(conform, tmp_path, case):
    whole = conform(case, secure_sums=True)
    resumed = conform(case, resume_from=str(cut_after(whole, ROUNDS - 1, tmp_path / "cut")), secure_sums=True)
    assert resumed.sha256 == whole.sha256
    assert lasting(resumed.rounds) == lasting(whole.rounds)


@pytest.mark.parametrize("case", [of_system(case, full=case != "fedavg") for case in PUBLIC])
@pytest.mark.parametrize("more", [{"last_phase": True}, {"holdout_clients": 3}])
def test_phases_after_the_last_round_are_the_same_with_secure_sums(conform, case, more):
    threshold = {"secure_sums_threshold": 2} if "holdout_clients" in more else {}
    plain, secure = conform(case, **more), conform(case, secure_sums=True, **threshold, **more)
    assert secure.sha256 == plain.sha256
    assert lasting(secure.rounds) == lasting(plain.rounds)


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ({"holdout_clients": 1}, "holdout-clients is 1, allowed with secure-sums: 0, or at least 3"),
        (
            {"fraction_train": 0.4},
            "secure-sums is true, allowed with 5 clients and fraction-train 0.4: false; a round has 2, and a sum "
            "needs 3 or more",
        ),
    ],
)
def test_too_few_clients_for_a_sum_are_told_before_the_run(conform, more, line):
    with pytest.raises(ConfigError, match=line):
        conform("fedavg", secure_sums=True, **more)
