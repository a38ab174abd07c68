"""A simulation on a Ray cluster that is there already: two nodes on this machine."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from fedprune_app import client_app, server_app
from fedprune_app.engine.simulated_grid import run_in_process
from fedprune_app.launching import processes
from fedprune_app.preflight.inputs import Placement
from tests.refusing import refuses

QUICK = ["system=fedavg", "num-server-rounds=3", "local-epochs=1", "fraction-train=1.0", "evaluate-every=3"]


@pytest.fixture
def token_file(tmp_path):
    """With the secret of the cluster."""
    path = tmp_path / "ray.token"
    path.write_text("5ec2e7" * 10)
    return path


@pytest.fixture
def cluster(tmp_path, token_file):
    """Its address and its two raylets, of one CPU each."""
    (port,) = processes.free_ports(1)
    ray = [processes.tool("ray"), "start", "--block", "--num-cpus", "1", "--disable-usage-stats"]
    folder = tempfile.mkdtemp(prefix="ray")  # in the common one, later simulations would look for this cluster; short,
    # for its sockets' paths have 107 characters
    head = ["--head", "--port", str(port), "--node-ip-address", "127.0.0.1", "--include-dashboard", "false"]
    head += ["--temp-dir", folder]
    other = ["--address", f"127.0.0.1:{port}", "--node-ip-address", "127.0.0.1"]
    environment = {**os.environ, "RAY_worker_niceness": "0", "RAY_raylet_start_wait_time_s": "300"}
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token_file)}
    started = []
    try:
        for name, arguments in (("head", head), ("other", other)):
            log = tmp_path / f"ray-{name}.log"
            process = processes.spawn([*ray, *arguments], environment, log)
            started.append(process)
            _until(lambda log=log: "--block" in log.read_text(), process, log)
        raylets = [_raylet(process) for process in started]
        yield f"127.0.0.1:{port}", raylets
    finally:
        for process in reversed(started):
            processes.end(process)
        shutil.rmtree(folder, ignore_errors=True)


def _until(condition, process, log: Path) -> None:
    for _ in range(4000):
        if condition():
            return
        assert process.poll() is None, log.read_text()
        time.sleep(0.1)
    raise AssertionError(log.read_text())


def _raylet(process) -> psutil.Process:
    found = [p for p in psutil.Process(process.pid).children(recursive=True) if p.name() == "raylet"]
    assert len(found) == 1
    return found[0]


def _actors(raylet: psutil.Process) -> set[int]:
    found = set()
    for child in raylet.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "SimulatedClients" in " ".join(child.cmdline()):
                found.add(child.pid)
    return found


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_clients_run_on_both_nodes_of_a_cluster_and_end_with_the_same_models(cluster, token_file, tmp_path):
    address, raylets = cluster
    out = tmp_path / "run"
    environment = {**os.environ, "RAY_AUTH_TOKEN_PATH": str(token_file)}
    command = [sys.executable, "-m", "fedprune_app.cli", "run", "--ray-address", address, "--clients", "4"]
    with (tmp_path / "run.log").open("w") as log:
        run = subprocess.Popen([*command, "--out", str(out), *QUICK], stdout=log, stderr=log, env=environment)
    seen: list[set[int]] = [set(), set()]
    while run.poll() is None:
        for known, raylet in zip(seen, raylets, strict=True):
            known |= _actors(raylet)
        with suppress(subprocess.TimeoutExpired):
            run.wait(timeout=0.3)
    assert run.returncode == 0, (tmp_path / "run.log").read_text()
    assert [len(actors) for actors in seen] == [1, 1], "one CPU, one actor, on either node"
    info = json.loads((out / "run.json").read_text())
    run_in_process(server_app.app, client_app.app, 4, {**info["config"], "out-dir": str(tmp_path / "here")})
    assert json.loads((tmp_path / "here" / "run.json").read_text())["final_sha256"] == info["final_sha256"]
    for raylet in raylets:
        assert raylet.is_running(), "the cluster is not ours to stop"
        psutil.wait_procs([psutil.Process(pid) for pid in _actors(raylet)], timeout=30)
        assert not _actors(raylet)
    # who has no token is refused, in a line
    refused = subprocess.run([*command, "--out", str(tmp_path / "refused"), *QUICK], capture_output=True, text=True)
    assert refused.returncode == 1
    last = refused.stderr.strip().splitlines()[-1]
    assert re.fullmatch(rf"failed: Failed to connect to Ray cluster at [\d.]+:{address.split(':')[1]}", last), last
    assert not _actors(raylets[0])


@pytest.mark.parametrize("address", ["here", "127.0.0.1:", ":6379", "127.0.0.1:99999", "127.0.0.1:ray"])
def test_an_address_that_is_none_is_refused(address):
    with refuses("--ray-address", address):
        Placement(ray_address=address)


def test_a_cluster_that_is_not_there_is_said_at_once():
    (port,) = processes.free_ports(1)
    with refuses("--ray-address", f"127.0.0.1:{port}", hint="refused"):
        Placement(ray_address=f"127.0.0.1:{port}")


@pytest.mark.parametrize("more", [{"engine": "inprocess"}, {"superlink": "real"}, {"nodes": ({"partition-id": 0},)}])
def test_a_cluster_is_for_simulations_on_ray(more):
    with refuses("--ray-address", condition="engine"):
        Placement(ray_address="127.0.0.1:6379", **more)
