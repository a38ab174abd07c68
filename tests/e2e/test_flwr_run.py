"""Flower's own command line on this repository, as a Flower user would type it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import psutil
import pytest

from fedprune_app.launch import free_ports

ROOT = Path(__file__).parents[2]
FLWR = str(Path(sys.executable).parent / "flwr")


@pytest.fixture
def flower(tmp_path):
    """An environment with a local SuperLink of its own, which ``flwr run`` starts and leaves behind."""
    port, control = free_ports(2)
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(tmp_path / "home"),
        "FLWR_HOME": str(tmp_path / "flwr"),
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(port),
        "FLWR_LOCAL_CONTROL_API_PORT": str(control),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
    }
    (tmp_path / "home").mkdir()
    yield environment
    for process in psutil.process_iter(["cmdline"]):
        if "flower-superlink" in str(process.info["cmdline"]) and str(port) in (process.info["cmdline"] or []):
            for member in [*process.children(recursive=True), process]:
                member.kill()


def test_flwr_run_runs_the_app_with_a_config_file_and_any_number_of_clients(flower, tmp_path):
    before = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True).stdout
    config = tmp_path / "short.toml"
    config.write_text((ROOT / "configs" / "quickstart.toml").read_text().replace("rounds = 20", "rounds = 2"))
    command = [FLWR, "run", ".", "--format", "json", "--run-config", str(config)]
    command += ["--federation-config", "num-supernodes=5 client-resources-num-cpus=1"]
    started = subprocess.run(command, cwd=ROOT, env=flower, capture_output=True, text=True, timeout=1000)
    assert '"success": true' in started.stdout, started.stdout + started.stderr
    run_id = json.loads(started.stdout[started.stdout.index("{") :])["run-id"]
    info = tmp_path / "home" / "fedprune-runs" / run_id / "run.json"
    deadline = time.monotonic() + 1000
    while not info.exists() or json.loads(info.read_text())["status"] == "running":
        assert time.monotonic() < deadline, (tmp_path / "flwr/local-superlink/superlink.log").read_text()[-3000:]
        time.sleep(0.5)
    result = json.loads(info.read_text())
    assert (result["status"], result["rounds_completed"], len(result["partition"])) == ("completed", 2, 5)
    after = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True).stdout
    assert before == after, "a run must leave the repository as it was"


def test_the_bundle_holds_the_app_and_nothing_else(flower, tmp_path):
    subprocess.run(["git", "clone", "-q", str(ROOT), str(tmp_path / "copy")], check=True)
    subprocess.run([FLWR, "build"], cwd=tmp_path / "copy", env=flower, check=True, capture_output=True, timeout=1000)
    (bundle,) = (tmp_path / "copy").glob("*.fab")
    names = zipfile.ZipFile(bundle).namelist()
    tops = {name.split("/")[0] for name in names if not name.startswith(".info")}
    assert tops == {"fedprune_app", "strategies", "clients", "configs", "pyproject.toml", "README.md", "LICENSE"}
    assert bundle.stat().st_size < 2_000_000  # sources alone
