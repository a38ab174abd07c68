"""Every system goes on from where it stopped, to the same models."""

from __future__ import annotations

import re
import shutil

import pytest

from fedprune_app.config import ConfigError
from fedprune_app.registry import SYSTEMS
from fedprune_app.testing import cut_after, lasting
from tests.conformance.conftest import ROUNDS, TWO, TWO_SYSTEMS, VARIANTS, of_system


@pytest.mark.parametrize(
    ("case", "round"),
    [
        *(of_system(system, round, full=system not in TWO) for system in SYSTEMS for round in range(1, ROUNDS)),
        *(of_system(name, ROUNDS - 1, full=True) for name, more in VARIANTS.items() if "num-server-rounds" not in more),
    ],
)
def test_a_run_interrupted_after_any_round_resumes_to_the_same_models_and_records(conform, tmp_path, case, round):
    whole = conform(case)
    cut = cut_after(whole, round, tmp_path / "cut")
    resumed = conform(case, resume_from=str(cut))
    assert resumed.info["resumed_after_rounds"] == [round]
    assert resumed.sha256 == whole.sha256
    assert lasting(resumed.rounds) == lasting(whole.rounds)
    assert lasting(resumed.clients) == lasting(whole.clients)


@TWO_SYSTEMS
def test_a_run_resumed_for_longer_is_the_run_of_that_length_or_refused_with_one_line(conform, tmp_path, system):
    short = shutil.copytree(conform(system, num_server_rounds=ROUNDS - 1).folder, tmp_path / "short")
    try:
        longer = conform(system, resume_from=str(short), num_server_rounds=ROUNDS).sha256
    except ConfigError as error:
        refusal = str(error)
        longer = None
    if longer is None:
        assert re.search("num-server-rounds is 3", refusal)
    else:
        assert longer == conform(system).sha256
