"""The app on a real topology: SuperLink with TLS and registered keys, an executor, three SuperNodes, over gRPC."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from fedprune_app import client_app, launch, server_app
from fedprune_app.config import parse_config
from fedprune_app.deploy import Deployment, local_deployment, make_node_key
from fedprune_app.engine.inprocess import run_in_process

NODES = 3
SETTINGS = {"num-server-rounds": 2, "local-epochs": 1, "fraction-train": 1.0, "evaluate-every": 0, "min-replies": 1}


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deployment")
    with local_deployment(folder, [{"partition-id": k, "num-partitions": NODES} for k in range(NODES)]) as running:
        launch.stage_app(folder / "app")
        yield running


def started(deployment: Deployment, out: Path, **settings) -> tuple[str, dict]:
    config = parse_config({**SETTINGS, **{k.replace("_", "-"): v for k, v in settings.items()}, "out-dir": str(out)})
    return launch.submit(deployment.link, deployment.folder / "app", config.to_dict(), None), config.to_dict()


def finished(deployment: Deployment, out: Path, run_id: str) -> dict:
    status = launch.follow(deployment.link, run_id, out, lambda: None)
    info = json.loads((out / "run.json").read_text())
    assert (status, info["status"]) == ("finished:completed", "completed"), info.get("error")
    return info


def here(config: dict, out: Path) -> dict:
    """The same run in this process."""
    run_in_process(server_app.app, client_app.app, NODES, {**config, "out-dir": str(out)})
    return json.loads((out / "run.json").read_text())


def rounds(out: Path) -> list[dict]:
    try:
        return [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    except FileNotFoundError:
        return []


def until(condition, seconds=180.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


def test_a_deployed_run_is_the_same_as_in_process(tmp_path):
    """The rehearsal as users run it, with nodes of different capacity, and nothing left running."""
    out = tmp_path / "run"
    settings = [f"{key}={value}" for key, value in SETTINGS.items()]
    command = [sys.executable, "-m", "fedprune_app.cli", "deploy", "local", "--nodes", str(NODES), *settings]
    done = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    info = json.loads((out / "run.json").read_text())
    assert info["final_sha256"] == here(info["config"], tmp_path / "here")["final_sha256"]
    assert [row["replies"] for row in rounds(out)] == [NODES, NODES]
    assert not any((out / "clients").glob("*"))
    for k in range(NODES):  # each node kept its own state, and no other's
        assert [path.name for path in (out / "deployment" / f"node-{k}" / "state").glob("*/*")] == [f"{k:05d}"]
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(out) in " ".join(p.info["cmdline"] or ())]


@pytest.mark.slow
@pytest.mark.parametrize("system", ["dispfl", "subfedavg-hy", "fedavg", "fedfomo"])
def test_every_kind_of_message_travels(deployment, tmp_path, system):
    settings = {"model": "cnn-small-bn"} if system == "subfedavg-hy" else {}
    more = {"fedfomo.candidates": 2} if system == "fedfomo" else {}
    gossip = {"dispfl.gossip": "client", "dispfl.neighbours": 2} if system == "dispfl" else {}
    run_id, config = started(deployment, tmp_path / "run", system=system, **settings, **more, **gossip)
    info = finished(deployment, tmp_path / "run", run_id)
    assert info["final_sha256"] == here(config, tmp_path / "here")["final_sha256"]


@pytest.mark.slow
def test_a_node_that_speaks_without_tls_or_is_not_registered_is_refused(deployment):
    (port,) = launch.free_ports(1)
    command = [launch.tool("flower-supernode"), "--superlink", f"127.0.0.1:{deployment.fleet_port}", "--insecure"]
    deployment._spawn("plaintext", [*command, "--port", str(port), "--max-retries", "2"])
    make_node_key(deployment.folder / "stranger" / "node.key")
    deployment.start_node("stranger", {"partition-id": 7, "num-partitions": 8})
    until(lambda: deployment.processes["stranger"].poll() is not None, 60)
    until(lambda: deployment.processes["plaintext"].poll() is not None, 60)
    assert deployment.processes["stranger"].returncode != 0
    assert deployment.processes["plaintext"].returncode != 0
    listed = launch.flwr(deployment.link, "supernode", "list", "local")["nodes"]
    assert sorted(node["status"] for node in listed) == ["online"] * NODES
    for name in ("stranger", "plaintext"):
        deployment.kill(name)


@pytest.mark.slow
def test_a_supernode_that_is_killed_comes_back_and_goes_on_from_its_own_state(deployment, tmp_path):
    out = tmp_path / "run"
    run_id, _ = started(deployment, out, num_server_rounds=5, deadline_seconds=40.0, system="standalone")
    until(lambda: len(rounds(out)) >= 1)
    deployment.kill("node-1")
    until(lambda: any(row["failures"] for row in rounds(out)))
    deployment.start_node("node-1", {**node(1), "state-dir": str(deployment.folder / "node-1" / "state")})
    info = finished(deployment, out, run_id)
    assert info["rounds_completed"] == 5
    assert rounds(out)[-1]["replies"] == NODES, "it has come back"
    assert not any("lost" in note for row in rounds(out) for note in row["notes"])


def node(k: int) -> dict:
    return {"partition-id": k, "num-partitions": NODES}


@pytest.mark.slow
def test_a_run_survives_a_restart_of_the_superlink(deployment, tmp_path):
    out = tmp_path / "run"
    run_id, config = started(deployment, out, num_server_rounds=4)
    until(lambda: len(rounds(out)) >= 1)
    deployment.kill("superlink")
    time.sleep(3)
    deployment.start_superlink()
    info = finished(deployment, out, run_id)
    assert info["final_sha256"] == here(config, tmp_path / "here")["final_sha256"]


@pytest.mark.slow
def test_a_killed_serverapp_resumes_to_the_same_models(deployment, tmp_path):
    out = tmp_path / "run"
    run_id, config = started(deployment, out, num_server_rounds=4)
    until(lambda: len(rounds(out)) >= 2)
    executor = psutil.Process(deployment.processes["superexec"].pid)
    (app,) = [p for p in executor.children(recursive=True) if "flwr-serverapp" in " ".join(p.cmdline())]
    app.kill()
    launch.stop_run(deployment.link, run_id)
    again = launch.submit(deployment.link, deployment.folder / "app", {**config, "resume-from": str(out)}, None)
    info = finished(deployment, out, again)
    assert [row["round"] for row in rounds(out)] == [1, 2, 3, 4]
    assert info["final_sha256"] == here(config, tmp_path / "here")["final_sha256"]
