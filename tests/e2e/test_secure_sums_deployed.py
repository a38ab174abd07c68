"""Secure sums on Ray, and on three real nodes over gRPC with TLS, which sign their keys and know their peers."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from fedprune_app.launching import simulation
from fedprune_app.launching.credentials import make_node_key
from fedprune_app.launching.local import local_deployment
from fedprune_app.preflight.inputs import Placement, RunInputs
from fedprune_app.preflight.prepare import prepare
from fedprune_app.running import Session
from fedprune_app.testing import QUICK
from tests.e2e.deployed import DeployedRun, in_process_sha256
from tests.models.tiny_llm import text_folder, tiny_byte_model
from tests.strategies.test_fedspallm import SETTINGS

NODES = 3
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore::ResourceWarning")]


@pytest.fixture(scope="module", params=["fedavg", "fedspallm"])
def settings(request, tmp_path_factory):
    if request.param == "fedavg":
        return {**QUICK, "system": "fedavg", "num-server-rounds": 2}
    folder = tmp_path_factory.mktemp("inputs")
    model, data = tiny_byte_model(folder / "model", "llama"), text_folder(folder / "data")
    return {**SETTINGS, "fedspallm.merge": "hessians", "model": str(model), "data-dir": str(data)}


@pytest.fixture(scope="module")
def plain_sha256(settings, tmp_path_factory):
    return in_process_sha256(settings, tmp_path_factory.mktemp("plain"), NODES)


def test_a_run_on_ray_ends_with_the_model_of_a_plain_run(settings, plain_sha256, tmp_path):
    values = {**settings, "secure-sums": True, "out-dir": str(tmp_path)}
    with Session(Console(stderr=True)) as session:
        info = session.run(prepare(RunInputs(values), Placement("ray", NODES, num_workers=2)), tmp_path)
    assert info["final_sha256"] == plain_sha256


def test_registered_nodes_that_list_their_peers_sum_to_the_model_of_a_plain_run(settings, plain_sha256, tmp_path):
    """And where one of them lists a peer too few, it takes no part, and the run stops with a line that says so."""
    folder = tmp_path / "deployment"
    keys = [folder / f"node-{k}" / "node.key" for k in range(NODES)]
    for key in keys:
        key.parent.mkdir(0o700, parents=True)
    publics = [make_node_key(key).read_text().strip() for key in keys]
    peers = tmp_path / "peers"
    peers.write_text("\n".join(publics))
    nodes = [
        {
            "partition-id": k,
            "num-partitions": NODES,
            "data-dir": settings.get("data-dir", str(folder)),
            "node-key": str(keys[k]),
            "trusted-keys": str(peers),
            "require-secure-sums": True,
        }
        for k in range(NODES)
    ]
    given = {**settings, "secure-sums": True}
    with local_deployment(folder, nodes) as deployment:
        simulation.stage_app(folder / "app")
        run = DeployedRun.start(deployment, tmp_path / "secure", **given)
        assert run.finish()["final_sha256"] == plain_sha256
        peers.write_text("\n".join(publics[:2]))
        refused = DeployedRun.start(deployment, tmp_path / "refused", **given)
        refused.end()
    error = json.loads((tmp_path / "refused" / "run.json").read_text())["error"]
    assert "client 2 is none of those that the node's operator trusts" in str(error)
