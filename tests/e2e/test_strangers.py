"""Whoever has no secret of a run can use nothing that the run opens: tried as another user of this machine."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from fedprune_app import client_app, server_app
from fedprune_app.engine.simulated_grid import run_in_process
from fedprune_app.launching import processes, simulation
from fedprune_app.launching.local import local_deployment
from fedprune_app.preflight.inputs import Placement, RunInputs
from fedprune_app.preflight.prepare import prepare
from fedprune_app.running import Session
from tests.e2e.deployed import until
from tests.e2e.test_proxy import behind_a_dead_proxy

pytestmark = pytest.mark.programs

ROOT = Path(__file__).parents[2]
NOBODY = 65534
SETTINGS = {"system": "fedavg", "num-server-rounds": 2, "local-epochs": 1, "fraction-train": 1.0, "evaluate-every": 2}

PATIENT_CLIENT = '''
"""The product, but training waits until the file ``go`` is there; ``waits`` says that it does."""
import time
from pathlib import Path

from flwr.clientapp import ClientApp
from fedprune_app import client_app

app = ClientApp()
app.query()(client_app.query)
app.evaluate()(client_app.evaluate)

@app.train()
def train(message, context):
    folder = Path(FOLDER)
    (folder / "waits").touch()
    while not (folder / "go").exists():
        time.sleep(0.05)
    return client_app.train(message, context)
'''


@dataclass
class Stranger:
    """Another user of this machine, and a folder into which both may write."""

    folder: Path

    def new_folder(self) -> Path:
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        folder.chmod(0o777)
        return folder

    def tries(self, *arguments: str, as_owner: bool = False) -> subprocess.CompletedProcess[str]:
        """Run ``strangers.py`` as that user, or as ours, but without a secret; ended where no answer comes."""
        who = [] if as_owner else as_nobody()
        command = ["timeout", "120", *who, sys.executable, str(self.folder / "strangers.py"), *arguments]
        environment = {"PATH": os.environ["PATH"], "HOME": str(self.folder)}
        return subprocess.run(command, env=environment, cwd=self.folder, capture_output=True, text=True)


def as_nobody() -> list[str]:
    return ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]


@pytest.fixture(scope="module")
def stranger() -> Iterator[Stranger]:
    if os.geteuid() != 0 or not shutil.which("setpriv"):
        pytest.skip("to become another user takes root, and setpriv")
    folder = Path(tempfile.mkdtemp(prefix="stranger-"))  # pytest's own are for their owner alone
    folder.chmod(0o777)
    shutil.copy(Path(__file__).with_name("strangers.py"), folder)
    try:
        probe = Stranger(folder).tries("ports")
        if probe.returncode:
            pytest.skip(f"this Python is not for other users: {probe.stderr.strip().splitlines()[-1]}")
        yield Stranger(folder)
    finally:
        shutil.rmtree(folder)


@dataclass
class Seen:
    """What was seen of a run, and what a stranger did, while its clients waited."""

    info: dict = field(default_factory=dict)
    listeners: list[tuple[str, str, int]] = field(default_factory=list)  # command line, address, port
    commands: list[str] = field(default_factory=list)
    sockets: dict[str, bool] = field(default_factory=dict)  # path, to whether others are kept away from it
    token: str = ""
    answers: dict[str, list[str]] = field(default_factory=dict)
    marks: list[Path] = field(default_factory=list)


def look(seen: Seen) -> None:
    """All that this process has started: who listens where, with which command line."""
    for process in psutil.Process().children(recursive=True):
        command = " ".join(process.cmdline())
        seen.commands.append(command)
        seen.token = seen.token or process.environ().get("RAY_AUTH_TOKEN", "")
        for each in process.net_connections("inet"):
            if each.status == psutil.CONN_LISTEN:
                seen.listeners.append((command, each.laddr.ip.removeprefix("::ffff:"), each.laddr.port))
        for each in process.net_connections("unix"):
            if str(each.laddr).startswith("/"):
                seen.sockets[each.laddr] = any(p.stat().st_mode & 0o077 == 0 for p in Path(each.laddr).parents)


def attack(seen: Seen, stranger: Stranger) -> None:
    """Everything that the stranger knows to do; what worked leaves a mark."""
    ports = sorted({str(port) for _, _, port in seen.listeners})
    seen.answers = json.loads(stranger.tries("ports", *ports).stdout)
    (address,) = {found for command in seen.commands for found in re.findall(r"--gcs-address=(\S+)", command)}
    for as_owner in (False, True):  # the owner may open Ray's files, and still has no token
        seen.marks.append(stranger.folder / f"ray-{as_owner}")
        stranger.tries("ray", address, str(seen.marks[-1]), as_owner=as_owner)
    for port, answers in seen.answers.items():
        if "200" in answers:  # a SuperLink's health
            folder = stranger.new_folder()
            seen.marks.append(folder / "mark")
            if stranger.tries("flwr", f"127.0.0.1:{port}", str(folder)).returncode == 0:
                until(seen.marks[-1].exists)


@pytest.fixture(scope="module")
def seen(stranger: Stranger, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """A run on Ray that was attacked while it trained, on a machine whose proxy reaches nothing."""
    folder, seen = tmp_path_factory.mktemp("attacked"), Seen()
    out = folder / "run"
    failures: list[BaseException] = []
    over = threading.Event()
    prepared = prepare(RunInputs({**SETTINGS, "out-dir": str(out)}), Placement("ray", 3, 2))
    with pytest.MonkeyPatch.context() as patch, Session(Console(stderr=True)) as session:
        behind_a_dead_proxy(patch)
        app = session.app
        (app / "patient_client.py").write_text(PATIENT_CLIENT.replace("FOLDER", repr(str(folder))))
        simulation.stage_app(app, ("fedprune_app.server_app:app", "patient_client:app"))

        def meanwhile() -> None:
            try:
                until(lambda: over.is_set() or (folder / "waits").exists())
                look(seen)
                attack(seen, stranger)
            except BaseException as error:
                failures.append(error)
            finally:
                (folder / "go").touch()

        watcher = threading.Thread(target=meanwhile)
        watcher.start()
        try:
            seen.info = session.run(prepared, out)
        finally:
            over.set()
            watcher.join()
    if failures:
        raise failures[0]
    return seen


def rows(engine: str) -> dict[str, tuple[str, str]]:
    """SECURITY.md's table of what listens: a part of its command line, to address and credential."""
    found = {}
    for line in (ROOT / "SECURITY.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] == f"`{engine}`" and len(cells) == 4:
            found[cells[1].split("`")[1]] = cells[2], cells[3]
    return found


def test_a_stranger_can_run_nothing_on_the_ports_of_a_run(seen):
    assert not [mark for mark in seen.marks if mark.exists()]
    assert seen.answers
    for port, answers in seen.answers.items():
        assert set(answers) <= {"UNAUTHENTICATED", "UNIMPLEMENTED", "UNAVAILABLE", "401", "no HTTP"}, port
        assert {"UNAUTHENTICATED", "401"} & set(answers), port


def test_an_attacked_run_behind_a_proxy_ends_with_the_same_models(seen, tmp_path):
    assert seen.info["status"] == "completed"
    run_in_process(server_app.app, client_app.app, 3, {**seen.info["config"], "out-dir": str(tmp_path)})
    assert json.loads((tmp_path / "run.json").read_text())["final_sha256"] == seen.info["final_sha256"]


def test_the_secret_of_a_run_is_in_no_command_line(seen):
    assert len(seen.token) >= 32
    assert not [command for command in seen.commands if seen.token in command]


def test_the_files_through_which_a_run_talks_are_in_a_private_folder(seen):
    assert seen.sockets, "Ray's"
    assert all(seen.sockets.values()), seen.sockets


def test_what_listens_during_a_run_is_what_security_md_says(seen):
    table = rows("--engine ray")
    met = set()
    for command, address, port in seen.listeners:
        (name,) = [name for name in table if name in command] or [f"nothing for {command}:{port}"]
        assert name in table, name
        assert table[name][0] == address, name
        met.add(name)
    assert met == set(table)


def test_a_stranger_can_start_no_run_on_a_deployment_of_this_machine(stranger, tmp_path):
    """Not even with the certificate, which is no secret."""
    folder = stranger.new_folder()
    with local_deployment(tmp_path, []) as running:
        ca = folder / "ca.crt"
        ca.write_bytes(running.certificates.ca.read_bytes())
        ca.chmod(0o644)
        done = stranger.tries("flwr", f"127.0.0.1:{running.port}", str(folder), str(ca))
        assert done.returncode != 0
        assert "authenticat" in (done.stdout + done.stderr).lower()
        assert processes.flwr(running.link, "ls", "local")["runs"] == []
    for name in ("control.secret", "superexec.secret", "user/credentials.yaml"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
