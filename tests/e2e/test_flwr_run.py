"""Flower's own command line on this repository, as a Flower user would type it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import tomllib
import zipfile
from pathlib import Path

import psutil
import pytest

from fedprune_app.launching.processes import free_ports

pytestmark = pytest.mark.programs
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
    assert (result["status"], result["rounds_completed"]) == ("completed", 2), result["error"]
    assert len(result["partition"]) == 5
    after = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True).stdout
    assert before == after, "a run must leave the repository as it was"


def streamed(flower, run_config: str) -> str:
    """What ``flwr run --stream`` shows of a run with these settings, up to its end."""
    command = [FLWR, "run", ".", "--stream", "--run-config", run_config]
    command += ["--federation-config", "num-supernodes=3 client-resources-num-cpus=1"]
    done = subprocess.run(command, cwd=ROOT, env=flower, capture_output=True, text=True, timeout=1000)
    return done.stdout + done.stderr


def test_flwr_run_says_in_one_line_what_is_wrong_with_a_setting(flower):
    said = streamed(flower, "density=7.0")
    assert "this setting is refused: density is 7.0, " in said
    assert said.index("this setting is refused") < said.index("Traceback")


def test_flwr_run_takes_a_plugin_and_its_options(flower, tmp_path):
    page = (ROOT / "docs" / "extend.md").read_text()
    file = tmp_path / "my_prox.py"
    file.write_text(page.partition("```python\n# my_prox.py\n")[2].partition("```")[0])
    settings = f"system='my-prox' plugins='{file}' plugin-options='{{\"my-prox.mu\": 0.2}}' num-server-rounds=1"
    settings += f" out-dir='{tmp_path / 'run'}'"
    said = streamed(flower, settings)
    assert (tmp_path / "run" / "run.json").exists(), said[-3000:]
    info = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (info["status"], info["config"]["my-prox.mu"]) == ("completed", 0.2)


def test_the_bundle_holds_the_app_and_nothing_else(flower, tmp_path):
    subprocess.run(["git", "clone", "-q", str(ROOT), str(tmp_path / "copy")], check=True)
    subprocess.run([FLWR, "build"], cwd=tmp_path / "copy", env=flower, check=True, capture_output=True, timeout=1000)
    (bundle,) = (tmp_path / "copy").glob("*.fab")
    names = zipfile.ZipFile(bundle).namelist()
    app = tomllib.loads(zipfile.ZipFile(bundle).read("pyproject.toml").decode())
    assert app["tool"]["flwr"]["app"]["fab-format-version"] == 1
    assert app["project"]["license"]["file"] in names
    tops = {name.split("/")[0] for name in names if not name.startswith(".info")}
    assert tops == {"fedprune_app", "strategies", "clients", "configs", "pyproject.toml", "README.md", "LICENSE"}
    assert bundle.stat().st_size < 2_000_000  # sources alone
