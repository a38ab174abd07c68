"""The app on a real topology: SuperLink with TLS and registered keys, an executor, three SuperNodes, over gRPC."""

from __future__ import annotations

import json
import subprocess
import sys

import psutil
import pytest

from tests.e2e.deployed import SETTINGS, DeployedRun, in_process_sha256, nodes_with_the_app

NODES = 3


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    with nodes_with_the_app(tmp_path_factory.mktemp("deployment"), NODES) as running:
        yield running


@pytest.mark.programs
def test_a_deployed_run_is_the_same_as_in_process(tmp_path):
    """The rehearsal as users run it, with nodes of different capacity, and nothing left running."""
    out = tmp_path / "run"
    settings = [f"{key}={value}" for key, value in SETTINGS.items()]
    command = [sys.executable, "-m", "fedprune_app.cli", "deploy", "local", "--nodes", str(NODES), *settings]
    done = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True, timeout=1000)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert f"starting a SuperLink and {NODES} nodes; their logs: {out / 'deployment'}/*/log.txt" in lines
    rounds = [line.partition("  ")[0] for line in lines if ": round " in line]
    assert rounds == ["subfedavg: round 1 of 2", "subfedavg: round 2 of 2"]
    info = json.loads((out / "run.json").read_text())
    assert info["final_sha256"] == in_process_sha256(info["config"], tmp_path / "here", NODES)
    rounds = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    assert [row["replies"] for row in rounds] == [NODES, NODES]
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
    run = DeployedRun.start(deployment, tmp_path / "run", system=system, **settings, **more, **gossip)
    assert run.finish()["final_sha256"] == in_process_sha256(run.config, tmp_path / "here", NODES)
