"""What breaks on a real topology: over gRPC with TLS and keys, the run goes on, or stops on one line and resumes.

`make faults` runs these and prints the table that is docs/data/tables/deployment-faults.csv.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from fedprune_app.launching import processes, simulation
from fedprune_app.launching.local import local_deployment
from fedprune_app.privacy.accounting import Steps
from fedprune_app.privacy.ledger import Ledger
from tests.conftest import wrapped_app
from tests.e2e.deployed import SETTINGS, DeployedRun, in_process_sha256, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

NODES = 2

FAULTY_CLIENT = '''
"""Client 0 raises in round 2, client 1's process is killed in round 3, client 0 answers round 4 when that is over."""
import os
import signal
import time
from pathlib import Path

from flwr.clientapp import ClientApp
from fedprune_app import client_app

app = ClientApp()
app.query()(client_app.query)
app.evaluate()(client_app.evaluate)

@app.train()
def train(message, context):
    case = message.content["fields"]["round"], context.node_config["partition-id"]
    out = Path(context.run_config["out-dir"])
    if case in ((2, 0), (3, 1), (4, 0)):
        (out / f"fault-{case[0]}").touch()
    if case == (2, 0):
        raise RuntimeError("the scanner is switched off")
    if case == (3, 1):
        os.kill(os.getpid(), signal.SIGKILL)
    reply = client_app.train(message, context)
    while case == (4, 0) and (out / "rounds.jsonl").read_bytes().count(b"\\n") < 4:
        time.sleep(0.1)
    return reply
'''

STUTTERING_SUPERNODE = """#!{python}
'''A SuperNode that sends each reply twice, as one does that never got to see its receipt.'''
from flwr.supernode import start_client_internal as supernode
from flwr.supernode.cli.flower_supernode import flower_supernode

push = supernode._push_messages

def push_twice(state, object_store, send, push_object):
    sent = []
    def send_and_remember(*reply):
        sent.append(reply)
        return send(*reply)
    push(state, object_store, send_and_remember, push_object)
    for reply in sent:
        try:
            print("sent again:", send(*reply), flush=True)
        except Exception as error:
            print("sent again, refused:", error, flush=True)

supernode._push_messages = push_twice
flower_supernode()
"""


def node(k: int) -> dict:
    return {"partition-id": k, "num-partitions": NODES, "secure-rng": False}


@pytest.fixture(scope="module")
def timed(tmp_path_factory):
    """A deployment, and how many seconds it took to start."""
    folder = tmp_path_factory.mktemp("deployment")
    simulation.stage_app(folder / "app")
    began = time.monotonic()
    with local_deployment(folder, [node(k) for k in range(NODES)]) as running:
        yield running, time.monotonic() - began


@pytest.fixture
def deployment(timed):
    return timed[0]


@pytest.fixture
def deadline(timed) -> float:
    """Seconds in which a round is over, on this machine as busy as it is: starting it all takes longer than one.

    And in which Flower has missed a ClientApp's heartbeats, which it waits 60 s for.
    """
    return float(round(max(90.0, 2.5 * timed[1])))


def state_folder(deployment, k: int) -> Path:
    return deployment.folder / f"node-{k}" / "state"


def restart(deployment, k: int) -> None:
    deployment.start_node(f"node-{k}", {**node(k), "state-dir": str(state_folder(deployment, k))})


def absent(*when: tuple[int, int]):
    """The product with clients that are not there: (round, client)."""

    def train(message, context, honest):
        if (message.content["fields"]["round"], context.node_config["partition-id"]) in when:
            raise TimeoutError("it is not there")
        return honest(message, context)

    return wrapped_app(train)


def test_client_apps_that_raise_die_or_are_late_cost_their_part_of_a_round(deployment, deadline, tmp_path, measured):
    app = simulation.stage_app(deployment.folder / "faulty", ("fedprune_app.server_app:app", "faulty_client:app"))
    (app / "faulty_client.py").write_text(FAULTY_CLIENT)
    run = DeployedRun.start(deployment, tmp_path / "run", "faulty", num_server_rounds=5, deadline_seconds=deadline)
    run.finish()
    assert [row["replies"] for row in run.rounds] == [2, 1, 1, 1, 2]
    assert [row["stragglers"] for row in run.rounds] == [0, 0, 0, 1, 0]
    raised, died, late = ((run.out / f"fault-{round}").stat().st_mtime for round in (2, 3, 4))
    reasons = [row["failure_reasons"] for row in run.rounds]
    assert "client 0: the scanner is switched off" in reasons[1][0]
    assert reasons[2] == ["client 1: ClientApp stopped responding. (error code 8)"]
    assert reasons[3] == [f"client 0: no reply in {deadline:g} s"]
    assert run.info["final_sha256"] == in_process_sha256(
        run.config, tmp_path / "here", NODES, absent((2, 0), (3, 1), (4, 0))
    )
    lost = "its part of 1 round"
    measured("ClientApp raises", "named in the record, left out", lost, run.recorded[2] - raised)
    measured("ClientApp killed", f"left out: {reasons[2][0].split(': ', 1)[1]}", lost, run.recorded[3] - died)
    happens = f"left out at `deadline-seconds` ({deadline:g}); the reply is never read"
    measured("reply late", happens, lost, run.recorded[4] - late)


def test_a_supernode_killed_and_back_has_its_state_and_its_ledger(deployment, deadline, tmp_path, measured):
    """Started again at once, it is refused until it has been missed; what it was working on is lost."""
    settings = {"system": "fedavg", "shard-size": 40, "dp.enabled": True, "dp.noise-multiplier": 1.0}
    settings["dp.accuracies"] = "open"
    run = DeployedRun.start(deployment, tmp_path / "run", num_server_rounds=6, deadline_seconds=deadline, **settings)
    run.until_round(1)

    def charged(k):
        """Steps, all of one kind."""
        (path,) = state_folder(deployment, k).glob(f"{run.info['run_key']}/*/ledger.jsonl")
        ((kind, steps),) = Ledger(path).spent.items()
        assert isinstance(kind, Steps)
        return steps

    def training():
        return [p for p in psutil.Process(deployment.processes["node-1"].pid).children(recursive=True) if is_app(p)]

    until(training)
    before = charged(1)
    deployment.kill("node-1")
    killed = time.time()
    restart(deployment, 1)
    run.finish()
    assert not run.failed(0)
    assert run.rounds[-1]["replies"] == NODES, "it is back"
    per_round = charged(0) // 6
    counted = 6 - len(run.failed(1))
    assert charged(1) >= before
    assert counted * per_round <= charged(1) <= 6 * per_round, "what left is charged, and perhaps what was lost"
    epsilons = [row["epsilon_max"] for row in run.rounds]
    assert epsilons == sorted(epsilons)
    assert not any(row["notes"] for row in run.rounds), "it has its state and its ledger"
    skipping = absent(*((round, 1) for round in run.failed(1)))
    assert run.info["final_sha256"] == in_process_sha256(run.config, tmp_path / "here", NODES, skipping)
    reason = run.rounds[run.failed(1)[0] - 1]["failure_reasons"][0].split(": ", 1)[1]
    happens = f"refused until missed, its message is lost ({reason}); then it goes on from its own state"
    lost = f"its part of {len(run.failed(1))} rounds; no privacy spend"
    measured("SuperNode killed, back at once", happens, lost, run.recovery(killed, 1))


def is_app(process: psutil.Process) -> bool:
    try:
        return "flwr-clientapp" in " ".join(process.cmdline())
    except psutil.Error:
        return False


def test_the_superlink_killed_and_back(deployment, tmp_path, measured):
    run = DeployedRun.start(deployment, tmp_path / "run", num_server_rounds=3)
    run.until_round(1)
    deployment.kill("superlink")
    killed = time.time()
    time.sleep(3)
    deployment.start_superlink()
    info = run.finish()
    assert [row["failures"] for row in run.rounds] == [0] * 3
    assert info["final_sha256"] == in_process_sha256(run.config, tmp_path / "here", NODES)
    measured("SuperLink killed, back after 3 s", "all wait and go on", "nothing: same hash", run.recovery(killed))


def test_the_superlink_away_for_longer_than_a_node_may_be_silent(deployment, tmp_path, measured):
    """Flower then takes its nodes for lost: the run goes on without, or stops for lack of replies and resumes."""
    run = DeployedRun.start(deployment, tmp_path / "run", num_server_rounds=3)
    run.until_round(1)
    deployment.kill("superlink")
    killed = time.time()
    time.sleep(75)
    deployment.start_superlink()
    happens = "the run goes on"
    if run.end() != "finished:completed":
        why = run.info["error"] if run.info["status"] == "failed" else processes.failure(deployment.link, run.run_id)
        assert "min-replies asks for 1" in why or "No heartbeat received from the task" in why
        assert "\n" not in why
        until(lambda: run.info["status"] != "running")
        run = run.resume()
        run.finish()
        happens = f"the run stops ({why}); `--resume` goes on"
    lost = [(row, client) for client in range(NODES) for row in run.failed(client)]
    here = in_process_sha256(run.config, tmp_path / "here", NODES, absent(*lost))
    assert run.info["final_sha256"] == here
    what = f"{len(lost)} replies" if lost else "nothing: same hash"
    measured("SuperLink killed, back after 75 s", happens, what, run.recovery(killed))


@pytest.mark.parametrize("truncated", [False, True], ids=["", "and its last checkpoint truncated"])
def test_a_serverapp_that_is_killed_resumes_to_the_same_models(deployment, tmp_path, measured, truncated):
    run = DeployedRun.start(deployment, tmp_path / "run", num_server_rounds=3)
    run.until_round(2)
    executor = psutil.Process(deployment.processes["superexec"].pid)
    (app,) = [p for p in executor.children(recursive=True) if "flwr-serverapp" in " ".join(p.cmdline())]
    app.kill()
    killed = time.time()
    processes.stop_run(deployment.link, run.run_id)
    if truncated:
        newest = max((run.out / "checkpoints").glob("*.safetensors"))
        newest.write_bytes(newest.read_bytes()[:-1])
    resumed = run.resume()
    recorded = len(run.rounds)
    info = resumed.finish()
    (after,) = info["resumed_after_rounds"]
    assert [row["round"] for row in run.rounds] == [1, 2, 3]
    assert info["final_sha256"] == in_process_sha256(run.config, tmp_path / "here", NODES)
    if truncated:
        named, repeated = info["notes"]
        assert newest.name in named
        assert repeated == "rounds repeated: 1"
        fault, happens = "... its last checkpoint truncated", "`--resume` goes on from the one before, and says so"
    else:
        fault, happens = "ServerApp killed", "`--resume` goes on from the last checkpoint"
    lost = f"{recorded - after} finished rounds; same hash"
    measured(fault, happens, lost, min(when for when in resumed.recorded.values() if when > killed) - killed)


def test_everything_killed_at_once_leaves_no_process_and_resumes(tmp_path, measured):
    """As when the machine fails: kill -9 of `fedprune deploy local`, then the same with --resume."""
    out = tmp_path / "run"
    settings = [f"{key}={value}" for key, value in {**SETTINGS, "num-server-rounds": 3}.items()]
    command = [sys.executable, "-m", "fedprune_app.cli", "deploy", "local", "--nodes", str(NODES), "--out", str(out)]
    process = subprocess.Popen([*command, *settings], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    rounds = out / "rounds.jsonl"
    until(lambda: process.poll() is not None or (rounds.exists() and rounds.read_bytes().count(b"\n") >= 1))
    assert process.poll() is None, "it has ended by itself"
    process.kill()
    process.wait()
    killed = time.time()
    until(lambda: not [p for p in psutil.process_iter(["cmdline"]) if str(out) in " ".join(p.info["cmdline"] or ())])
    recorded = rounds.read_bytes().count(b"\n")
    done = subprocess.run([*command, "--resume"], capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    info = json.loads((out / "run.json").read_text())
    assert info["final_sha256"] == in_process_sha256(info["config"], tmp_path / "here", NODES)
    assert [json.loads(line)["round"] for line in rounds.read_text().splitlines()] == [1, 2, 3]
    (after,) = info["resumed_after_rounds"]
    lost = f"the round in work, {recorded - after} finished ones; same hash"
    measured(
        "all killed at once", "nothing stays behind; `--resume` starts all and goes on", lost, time.time() - killed
    )


def test_a_run_folder_on_a_full_disk_stops_the_run_on_one_line(deployment, tmp_path, small_disk, measured):
    disk = small_disk(tmp_path / "run", 2048)
    run = DeployedRun.start(deployment, disk.folder, num_server_rounds=3)
    run.until_round(2)
    disk.fill()
    full = time.time()
    assert run.end() == "finished:failed"
    stopped = time.time() - full
    reason = run.info["error"] or processes.failure(deployment.link, run.run_id)
    assert "No space left on device" in reason
    assert "\n" not in reason
    assert [row["round"] for row in run.rounds][:2] == [1, 2]
    disk.free()
    freed = time.time()
    resumed = run.resume()
    info = resumed.finish()
    assert [row["round"] for row in resumed.rounds] == [1, 2, 3]
    assert info["final_sha256"] == in_process_sha256(run.config, tmp_path / "here", NODES)
    happens = f"the run stops after {stopped:.0f} s, naming the file; with room, `--resume`"
    again = min(when for when in resumed.recorded.values() if when > freed) - freed
    measured("disk of the run folder full", happens, "the round in work; same hash", again)


def test_a_node_whose_disk_is_full_or_damaged_says_so_and_goes_on(deployment, tmp_path, small_disk, measured):
    disk = small_disk(state_folder(deployment, 1), 2048)
    run = DeployedRun.start(deployment, tmp_path / "run", num_server_rounds=7, system="standalone")
    run.until_round(1)
    disk.fill()
    until(lambda: run.failed(1))
    reason = run.rounds[-1]["failure_reasons"][0]
    assert reason.startswith("client 1: ")
    assert "No space left on device" in reason
    disk.free()
    freed = time.time()
    lost = len(run.failed(1))
    until(lambda: [row for row in run.rounds if row["round"] > lost + 1 and row["replies"] == NODES])
    assert not any(row["notes"] for row in run.rounds), "what it had was kept"
    happens = "left out with the reason until there is room; its last state stays"
    measured("disk of a node full", happens, f"its part of {len(run.failed(1))} rounds", run.recovery(freed, 1))

    def notes():
        return [note for row in run.rounds for note in row["notes"]]

    def damage():
        """Cut the newest state off, until a training has come upon one."""
        newest = max(state_folder(deployment, 1).glob("*/00001/*.safetensors"), key=lambda path: path.name)
        content = newest.read_bytes()
        if len(content) > 100:
            newest.write_bytes(content[:100])

    seen = 0
    while not notes():
        if len(run.rounds) > seen:
            seen = len(run.rounds)
            damage()
        assert processes.outcome_of(run.out / "run.json") is None, "the run is over and has not noticed"
        time.sleep(0.05)
    assert "the state of round" in notes()[0]
    assert "is lost, went on from round" in notes()[0]
    run.finish()
    measured("a node's state truncated", f"noted: {notes()[0].split(': ', 1)[1]}", "1 round of its own state", None)


def test_two_runs_at_once_on_the_same_nodes_do_not_touch_each_other(deployment, tmp_path, measured):
    ledgers = tmp_path / "ledgers"
    private = {"system": "fedavg", "shard-size": 40, "dp.enabled": True, "dp.noise-multiplier": 1.0}
    settings = {**private, "dp.ledger-dir": str(ledgers)}
    runs = [
        DeployedRun.start(deployment, tmp_path / f"run{n}", **settings, **{"learning-rate": 0.05 / n}) for n in (1, 2)
    ]
    for run in runs:
        run.finish()
    alone = {"dp.ledger-dir": str(tmp_path / "alone")}
    for number, run in enumerate(runs):
        here = in_process_sha256({**run.config, **alone}, tmp_path / f"here{number}", NODES)
        assert run.info["final_sha256"] == here
    for k in range(NODES):
        (one,) = ledgers.glob(f"{k:05d}-*.jsonl")
        assert Ledger(one).spent == Ledger(tmp_path / "alone" / one.name).spent
    measured("two runs at once", "each as if alone; one ledger has what both spent", "nothing: same hashes", None)


def test_a_reply_that_comes_twice_counts_once(deployment, tmp_path, monkeypatch, measured):
    stuttering = tmp_path / "stuttering-supernode"
    stuttering.write_text(STUTTERING_SUPERNODE.format(python=sys.executable))
    stuttering.chmod(0o755)
    deployment.kill("node-1")
    tool = processes.tool
    with monkeypatch.context() as patch:
        patch.setattr(processes, "tool", lambda name: str(stuttering) if name == "flower-supernode" else tool(name))
        restart(deployment, 1)
    try:
        run = DeployedRun.start(deployment, tmp_path / "run", num_server_rounds=3)
        info = run.finish()
        assert [row["replies"] for row in run.rounds] == [NODES] * 3
        assert deployment.log_file("node-1").read_text().count("sent again") >= 4
        assert info["final_sha256"] == in_process_sha256(run.config, tmp_path / "here", NODES)
        measured("every reply of a node sent twice", "the second is not looked at", "nothing: same hash", None)
    finally:
        deployment.kill("node-1")
        restart(deployment, 1)


def test_a_supernode_that_is_gone_for_good_does_not_hold_up_the_others(deployment, tmp_path, measured):
    """The last one: it takes a node away."""
    run = DeployedRun.start(deployment, tmp_path / "run", num_server_rounds=3)
    run.until_round(1)
    deployment.kill("node-1")
    killed = time.time()
    try:
        info = run.finish()
    finally:
        restart(deployment, 1)
    assert info["rounds_completed"] == 3
    lost = run.failed(1)
    assert lost == list(range(lost[0], 4))
    row = run.rounds[lost[0] - 1]
    missed = run.recorded[lost[0]] - killed
    happens = f"left out from then on: {row['failure_reasons'][0].split(': ', 1)[1]}"
    measured("SuperNode gone for good", happens, "its part of the rounds that follow", missed)
