"""Run a compose file's services without a Docker engine: buildah's container, and namespaces for each service.

As Docker would: an address per service on each of its networks, which have no way out; the names of those it shares a
network with, and nobody else's, in /etc/hosts; a root file system that is read-only, with named volumes and file
systems in memory; named volumes take over owner and mode of the folder they are mounted on; the image's user and
environment, no capabilities, no new privileges; services start when what they depend on is healthy or done. Unlike
Docker, nothing is restarted, and nothing limits memory and processes. Needs root, buildah, iproute2, util-linux and
docker-compose.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

BUILDAH = {**os.environ, "BUILDAH_ISOLATION": "chroot"}
_SUBNET = "10.213.7"


def call(*command: str | Path, check: bool = True, **more: Any) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, env=BUILDAH, timeout=300, **more)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))[:200]}: {(done.stderr or done.stdout).strip()[-400:]}")
    return done.stdout.strip()


def has_image(image: str) -> bool:
    return bool(shutil.which("buildah")) and bool(call("buildah", "images", "-q", f"localhost/{image}", check=False))


@dataclass
class Stack:
    """The services of one compose file below ``folder``: ``volumes/``, and a log for each."""

    services: Mapping[str, Mapping[str, Any]]
    folder: Path
    container: str
    root: Path  # the container's file system
    prefix: str
    environment: list[str]  # of the image, KEY=VALUE
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def namespace(self, name: str) -> str:
        return f"{self.prefix}-{name}"

    def log_file(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def _mounts(self, name: str) -> list[str]:
        """Shell commands that make the service's file system of the container's, in a mount namespace of its own."""
        service = self.services[name]
        commands = [f"mount --bind {self.root} {self.root}"]
        if service.get("read_only"):
            commands.append(f"mount -o remount,bind,ro {self.root}")
        commands += [f"mount -t proc proc {self.root}/proc", f"mount --rbind /dev {self.root}/dev"]
        commands.append(f"mount --bind {self.folder}/{name}.hosts {self.root}/etc/hosts")
        for each in service.get("tmpfs", []):
            place, _, options = each.partition(":")
            commands.append(f"mount -t tmpfs -o noexec,nosuid,nodev,{options} tmpfs {self.root}{place}")
        for volume in service.get("volumes", []):
            source, target, *mode = volume.split(":")
            if not source.startswith("/"):  # a named one
                place = self.folder / "volumes" / source
                if not place.exists():
                    place.mkdir(parents=True)
                    _like(place, self.root / target.lstrip("/"))
                source = str(place)
            commands.append(f"mount --bind {source} {self.root}{target}")
            if "ro" in mode:
                commands.append(f"mount -o remount,bind,ro {self.root}{target}")
        return commands

    def inside(self, name: str, *command: str) -> list[str]:
        """A command line that runs ``command`` in the service: its networks, its file system, its rights."""
        isolated = ["nsenter", f"--net=/run/netns/{self.namespace(name)}"]
        isolated += ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-euc"]
        isolated += ["; ".join([*self._mounts(name), 'exec "$@"']), "sh", "chroot", str(self.root)]
        isolated += ["env", "-i", *self.environment]
        isolated += ["setpriv", "--reuid=1000", "--regid=1000", "--clear-groups", "--bounding-set=-all"]
        isolated += ["--inh-caps=-all", "--no-new-privs", "sh", "-c", 'cd && exec "$@"', "sh"]
        return [*isolated, *command]

    def start(self, name: str, command: list[str] | None = None) -> subprocess.Popen[bytes]:
        """Start a service, or another command in its place."""
        full = self.inside(name, *(command or self.services[name]["command"]))
        with self.log_file(name).open("ab") as log:
            process = subprocess.Popen(
                full, env=BUILDAH, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self.processes[name] = process
        return process

    def is_healthy(self, name: str) -> bool:
        kind, *test = self.services[name]["healthcheck"]["test"]
        assert kind == "CMD"
        return subprocess.run(self.inside(name, *test), env=BUILDAH, capture_output=True, timeout=300).returncode == 0

    def wait_for(self, name: str, condition: str, deadline: float) -> None:
        process = self.processes[name]
        while True:
            code = process.poll()
            if condition == "service_completed_successfully" and code is not None:
                if code:
                    raise RuntimeError(f"{name} ended with code {code}: {self.log_file(name).read_text()[-400:]}")
                return
            if condition == "service_healthy":
                if code is not None:
                    raise RuntimeError(f"{name} stopped: {self.log_file(name).read_text()[-400:]}")
                if self.is_healthy(name):
                    return
            if time.monotonic() > deadline:
                raise RuntimeError(f"{name} was not {condition} in time: {self.log_file(name).read_text()[-400:]}")
            time.sleep(1)

    def up(self, seconds: float) -> None:
        """Start everything, each service when what it depends on is as it asks for."""
        deadline = time.monotonic() + seconds
        while len(self.processes) < len(self.services):
            for name, service in self.services.items():
                needs = service.get("depends_on", {})
                if name not in self.processes and all(each in self.processes for each in needs):
                    for each, how in needs.items():
                        self.wait_for(each, how["condition"], deadline)
                    self.start(name)

    def end(self, name: str) -> None:
        """Everything in the service's network namespace is the service's."""
        pids = [int(pid) for pid in call("ip", "netns", "pids", self.namespace(name), check=False).split()]
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if name in self.processes:
            self.processes.pop(name).wait(timeout=60)


def _like(folder: Path, other: Path) -> None:
    status = other.stat()
    os.chown(folder, status.st_uid, status.st_gid)
    folder.chmod(status.st_mode & 0o7777)


def described(compose: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """The file as docker-compose understands it."""
    text = subprocess.run(
        ["docker-compose", "-f", str(compose), "config"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    return dict(yaml.safe_load(text))


@contextmanager
def stack(compose: Path, folder: Path, image: str, environment: Mapping[str, str]) -> Iterator[Stack]:
    """The services of a compose file, ready to start, on a network of their own; all is gone on the way out."""
    file = described(compose, environment)
    services = file["services"]
    networks = list(file.get("networks", {}))
    container = call("buildah", "from", "--pull-never", f"localhost/{image}")
    variables = json.loads(call("buildah", "inspect", container))["OCIv1"]["config"]["Env"]
    prefix = f"fp{os.getpid()}"
    switch = f"{prefix}-switch"
    made: Stack | None = None
    try:
        root = Path(call("buildah", "mount", container))
        made = Stack(services, folder, container, root, prefix, variables)
        call("ip", "netns", "add", switch)
        for n, _ in enumerate(networks):
            call("ip", "-n", switch, "link", "add", "name", f"bridge{n}", "type", "bridge")
            call("ip", "-n", switch, "link", "set", f"bridge{n}", "up")
        for k, (name, service) in enumerate(services.items(), start=2):
            own = made.namespace(name)
            call("ip", "netns", "add", own)
            call("ip", "-n", own, "link", "set", "lo", "up")
            for n, network in enumerate(networks):
                if network in service.get("networks", {}):
                    outer, inner = f"p{k}-{n}", f"eth{n}"
                    call("ip", "-n", own, "link", "add", inner, "type", "veth", "peer", "name", outer, "netns", switch)
                    call("ip", "-n", switch, "link", "set", outer, "master", f"bridge{n}", "up")
                    call("ip", "-n", own, "address", "add", f"{_SUBNET}{n}.{k}/24", "dev", inner)
                    call("ip", "-n", own, "link", "set", inner, "up")
            (folder / f"{name}.hosts").write_text(_hosts(services, networks, service))
        yield made
    finally:
        for name in reversed(list(services)):
            if made is not None:
                made.end(name)
            call("ip", "netns", "del", f"{prefix}-{name}", check=False)
        call("ip", "netns", "del", switch, check=False)
        call("buildah", "rm", container, check=False)


def _hosts(services: Mapping[str, Any], networks: list[str], service: Mapping[str, Any]) -> str:
    """Whom this service can call by name."""
    lines = ["127.0.0.1 localhost"]
    for n, network in enumerate(networks):
        for k, (name, other) in enumerate(services.items(), start=2):
            if network in service.get("networks", {}) and network in other.get("networks", {}):
                aliases = (other["networks"][network] or {}).get("aliases", [])
                lines.append(" ".join([f"{_SUBNET}{n}.{k}", name, *aliases]))
    return "\n".join(lines) + "\n"
