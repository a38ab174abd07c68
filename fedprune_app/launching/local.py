"""A deployment with all its programs on this machine, to rehearse a real one.

This module makes certificates and node keys, and runs the same programs as on many machines:

* a SuperLink with TLS and a database, which accepts only registered keys,
* a SuperExec that runs ServerApps, so that a run survives a restart of the SuperLink,
* a SuperNode per client, with its own key, home and state folder.
"""

import json
import re
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from fedprune_app.config import ConfigError, Settings
from fedprune_app.engine.flower_private import has_fleet_port
from fedprune_app.engine.superlink import CREDENTIALS, SECRET_VARIABLE, credentials
from fedprune_app.errors import LaunchError
from fedprune_app.files import kept_secret, replace_file
from fedprune_app.launching import processes
from fedprune_app.launching.credentials import (
    Certificates,
    certificates_in,
    make_certificates,
    make_database,
    make_node_key,
    public_half,
)
from fedprune_app.launching.processes import LAUNCHER_VARIABLE, Link, launcher_identity

_KNOWN_KEY = "[code: 23]"  # of `flwr supernode register`
_NODE_SECONDS = 180.0
_NODE_ID = re.compile(r"SuperNode ID: (\d+)")  # in a SuperNode's log
_SUPERLINK = "superlink"
_EXECUTOR = "superexec"


def superlink_command(options: Sequence[str]) -> list[str]:
    """Return the command that starts Flower's SuperLink with these options and a check at its Control API.

    Raises :class:`ConfigError` if the path of Flower has spaces or commas, at which Flower splits it.
    """
    place = sysconfig.get_path("purelib")
    if " " in place or "," in place:
        raise ConfigError("folder of Flower", place, "a path without spaces and commas", condition="for its SuperLink")
    return [sys.executable, "-m", "fedprune_app.engine.superlink", *options]


def is_healthy(address: str, timeout_seconds: float = 3.0) -> bool:
    """Return whether a Flower program with ``--health-server-address ADDRESS`` reports there that it serves."""
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            answer = HealthStub(channel).Check(HealthCheckRequest(), timeout=timeout_seconds)
        except grpc.RpcError:
            return False
    return bool(answer.status == HealthCheckResponse.SERVING)


def _words(options: Mapping[str, object]) -> list[str]:
    return [str(word) for option in options.items() for word in option]


# --- the topology on this machine -----------------------------------------------------------------------------------


@dataclass
class Deployment:
    """Starts and ends the programs of a deployment: ``superlink``, ``superexec``, ``node-0``, ``node-1`` and so on.

    All their files are below ``folder``.
    """

    folder: Path
    certificates: Certificates
    port: int  # of the Runtime API and the Control API, and from Flower 1.40 on of the nodes, too
    fleet_port: int  # of the nodes, up to Flower 1.39
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def node_address(self) -> str:
        """The address at which nodes reach the SuperLink: at a separate port, if this release of Flower has one."""
        return f"127.0.0.1:{self.fleet_port if has_fleet_port() else self.port}"

    @property
    def link(self) -> Link:
        """A connection ``local`` by which users reach the SuperLink, and which checks its certificate."""
        home, address = self.folder / "user", f"127.0.0.1:{self.port}"
        content = (
            '[superlink]\ndefault = "local"\n\n[superlink.local]\n'
            f'address = "{address}"\nroot-certificates = "{self.certificates.ca}"\n'
        )
        replace_file(home / "config.toml", content.encode())
        replace_file(home / CREDENTIALS, credentials(address, kept_secret(self._secret("control"))), mode=0o600)
        return Link("local", processes.flower_environment(home), self.log_file(_SUPERLINK))

    def log_file(self, name: str) -> Path:
        return self.folder / name / "log.txt"

    def _secret(self, name: str) -> Path:
        path = self.folder / f"{name}.secret"
        kept_secret(path)
        return path

    def _spawn(
        self, name: str, command: Sequence[str], variables: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        home = self.folder / name
        home.mkdir(exist_ok=True)
        environment = {
            **processes.flower_environment(home),
            LAUNCHER_VARIABLE: launcher_identity(),
            **(variables or {}),
        }
        self.processes[name] = processes.spawn(command, environment, self.log_file(name))
        return self.processes[name]

    def start_superlink(self) -> None:
        """Start or restart the SuperLink; the database keeps its runs, nodes and messages."""
        database = self.folder / "superlink.db"
        if not database.exists():
            make_database(database)
        options = {
            "--isolation": "process",
            "--ssl-ca-certfile": self.certificates.ca,
            "--ssl-keyfile": self.certificates.key,
            "--ssl-certfile": self.certificates.certificate,
            "--superexec-auth-secret-file": self._secret(_EXECUTOR),
            "--database": database,
            "--host": "127.0.0.1",
            "--port": self.port,
            **({"--fleet-api-address": self.node_address} if has_fleet_port() else {}),
        }
        switches = ["--enable-supernode-auth", "--disable-runtime-dependency-installation"]
        command = superlink_command([*switches, *_words(options)])
        process = self._spawn(_SUPERLINK, command, {SECRET_VARIABLE: str(self._secret("control"))})
        url = f"https://127.0.0.1:{self.port}/health"
        processes.wait_until_up(process, url, self.log_file(_SUPERLINK), self.certificates.ca)

    def start_executor(self) -> None:
        options = {
            "--runtime-api-address": f"127.0.0.1:{self.port}",
            "--root-certificates": self.certificates.ca,
            "--superexec-auth-secret-file": self._secret(_EXECUTOR),
        }
        self._spawn(_EXECUTOR, [processes.tool("flower-superexec"), *_words(options)])

    def register(self, name: str) -> None:
        """Register the key of the node ``name`` at the SuperLink if it is not registered; make a missing key."""
        key = self.folder / name / "node.key"
        public = public_half(key) if public_half(key).exists() else make_node_key(key)
        try:
            processes.flwr(self.link, "supernode", "register", str(public), "local", "--name", name)
        except LaunchError as error:
            if _KNOWN_KEY not in str(error):
                raise

    def start_node(self, name: str, node_config: Settings) -> None:
        """Start or restart the SuperNode ``name``; its key makes it the same node as before.

        A SuperLink regards a killed node as online for about a minute, and rejects the node in this time. This method
        waits until then.
        """
        self._wait_until_missed(name)
        (port,) = processes.free_ports(1)
        options = {
            "--superlink": self.node_address,
            "--root-certificates": self.certificates.ca,
            "--host": "127.0.0.1",
            "--port": port,
            "--auth-supernode-private-key": self.folder / name / "node.key",
            "--node-config": node_config_text(node_config),
        }
        self._spawn(name, [processes.tool("flower-supernode"), *_words(options)])

    def _nodes(self) -> list[dict[str, object]]:
        nodes = processes.flwr(self.link, "supernode", "list", "local").get("nodes")
        return nodes if isinstance(nodes, list) else []

    def _wait_until_missed(self, name: str) -> None:
        log = self.log_file(name)
        ids = _NODE_ID.findall(log.read_text(errors="replace")) if log.exists() else []
        deadline = time.monotonic() + _NODE_SECONDS
        while ids and any((n.get("node-id"), n.get("status")) == (ids[-1], "online") for n in self._nodes()):
            if time.monotonic() > deadline:
                raise LaunchError(f"{name} is still online: another process has its key")
            time.sleep(2)

    def wait_for_nodes(self, count: int) -> None:
        """Wait until ``count`` nodes are online.

        Raises :class:`LaunchError` if a program of the deployment stops, or if nodes are still missing at the end.
        """
        deadline = time.monotonic() + _NODE_SECONDS
        while True:
            online = [node for node in self._nodes() if node.get("status") == "online"]
            if len(online) >= count:
                return
            for name, process in self.processes.items():
                if process.poll() is not None:
                    raise LaunchError(f"{name} stopped: {processes.last_line(self.log_file(name))}")
            if time.monotonic() > deadline:
                raise LaunchError(f"{len(online)} of {count} nodes came online within {_NODE_SECONDS:g} s")
            time.sleep(0.5)

    def kill(self, name: str) -> None:
        processes.end(self.processes.pop(name))

    def stop(self) -> None:
        for name in list(reversed(self.processes)):
            self.kill(name)


def node_config_text(values: Settings) -> str:
    """Return the value of ``--node-config`` in Flower's form: TOML values, separated by spaces.

    Raises :class:`ConfigError` for a value with a double quote, at which Flower ends a value even if it is escaped.
    """
    for key, value in values.items():
        if '"' in str(value):
            raise ConfigError(key, value, 'a text without "', where="node-config")
    return " ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in values.items())


@contextmanager
def local_deployment(folder: Path, nodes: Sequence[Settings]) -> Iterator[Deployment]:
    """Start a whole deployment on this machine, and end it when the block ends.

    Each entry of ``nodes`` is the node-config of one SuperNode. The state of node k is in ``folder/node-k/state``
    unless its node-config has a ``state-dir``. A ``folder`` with an earlier deployment continues it, with the same
    keys, nodes and states.
    """
    folder.mkdir(0o700, parents=True, exist_ok=True)  # private: it has keys, states and the SuperLink's messages
    certificates = certificates_in(folder / "certificates")
    if not certificates.ca.exists():
        make_certificates(folder / "certificates", ["127.0.0.1", "localhost"])
    port, fleet_port = processes.free_ports(2)
    deployment = Deployment(folder, certificates, port, fleet_port)
    try:
        deployment.start_superlink()
        deployment.start_executor()
        for k, node_config in enumerate(nodes):
            deployment.register(f"node-{k}")
            deployment.start_node(f"node-{k}", {"state-dir": str(folder / f"node-{k}" / "state"), **node_config})
        deployment.wait_for_nodes(len(nodes))
        yield deployment
    finally:
        deployment.stop()
