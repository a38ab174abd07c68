"""The rehearsal of a deployment, with its transcript: every system over gRPC to three nodes, and who is refused.

`make rehearsal` runs this and prints the transcript.
"""

from __future__ import annotations

import pytest

from fedprune_app.launching import processes
from fedprune_app.launching.credentials import make_node_key
from tests.e2e.deployed import DeployedRun, in_process_sha256, nodes_with_the_app, until
from tests.models.tiny_llm import text_folder, tiny_byte_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

NODES = 3
SYSTEMS = ["subfedavg", "dispfl", "fedp3", "fedltp", "fedspallm"]


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    with nodes_with_the_app(tmp_path_factory.mktemp("deployment"), NODES) as running:
        yield running


def settings(system, tmp_path, data) -> dict:
    """What a system needs beside the embedded digits, and how it is quick."""
    if system == "fedltp":
        return {"steps-per-epoch": 4, "fedltp.tickets": 1, "fedltp.ticket-iterations": 10, "dp.enabled": True} | {
            "dp.noise-multiplier": 1.0,
            "dp.count-scale": 20.0,
        }
    if system != "fedspallm":
        return {}
    texts, model = text_folder(data), tiny_byte_model(tmp_path / "model", "llama")
    options = {"segments": 4, "segment-length": 24, "window": 32}
    return {"dataset": "text", "data-dir": str(texts), "model": str(model)} | {
        f"fedspallm.{name}": value for name, value in options.items()
    }


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_system_gives_the_same_models_over_grpc_as_in_process(deployment, tmp_path, transcript, system):
    own = settings(system, tmp_path, deployment.folder / "data")
    run = DeployedRun.start(deployment, tmp_path / "run", system=system, **own)
    info = run.finish()
    assert [row["failures"] for row in run.rounds] == [0, 0]
    here = in_process_sha256(run.config, tmp_path / "here", NODES)
    assert info["final_sha256"] == here
    seconds = ", ".join(f"{row['seconds']:.1f}" for row in run.rounds)
    moved = sum(row["bytes_up"] + row["bytes_down"] for row in run.rounds)
    transcript(f"{system}: 2 rounds of {NODES} nodes over gRPC, {seconds} s, {moved} bytes of training messages")
    transcript(f"  deployed   sha256 {info['final_sha256']}\n  in process sha256 {here}")


def test_strangers_are_refused(deployment, transcript):
    """Judged by their exit and by the list of nodes: what they say of it is Flower's."""
    (port,) = processes.free_ports(1)
    plaintext = [processes.tool("flower-supernode"), "--superlink", deployment.node_address, "--insecure"]
    deployment._spawn("plaintext", [*plaintext, "--port", str(port), "--max-wait-time", "10"])
    make_node_key(deployment.folder / "stranger" / "node.key")
    deployment.start_node("stranger", {"partition-id": 7, "num-partitions": 8})
    for name, what in (("plaintext", "a node without TLS"), ("stranger", "a node with a key that is not registered")):
        process = deployment.processes[name]
        until(lambda process=process: process.poll() is not None)
        assert process.returncode != 0
        said = deployment.log_file(name).read_text().splitlines()
        deployment.kill(name)
        reason = next((line for line in said if any(w in line for w in ("rror", "denied", "Failed"))), said[-1]).strip()
        transcript(f"{what} is refused, exit code {process.returncode}: {reason[:160]}")
    listed = processes.flwr(deployment.link, "supernode", "list", "local")["nodes"]
    assert [node["status"] for node in listed] == ["online"] * NODES
    transcript("nodes: " + ", ".join(f"{node['node-id']} {node['status']}" for node in listed))
