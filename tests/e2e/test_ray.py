"""The same app on Flower's Ray simulation, started as a user starts it: slow to start, so few and full tests."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from fedprune_app.launching import simulation
from tests.models.tiny_llm import text_folder, tiny_byte_model

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")

COMMAND = [sys.executable, "-m", "fedprune_app.cli"]
SETTINGS = ["num-server-rounds=3", "local-epochs=2", "evaluate-every=1"]

DYING_CLIENT = '''
"""In round 2 partition 2 dies and partition 4 never answers; partition 3 always raises; the rest is the product."""
import os
import time

from flwr.clientapp import ClientApp
from fedprune_app import client_app

app = ClientApp()
app.query()(client_app.query)
app.evaluate()(client_app.evaluate)

@app.train()
def train(message, context):
    if message.content["fields"]["round"] == 2 and context.node_config["partition-id"] == 2:
        os._exit(1)
    if message.content["fields"]["round"] == 2 and context.node_config["partition-id"] == 4:
        time.sleep(3600)
    if context.node_config["partition-id"] == 3:
        raise RuntimeError("my disk is full")
    return client_app.train(message, context)
'''


@pytest.fixture(autouse=True)
def gone_cluster(monkeypatch):
    """What a cluster that is no more left behind; a run without --ray-address must not look for it."""
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")


def read(folder: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def run_info(folder: Path) -> dict:
    return json.loads((folder / "run.json").read_text())


@pytest.mark.slow
def test_ray_with_one_or_two_workers_and_in_process_give_the_same_final_models(tmp_path):
    hashes = {}
    for name, options in {
        "ray1": ["--engine", "ray", "--workers", "1"],
        "ray2": ["--engine", "ray", "--workers", "2"],
        "here": ["--engine", "inprocess"],
    }.items():
        command = [*COMMAND, "run", *SETTINGS, *options, "--clients", "6", "--out", str(tmp_path / name)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1000)
        assert done.returncode == 0, done.stderr
        hashes[name] = run_info(tmp_path / name)["final_sha256"]
    assert len(set(hashes.values())) == 1, hashes


@pytest.mark.slow
def test_a_language_model_is_pruned_to_the_same_bits_on_ray_and_in_process(tmp_path):
    texts, model = text_folder(tmp_path / "texts"), tiny_byte_model(tmp_path / "model", "llama")
    settings = ["system=fedspallm", "dataset=text", f"data-dir={texts}", f"model={model}", "num-server-rounds=2"]
    settings += ["fraction-train=1.0", "fedspallm.segments=4", "fedspallm.segment-length=24", "fedspallm.window=32"]
    hashes = {}
    for name, options in {"ray": ["--engine", "ray", "--workers", "2"], "here": ["--engine", "inprocess"]}.items():
        command = [*COMMAND, "run", *settings, *options, "--clients", "3", "--out", str(tmp_path / name)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1000)
        assert done.returncode == 0, done.stderr
        hashes[name] = run_info(tmp_path / name)["final_sha256"]
    assert len(set(hashes.values())) == 1, hashes


@pytest.mark.programs
def test_clients_that_die_raise_or_never_answer_are_left_out_and_the_run_goes_on(tmp_path):
    from fedprune_app.preflight.inputs import Placement, RunInputs
    from fedprune_app.preflight.prepare import prepare
    from fedprune_app.running import Session

    out = tmp_path / "run"
    settings = {"fraction-train": 1.0, "num-server-rounds": 3, "local-epochs": 1, "evaluate-every": 3}
    settings |= {"cohort": 1}  # else those that work beside client 4 wait for it, too
    place = Placement("ray", num_clients=6, num_workers=2)
    with Session(Console(stderr=True)) as session:
        # a worker that died starts anew within the deadline; how long that takes on this machine, a whole run tells
        started = time.monotonic()
        session.run(prepare(RunInputs({**settings, "out-dir": str(tmp_path / "honest")}), place), tmp_path / "honest")
        deadline = max(25.0, 2 * (time.monotonic() - started))
        # the process that never answers holds one of the two workers from then on
        prepared = prepare(RunInputs({**settings, "out-dir": str(out), "deadline-seconds": deadline}), place)
        (session.app / "dying_client.py").write_text(DYING_CLIENT)
        simulation.stage_app(session.app, ("fedprune_app.server_app:app", "dying_client:app"))
        session.run(prepared, out)
    rounds = read(out, "rounds.jsonl")
    assert [row["replies"] for row in rounds] == [5, 3, 5]
    assert [row["failures"] for row in rounds] == [1, 3, 1]
    assert [row["stragglers"] for row in rounds] == [0, 1, 0]
    reasons = " ".join(text for row in rounds for text in row["failure_reasons"])
    assert "client 3: RuntimeError: my disk is full" in reasons
    assert "client 2: its process died" in reasons
    assert f"client 4: no reply in {deadline:g} s" in reasons


@pytest.mark.programs
def test_an_interrupted_run_stops_everything_it_started_and_resumes_to_the_same_models(tmp_path):
    out, whole = tmp_path / "cut", tmp_path / "whole"
    settings = ["local-epochs=2", "evaluate-every=8"]
    options = ["--clients", "6", "--workers", "1"]
    many = "num-server-rounds=5000"  # minutes, so that the run cannot end before it is killed
    process = subprocess.Popen(
        [*COMMAND, "run", *settings, many, *options, "--out", str(out)], stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 1000
    while not (out / "rounds.jsonl").exists() or len(read(out, "rounds.jsonl")) < 3:
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    family = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert not psutil.wait_procs(family, timeout=200)[1], "processes are left behind"
    assert run_info(out)["status"] == "running", "the killed run went on to its end"
    rounds = len(read(out, "rounds.jsonl")) + 5
    settings.append(f"num-server-rounds={rounds}")
    resumed = [*COMMAND, "run", "--resume", settings[-1], "--engine", "inprocess", *options[:2], "--out", str(out)]
    done = subprocess.run(resumed, capture_output=True, text=True, timeout=1000)
    assert done.returncode == 0, done.stderr
    assert run_info(out)["status"] == "completed"
    assert [row["round"] for row in read(out, "rounds.jsonl")] == list(range(1, rounds + 1))
    command = [*COMMAND, "run", *settings, "--engine", "inprocess", *options[:2], "--out", str(whole)]
    subprocess.run(command, check=True, capture_output=True, timeout=1000)
    assert run_info(out)["final_sha256"] == run_info(whole)["final_sha256"]


@pytest.mark.programs
def test_ctrl_c_ends_everything_the_run_started_and_says_so(tmp_path):
    out = tmp_path / "run"
    command = [*COMMAND, "run", "num-server-rounds=5000", "--clients", "4", "--workers", "1", "--out", str(out)]
    # whoever runs the tests in the background has SIGINT ignored, and so would the child
    listens = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=listens)
    deadline = time.monotonic() + 1000
    while not (out / "rounds.jsonl").exists() or not read(out, "rounds.jsonl"):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    family = psutil.Process(process.pid).children(recursive=True)
    assert any("raylet" in member.name() for member in family)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=1000)
    assert process.returncode == 130
    assert said.strip().splitlines()[-1].startswith("interrupted")
    assert not psutil.wait_procs(family, timeout=200)[1], "processes are left behind"
    info = run_info(out)
    assert info["status"] == "interrupted"
    assert info["rounds_completed"] == len(read(out, "rounds.jsonl"))


@pytest.mark.programs
@pytest.mark.parametrize("engine", ["ray", "flower"])
def test_a_python_in_a_folder_with_a_space_and_a_bracket_simulates(engine, tmp_path):
    place = tmp_path / "my clone [x]"
    place.symlink_to(sys.prefix)
    command = [str(place / "bin" / "python"), "-m", "fedprune_app.cli", "run", "num-server-rounds=1", "local-epochs=1"]
    command += ["--engine", engine, "--clients", "3", "--out", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1000)
    assert done.returncode == 0, done.stderr
    assert run_info(tmp_path / "run")["status"] == "completed"


@pytest.mark.programs
def test_a_failed_run_exits_non_zero_with_the_reason_on_one_line(tmp_path):
    command = [*COMMAND, "run", "learning-rate=1e30", "--clients", "3", "--out", str(tmp_path / "r")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1000)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("failed: ")
    assert "training diverged" in last
    assert "Traceback" not in done.stderr
    info = run_info(tmp_path / "r")
    assert info["status"] == "failed"
    assert "training diverged" in info["error"]
