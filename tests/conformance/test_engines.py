"""Every system gives the same models on every engine, with one worker or two. Slow: Ray starts anew for each run."""

from __future__ import annotations

import pytest
from rich.console import Console

from fedprune_app.preflight.inputs import Placement, RunInputs
from fedprune_app.preflight.prepare import prepare
from fedprune_app.running import Session
from tests.conformance.conftest import CLIENTS, SYSTEM

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::ResourceWarning")]


@pytest.fixture(scope="module", params=["ray with 1 worker", "ray with 2 workers", "flower", "gRPC with TLS"])
def session(request):
    """One session for all systems, and its placement; real nodes stay connected from run to run."""
    placement = {
        "ray with 1 worker": Placement("ray", CLIENTS, num_workers=1),
        "ray with 2 workers": Placement("ray", CLIENTS, num_workers=2),
        "flower": Placement("flower", CLIENTS, num_workers=2),
        "gRPC with TLS": Placement(
            num_clients=CLIENTS,
            # a node's own random numbers would be other ones in every run of a private system
            nodes=tuple({"partition-id": k, "num-partitions": CLIENTS, "secure-rng": False} for k in range(CLIENTS)),
        ),
    }[request.param]
    with Session(Console(stderr=True)) as opened:
        yield opened, placement


@SYSTEM
def test_a_system_gives_the_same_models_as_in_one_process(conform, settings_of, session, tmp_path, system):
    opened, placement = session
    values = {**settings_of(system), "out-dir": str(tmp_path), "deadline-seconds": 600.0}
    assert opened.run(prepare(RunInputs(values), placement), tmp_path)["final_sha256"] == conform(system).sha256
