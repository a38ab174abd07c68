"""The environment in which Flower's and Ray's programs are started."""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor

import grpc
import httpx
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from rich.console import Console

from fedprune_app import server_app
from fedprune_app.engine.simulation import Workers
from fedprune_app.files import scratch_folder
from fedprune_app.launching import local, processes, simulation
from fedprune_app.launching.processes import CLIENTS_VARIABLE
from fedprune_app.preflight.inputs import Placement, RunInputs
from fedprune_app.preflight.prepare import prepare
from fedprune_app.running import run

LOOPBACK = "localhost,127.0.0.1,::1"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"NO_PROXY": LOOPBACK, "no_proxy": LOOPBACK}),
        ({"NO_PROXY": ""}, {"NO_PROXY": LOOPBACK, "no_proxy": LOOPBACK}),
        ({"NO_PROXY": "a.org"}, {"NO_PROXY": f"a.org,{LOOPBACK}", "no_proxy": f"a.org,{LOOPBACK}"}),
        ({"no_proxy": "a.org, b"}, {"NO_PROXY": f"a.org, b,{LOOPBACK}", "no_proxy": f"a.org, b,{LOOPBACK}"}),
        ({"NO_PROXY": "A", "no_proxy": "b"}, {"NO_PROXY": f"b,{LOOPBACK}", "no_proxy": f"b,{LOOPBACK}"}),
        ({"no_proxy": "*"}, {"NO_PROXY": "*", "no_proxy": "*"}),
    ],
    ids=str,
)
def test_this_machine_is_added_to_what_a_user_has_excepted_from_the_proxy(before, after):
    given = {"http_proxy": "http://127.0.0.1:9", "OTHER": "x", **before}
    once = processes.direct_on_loopback(given)
    assert once == {**given, **after}
    assert processes.direct_on_loopback(once) == once


def test_the_http_client_of_flowers_programs_then_asks_no_proxy_for_this_machine(monkeypatch):
    for name, value in processes.direct_on_loopback({"http_proxy": "http://127.0.0.1:9", "no_proxy": "a.org"}).items():
        monkeypatch.setenv(name, value)
    with httpx.Client() as client:
        by_proxy = client._transport_for_url(httpx.URL("http://elsewhere.org"))
        for host in ("127.0.0.1", "localhost", "[::1]"):
            assert client._transport_for_url(httpx.URL(f"http://{host}:80")) is client._transport is not by_proxy


@pytest.mark.parametrize("proxy", ["http_proxy", "grpc_proxy"])
def test_health_is_asked_without_a_proxy(monkeypatch, proxy):
    monkeypatch.setenv(proxy, "http://127.0.0.1:9")
    server = grpc.server(ThreadPoolExecutor(1))
    servicer = health.HealthServicer()
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        assert local.is_healthy(f"127.0.0.1:{port}", timeout_seconds=60)
    finally:
        server.stop(None)


@pytest.mark.parametrize(
    ("given", "mode"),
    [
        ({}, None),
        ({"RAY_AUTH_TOKEN": "x"}, "token"),
        ({"RAY_AUTH_TOKEN_PATH": "/x"}, "token"),
        ({"RAY_AUTH_TOKEN": "x", "RAY_AUTH_MODE": "disabled"}, None),
    ],
    ids=str,
)
def test_a_users_token_for_a_cluster_is_used(monkeypatch, given, mode):
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert simulation._ray_of_others("head:6379").get("RAY_AUTH_MODE") == mode


def test_a_ray_of_our_own_has_another_token_each_time_whatever_the_user_has(monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_AUTH_TOKEN", "weak")
    tokens = {simulation._ray_of_our_own(tmp_path)["RAY_AUTH_TOKEN"] for _ in range(2)}
    assert len(tokens) == 2
    assert all(len(token) == 64 for token in tokens)


def test_what_a_killed_launcher_left_goes_when_the_next_simulation_starts(monkeypatch):
    with scratch_folder() as place:
        monkeypatch.setenv("RAY_TMPDIR", str(place))
        killed = place / ".fedprune-0123abcd.tmp"
        killed.mkdir()
        with simulation.started(place / "no-app", {}, 1, 1, 0) as started:
            folder = started.log_file.parent
            assert not killed.exists()
            assert len(folder.name) == len(killed.name)  # Ray's sockets are below, and have paths of at most 107 bytes
        assert not folder.exists()


@pytest.mark.parametrize(("processes", "gpus"), [(1, 1), (3, 2), (7, 1), (6, 4), (2, 4), (97, 1), (5, 0)])
def test_processes_find_room_on_the_gpus_that_they_share(processes, gpus):
    share = Workers(processes, gpus).resources()["num_gpus"]
    if not gpus:
        assert share == 0
        return
    assert share == pytest.approx(round(share, 4), abs=1e-12)  # Ray rounds to that
    on_each = int(1 / round(share, 4))
    assert on_each * gpus >= processes
    assert (on_each - 1) * gpus < processes  # no less than there is for each


@pytest.mark.parametrize("engine", ["ray", "flower"])
def test_a_simulation_tells_its_server_how_many_clients_there_are(monkeypatch, tmp_path, engine):
    started = []
    monkeypatch.setattr(processes, "spawn", lambda command, environment, log: started.append(environment))
    monkeypatch.setattr(processes, "end", lambda process: None)
    with simulation.started(tmp_path, {}, 7, 1, 0, engine=engine):
        monkeypatch.setenv(CLIENTS_VARIABLE, started[0][CLIENTS_VARIABLE])
    assert server_app._num_simulated(object()) == 7  # as Flower's grid, which does not say so
    monkeypatch.delenv(CLIENTS_VARIABLE)
    assert server_app._num_simulated(object()) is None  # real nodes


def test_a_copy_of_a_servers_folder_does_not_say_how_its_resumed_run_ended(federate, monkeypatch):
    """The run goes on in the server's folder: what is here stays as it was copied."""
    copy = federate(system="fedavg", num_server_rounds=1, local_epochs=1).folder
    given = RunInputs(on_command_line={"num-server-rounds": 9}, out=copy, resume=True)
    monkeypatch.setattr(processes, "submit", lambda *given: "1")
    monkeypatch.setattr(processes, "follow", lambda *given: "finished:completed")
    info = run(prepare(given, Placement(superlink="far")), copy, Console(file=io.StringIO()))
    assert info == {"status": "completed", "rounds_completed": 9}
