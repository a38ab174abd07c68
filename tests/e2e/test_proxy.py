"""Behind a proxy, as on most clusters: what runs on this machine is not looked for through it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from fedprune_app.deploy import local_deployment

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(autouse=True)
def dead_proxy(monkeypatch):
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
        monkeypatch.setenv(name.upper(), "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)


def test_a_deployment_starts_and_its_nodes_connect_behind_a_proxy(tmp_path):
    with local_deployment(tmp_path, [{"partition-id": 0, "num-partitions": 1}]) as running:
        assert [node["status"] for node in running._nodes()] == ["online"]


def test_a_run_on_ray_completes_behind_a_proxy(tmp_path):
    command = [sys.executable, "-m", "fedprune_app.cli", "run", "system=fedavg", "num-server-rounds=1"]
    command += ["local-epochs=1", "--clients", "2", "--workers", "1", "--out", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "completed"
