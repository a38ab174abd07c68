"""`fedprune run --superlink`: the run is on other machines, and outlives the command unless it is told to stop."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import ssl
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest
from rich.console import Console

from fedprune_app.engine.flower_private import has_fleet_port
from fedprune_app.errors import LaunchError, RunDetached
from fedprune_app.launching import processes
from fedprune_app.launching.credentials import make_certificates, make_node_key
from fedprune_app.launching.local import Deployment, local_deployment
from fedprune_app.preflight.inputs import Placement, RunInputs
from fedprune_app.preflight.prepare import prepare
from fedprune_app.running import run
from tests.e2e.deployed import SETTINGS, in_process_sha256, nodes_with_the_app, until

pytestmark = pytest.mark.programs
COMMAND = [sys.executable, "-m", "fedprune_app.cli", "run", "--superlink", "local"]

DEAF_FLWR = """#!{python}
'''Flower's command line on a line that is down, but for `flwr run` and `flwr stop`.'''
import os, sys
if sys.argv[1] == "ls":
    sys.exit("unreachable")
os.execv({flwr!r}, [{flwr!r}, *sys.argv[1:]])
"""
SLOW_FLWR = """#!{python}
'''Flower's command line, whose answer to `flwr run` takes its time.'''
import pathlib, subprocess, sys, time
done = subprocess.run([{flwr!r}, *sys.argv[1:]], stdout=subprocess.PIPE)
if sys.argv[1] == "run":
    pathlib.Path(__file__ + ".submitted").touch()
    time.sleep(2)
sys.stdout.buffer.write(done.stdout)
sys.exit(done.returncode)
"""


@pytest.fixture(scope="module")
def superlink(tmp_path_factory):
    """A SuperLink without an executor: whatever is submitted stays pending until it is stopped."""
    folder = tmp_path_factory.mktemp("superlink")
    port, fleet_port = processes.free_ports(2)
    running = Deployment(folder, make_certificates(folder / "certificates", ["127.0.0.1"]), port, fleet_port)
    try:
        running.start_superlink()
        yield running
    finally:
        running.stop()


def runs(link) -> dict[str, str]:
    """Run id: status."""
    return {str(row["run-id"]): str(row["status"]) for row in processes.flwr(link, "ls", link.name)["runs"]}


def submitted(link, before) -> str:
    """The id of the run that has come since."""
    until(lambda: runs(link).keys() - before)
    (run_id,) = runs(link).keys() - before
    return run_id


def start(link, *arguments: str, ignored: tuple[int, ...] = ()) -> subprocess.Popen[str]:
    """The command as from a terminal; who runs the tests in the background has SIGINT ignored, it must not."""

    def at_a_terminal():
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)

    return subprocess.Popen(
        [*COMMAND, *arguments], env=dict(link.environment), stderr=subprocess.PIPE, text=True, preexec_fn=at_a_terminal
    )


def follow(link, out, monkeypatch) -> None:
    """What the command does, in this process."""
    for name, value in link.environment.items():
        monkeypatch.setenv(name, value)
    run(prepare(RunInputs({"out-dir": str(out)}), Placement(superlink=link.name)), out, Console(stderr=True))


def instead_of_flwr(path, script: str):
    """What finds Flower's programs, but this script in place of `flwr`."""
    path.write_text(script.format(python=sys.executable, flwr=processes.tool("flwr")))
    path.chmod(0o755)
    tool = processes.tool
    return lambda name: str(path) if name == "flwr" else tool(name)


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM], ids=lambda number: number.name)
def test_a_command_that_is_ended_leaves_its_run_going_and_says_how_to_find_it(superlink, tmp_path, number):
    link, before = superlink.link, runs(superlink.link).keys()
    process = start(link, "--out", str(tmp_path / "run"))
    run_id = submitted(link, before)
    process.send_signal(number)
    _, said = process.communicate(timeout=1000)
    assert process.returncode == 1
    assert runs(link)[run_id] == "pending"
    line = f"not followed any more: {number.name} came; run {run_id} was left going: "
    shown, stopped = re.findall("`(.*?)`", last_line(said))
    assert last_line(said).startswith(line)
    assert "Traceback" not in said
    # what it tells the user to type
    assert processes.flwr(link, *shown.split()[1:])["runs"][0]["run-id"] == run_id
    processes.flwr(link, *stopped.split()[1:])
    assert runs(link)[run_id] == "finished:stopped"


def test_ctrl_c_stops_the_run(superlink, tmp_path):
    link, before = superlink.link, runs(superlink.link).keys()
    process = start(link, "--out", str(tmp_path / "run"))
    run_id = submitted(link, before)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=1000)
    assert process.returncode == 130
    assert last_line(said).startswith("interrupted")
    assert runs(link)[run_id] == "finished:stopped"


def test_ctrl_c_stops_a_run_of_which_the_command_does_not_know_yet(superlink, tmp_path, monkeypatch):
    link, before = superlink.link, runs(superlink.link).keys()
    monkeypatch.setattr(processes, "tool", instead_of_flwr(tmp_path / "flwr", SLOW_FLWR))
    interrupted = signal.signal(signal.SIGINT, signal.default_int_handler)
    sent = tmp_path / "flwr.submitted"

    def interrupt():
        until(sent.exists)
        os.kill(os.getpid(), signal.SIGINT)

    watcher = threading.Thread(target=interrupt)
    watcher.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            follow(link, tmp_path / "run", monkeypatch)
    finally:
        signal.signal(signal.SIGINT, interrupted)
        watcher.join()
    assert runs(link)[submitted(link, before)] == "finished:stopped"


def test_nohup_is_heeded(superlink, tmp_path):
    link, before = superlink.link, runs(superlink.link).keys()
    process = start(link, "--out", str(tmp_path / "run"), ignored=(signal.SIGHUP,))
    run_id = submitted(link, before)
    process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=3)
    processes.stop_run(link, run_id)
    process.kill()
    process.communicate()


def test_a_superlink_that_stays_silent_keeps_the_run(superlink, tmp_path, monkeypatch):
    """Also when it could be told to stop, as it can when the line is back just then."""
    link, before = superlink.link, runs(superlink.link).keys()
    with monkeypatch.context() as patch:
        patch.setattr(processes, "_UNASKED_SECONDS", 0.1)
        patch.setattr(processes, "tool", instead_of_flwr(tmp_path / "flwr", DEAF_FLWR))
        with pytest.raises(RunDetached, match=r"^the SuperLink does not answer; run \d+ was left going: ") as raised:
            follow(link, tmp_path / "run", patch)
    run_id = submitted(link, before)
    assert f"`flwr stop {run_id} local`" in str(raised.value)
    assert runs(link)[run_id] == "pending"
    processes.stop_run(link, run_id)
    processes.stop_run(link, run_id)  # it is over: no error
    with pytest.raises(LaunchError, match="flwr stop"):
        processes.stop_run(link, "12345")


def test_a_node_is_registered_whatever_an_earlier_start_came_to(superlink):
    make_node_key(superlink.folder / "cut" / "node.key")  # and killed before it was registered
    for _ in range(2):
        superlink.register("cut")
        assert [node["status"] for node in superlink._nodes()] == ["registered"]
    (superlink.folder / "odd").mkdir()
    (superlink.folder / "odd" / "node.key.pub").write_text("no key")
    with pytest.raises(LaunchError, match="flwr supernode"):
        superlink.register("odd")


def test_a_deployment_whose_certificates_were_cut_short_starts(tmp_path):
    make_certificates(tmp_path / "certificates", ["127.0.0.1"]).ca.unlink()
    with local_deployment(tmp_path, []) as running:
        assert runs(running.link) == {}


def elsewhere(hidden, *command: str) -> list[str]:
    """A command that does not see a folder, as on another machine."""
    return ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs "$0" && exec "$@"', str(hidden), *command]


def can_hide() -> bool:
    try:
        return subprocess.run(elsewhere("/mnt", "true"), capture_output=True).returncode == 0
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not can_hide(), reason="folders cannot be hidden from a process here")
def test_a_run_whose_folder_is_on_the_server_alone_outlives_its_terminal_and_is_resumed(tmp_path):
    server = tmp_path / "server"
    server.mkdir()
    out = server / "run"
    settings = [f"{key}={value}" for key, value in {**SETTINGS, "num-server-rounds": 3, "seed": 5}.items()]

    def info():
        return json.loads((out / "run.json").read_text())

    with nodes_with_the_app(tmp_path / "deployment", 2) as deployment:
        environment = dict(deployment.link.environment)
        command = elsewhere(server, *COMMAND, "--out", str(out))
        call = functools.partial(subprocess.run, env=environment, capture_output=True, text=True, timeout=1800)
        # whoever runs the tests under nohup has SIGHUP ignored, and so would the child
        listens = functools.partial(signal.signal, signal.SIGHUP, signal.SIG_DFL)
        process = subprocess.Popen(
            [*command, *settings], env=environment, stderr=subprocess.PIPE, text=True, preexec_fn=listens
        )
        until(lambda: (out / "rounds.jsonl").exists())
        process.send_signal(signal.SIGHUP)
        _, said = process.communicate(timeout=1000)
        assert "SIGHUP came" in said
        until(lambda: info()["status"] != "running")
        assert (info()["status"], info()["rounds_completed"]) == ("completed", 3)

        refused = call([*command, "--resume", *settings, "seed=6"])
        assert refused.returncode == 2
        assert last_line(refused.stderr).startswith("error: ")
        assert last_line(refused.stderr).endswith(": seed is 6")
        missing = call(elsewhere(server, *COMMAND, "--out", str(server / "none"), "--resume", *settings))
        assert last_line(missing.stderr).endswith(f": '{server / 'none'}' is not a run folder: it has no run.json")
        done = call([*command, "--resume", *settings, "num-server-rounds=4"])
        assert done.returncode == 0, done.stderr
        assert (info()["status"], info()["rounds_completed"]) == ("completed", 4)
        assert info()["resumed_after_rounds"] == [3]
        assert info()["final_sha256"] == in_process_sha256(
            info()["config"] | {"num-server-rounds": 4}, tmp_path / "here", 2
        )


def answers(process: subprocess.Popen[bytes], address: str, ca: Path) -> bool:
    assert process.poll() is None
    try:
        verify = ssl.create_default_context(cafile=ca)
        return httpx.get(f"https://{address}/health", timeout=10, trust_env=False, verify=verify).is_success
    except httpx.HTTPError:
        return False


def test_the_control_api_takes_orders_only_from_users_with_the_secret(tmp_path):
    """As docs/deploy.md says it for real machines, whichever port nodes reach."""
    made = make_certificates(tmp_path / "certificates", ["127.0.0.1"])
    (port,) = processes.free_ports(1)
    address, home = f"127.0.0.1:{port}", tmp_path / "user"
    home.mkdir()
    known = f'[superlink]\ndefault = "real"\n\n[superlink.real]\naddress = "{address}"\n'
    (home / "config.toml").write_text(f'{known}root-certificates = "{made.ca}"\n')
    environment = processes.flower_environment(home)
    fedprune = [sys.executable, "-m", "fedprune_app.cli", "deploy"]
    secret = tmp_path / "control.secret"
    subprocess.run([*fedprune, "control-secret", secret], check=True, capture_output=True, timeout=1000)
    command = [*fedprune, "superlink", "--control-secret", str(secret), "--isolation", "process"]
    command += ["--ssl-ca-certfile", str(made.ca), "--ssl-certfile", str(made.certificate), "--ssl-keyfile"]
    command += [str(made.key), "--host", "127.0.0.1", "--port", str(port), "--enable-supernode-auth"]
    command += ["--fleet-api-address", f"127.0.0.1:{processes.free_ports(1)[0]}"] if has_fleet_port() else []
    process = processes.spawn(command, environment, tmp_path / "log.txt")
    try:
        until(functools.partial(answers, process, address, made.ca))
        link = processes.Link("real", environment)
        with pytest.raises(LaunchError, match="flwr ls"):
            processes.flwr(link, "ls", "real")
        login = [*fedprune, "login", address, "--secret", secret]
        subprocess.run(login, check=True, capture_output=True, env=environment, timeout=1000)
        assert processes.flwr(link, "ls", "real")["runs"] == []
        secret.write_text("another user's secret")
        subprocess.run(login, check=True, capture_output=True, env=environment, timeout=1000)
        with pytest.raises(LaunchError, match="flwr ls"):
            processes.flwr(link, "ls", "real")
    finally:
        processes.end(process)
