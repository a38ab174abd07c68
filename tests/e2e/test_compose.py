"""The compose files as docker-compose reads them, and the demo from the image that the Dockerfile makes.

The demo needs an image, FEDPRUNE_IMAGE or fedprune:cpu, in buildah's store:
    buildah bud -f docker/Dockerfile -t fedprune:cpu .
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import stat
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.e2e import compose

DOCKER = Path(__file__).parents[2] / "docker"
IMAGE = os.environ.get("FEDPRUNE_IMAGE", "fedprune:cpu")
NODE = {"SUPERLINK": "link.example.org:9092"}

needs_compose = pytest.mark.skipif(shutil.which("docker-compose") is None, reason="docker-compose is not installed")


@needs_compose
@pytest.mark.parametrize(
    ("files", "environment"),
    [
        (["compose.yaml"], {}),
        (["compose.yaml", "flower-1.40.yaml"], {}),
        (["distributed/server.yaml"], {}),
        (["distributed/server.yaml", "distributed/server.flower-1.40.yaml"], {}),
        (["distributed/node.yaml"], NODE),
        (["distributed/node.yaml", "distributed/node.cuda.yaml"], NODE),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_docker_compose_understands_the_files_and_no_service_may_more_than_it_needs(files, environment):
    command = ["docker-compose", *[word for file in files for word in ("-f", str(DOCKER / file))], "config"]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=1000)
    assert done.returncode == 0, done.stderr
    for name, service in yaml.safe_load(done.stdout)["services"].items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert "user" not in service, "the image's user, which is not root"
        assert "privileged" not in service, name
        assert service["read_only"] is True, name
        assert service["mem_limit"], name
        assert service["pids_limit"] == 1024, name


@needs_compose
def test_nodes_are_on_no_network_with_the_control_api():
    services = compose.described(DOCKER / "compose.yaml", {})["services"]
    networks = {name: set(service.get("networks", {})) for name, service in services.items()}
    assert networks["superlink"] == {"control", "fleet"}
    assert {name for name, found in networks.items() if "control" in found} == {
        "superlink", "superexec", "register", "run"
    }  # fmt: skip
    assert [networks[f"node-{k}"] for k in range(3)] == [{"fleet"}] * 3
    assert "--host=superlink.control" in services["superlink"]["command"], "and it listens there alone"
    assert "--fleet-api-address=superlink.fleet:9092" in services["superlink"]["command"]


class Overriding(yaml.SafeLoader):
    """YAML with Compose's own tag for what replaces a list."""


Overriding.add_constructor("!override", Overriding.construct_sequence)


def services(*files: str) -> dict:
    """What the last file says of each service."""
    found: dict = {}
    for file in files:
        for name, service in yaml.load((DOCKER / file).read_text(), Overriding)["services"].items():
            found[name] = found.get(name, {}) | service
    return found


@pytest.mark.parametrize(
    ("base", "later"),
    [("compose.yaml", "flower-1.40.yaml"), ("distributed/server.yaml", "distributed/server.flower-1.40.yaml")],
)
def test_with_a_later_flower_nodes_share_the_control_apis_port_and_users_show_a_secret(base, later):
    before, after = services(base), services(base, later)
    assert before.keys() == after.keys()
    program, *options = before["superlink"]["command"]
    assert program == "flower-superlink"
    fleet = [option for option in options if option.startswith(("--fleet-api-address", "--host"))]
    *calls, secret = after["superlink"]["command"][:4]
    assert calls == ["fedprune", "deploy", "superlink"]
    assert secret.startswith("--control-secret=")
    assert set(after["superlink"]["command"][4:]) == {*options, "--host=0.0.0.0"} - {*fleet} | {"--host=0.0.0.0"}
    for name, service in after.items():
        if name.startswith("node"):
            assert service["command"][1] == "superlink:8000"
            kept = [word for word in before[name]["command"] if word != "superlink:9092"]
            assert [word for word in service["command"] if word != "superlink:8000"] == kept


def test_every_script_that_a_service_calls_is_in_the_image():
    for script in DOCKER.glob("*.sh"):
        done = subprocess.run(["sh", "-n", str(script)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    called = set(re.findall(r"[\w-]+\.sh", (DOCKER / "compose.yaml").read_text()))
    assert {"setup.sh", "register.sh", "run.sh", "node.sh"} <= called <= {script.name for script in DOCKER.glob("*.sh")}


def test_bases_are_pinned():
    dockerfile = (DOCKER / "Dockerfile").read_text()
    named = [word.split("=", 1)[1] for word in dockerfile.split() if word.startswith("BASE=")]
    assert len(named) == 2
    for base in named:
        name, _, tag = base.partition(":")
        assert name in {"python", "nvidia/cuda"}
        assert re.match(r"\d+\.\d+\.\d+-", tag), base


def test_the_build_may_copy_the_dockerfiles_sources():
    lines = (DOCKER / "Dockerfile").read_text().splitlines()
    words = [line.split()[1:-1] for line in lines if line.startswith("COPY ")]
    copied = [word for each in words if not each[0].startswith("--from") for word in each if not word.startswith("--")]
    let_in = [line[1:] for line in (DOCKER.parent / ".dockerignore").read_text().split() if line.startswith("!")]
    assert set(copied) - set(let_in) == set()
    assert all(list(DOCKER.parent.glob(each)) for each in copied)
    held = {"fedprune", "fedprune_app", "configs", *runpy.run_path(str(DOCKER.parent / "hatch_build.py"))["_INNER"]}
    assert held - set(copied) == set(), "the image builds a wheel of these folders"


def call_in(demo: compose.Stack, name: str, *command: str) -> str:
    return subprocess.run(demo.inside(name, *command), capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
@pytest.mark.timeout(3600)
@needs_compose
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2 for networks")
@pytest.mark.skipif(not compose.has_image(IMAGE), reason=f"there is no image {IMAGE}")
def test_the_demo_leaves_a_report_in_the_mounted_folder(tmp_path):
    results = tmp_path / "results"
    results.mkdir()
    os.chown(results, 1000, 1000)
    with compose.stack(DOCKER / "compose.yaml", tmp_path, IMAGE, {"RESULTS": str(results)}) as demo:
        assert not list(demo.root.glob("secrets/*")), "an image has no secrets"
        assert not list(demo.root.rglob("*.key"))
        demo.up(seconds=1800)
        code = demo.processes["run"].wait(timeout=2400)
        assert code == 0, demo.log_file("run").read_text()[-2000:]
        for name in ("superlink", "superexec", "node-0", "node-1", "node-2"):
            assert demo.processes[name].poll() is None, f"{name} still serves"
            assert demo.is_healthy(name)

        (folder,) = [path.parent for path in results.glob("*/run.json")]
        info = json.loads((folder / "run.json").read_text())
        assert (info["status"], info["config"]["system"], info["rounds_completed"]) == ("completed", "subfedavg", 10)
        rows = [json.loads(line) for line in (folder / "clients.jsonl").read_text().splitlines()]
        last = {row["partition"]: row["density"] for row in rows if row["round"] == 10}
        assert last[0] < last[1] < last[2], "each node prunes to what it can bear"
        assert "<html" in (results / "report.html").read_text()[:1000].lower()
        assert {path.stat().st_uid for path in results.rglob("*")} == {1000}

        reach = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 5).close()"
        control, fleet = (f"10.213.7{n}.{list(demo.services).index('superlink') + 2}" for n in range(2))
        for service, host, port, is_open in (
            ("run", "superlink", "8000", True),
            ("node-0", "superlink", "9092", True),
            ("node-0", "superlink", "8000", False),
            ("node-0", "superlink.control", "8000", False),
            ("node-0", control, "8000", False),
            ("node-0", fleet, "8000", False),
        ):
            command = demo.inside(service, "python3", "-c", reach, host, port)
            done = subprocess.run(command, capture_output=True, text=True)
            assert (done.returncode == 0) == is_open, (service, host, port, done.stderr)
        for name in demo.services:
            written = "touch /opt/fedprune/x || touch /etc/x || touch /x"
            assert subprocess.run(demo.inside(name, "sh", "-c", written), capture_output=True).returncode != 0
            rights = call_in(demo, name, "grep", "-E", "NoNewPrivs|CapEff|CapBnd|Uid", "/proc/self/status")
            assert re.findall(r"\t(\w+)", rights) == [*["1000"] * 4, "0" * 16, "0" * 16, "1"]

        volumes = tmp_path / "volumes"
        for k in range(3):  # a key for each, a state for each, and no one else can read them
            assert stat.S_IMODE((volumes / f"node-{k}" / "node.key").stat().st_mode) == 0o600
            assert [path.name for path in (volumes / f"state-{k}").glob("*/*")] == [f"{k:05d}"]

        assert {stat.S_IMODE(path.stat().st_mode) for path in (volumes / "superlink").glob("superlink.db*")} == {0o600}

        strangers = "fedprune deploy certificates --host superlink --out /tmp/c >&2"
        wrong = ["sh", "-c", f"{strangers} && node.sh superlink:9092 /tmp/c/ca.crt"]
        done = subprocess.run(demo.inside("node-0", *wrong), capture_output=True, text=True)
        assert (done.returncode, "shows no certificate that '/tmp/c/ca.crt' vouches for" in done.stderr) == (1, True), (
            done
        )

        for name in ("setup", "register"):  # a second `up`, with the volumes of the first
            assert demo.start(name).wait(timeout=300) == 0, demo.log_file(name).read_text()[-2000:]

        again = demo.start("run", ["run.sh", "superlink:8000", "system=dispfl", "num-server-rounds=2"])
        assert again.wait(timeout=600) == 0, "another run, with the nodes still up"
        assert len(list(results.glob("*/run.json"))) == 2
