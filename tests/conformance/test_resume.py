"""Every system goes on from where it stopped, to the same models."""

from __future__ import annotations

import re
import shutil

import pytest

from fedprune_app.config import ConfigError
from tests.conformance.conftest import ROUNDS, SYSTEM


def cut_after(whole, round, folder):
    """A copy of a run's folder as a kill leaves it: checkpoints end with ``round``, clients are ahead of them."""
    cut = shutil.copytree(whole.folder, folder)
    for later in range(round + 1, ROUNDS + 1):
        (cut / "checkpoints" / f"round-{later:05d}.safetensors").unlink()
    return cut


@pytest.mark.parametrize("round", range(1, ROUNDS))
@SYSTEM
def test_a_run_interrupted_after_any_round_resumes_to_the_same_models(conform, tmp_path, system, round):
    whole = conform(system)
    cut = cut_after(whole, round, tmp_path / "cut")
    resumed = conform(system, resume_from=str(cut))
    assert resumed.info["resumed_after_rounds"] == [round]
    assert resumed.sha256 == whole.sha256
    assert [row["round"] for row in resumed.rounds] == list(range(1, ROUNDS + 1))


@SYSTEM
def test_a_run_resumed_for_longer_is_the_run_of_that_length_or_refused_with_one_line(conform, tmp_path, system):
    short = shutil.copytree(conform(system, num_server_rounds=ROUNDS - 1).folder, tmp_path / "short")
    try:
        longer = conform(system, resume_from=str(short), num_server_rounds=ROUNDS).sha256
    except ConfigError as error:
        refusal = str(error)
        longer = None
    if longer is None:
        assert re.search("num-server-rounds is 3, allowed when resuming: 2, as the run began; .*", refusal)
    else:
        assert longer == conform(system).sha256
