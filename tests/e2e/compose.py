"""Run a compose file's services without a Docker engine: buildah's container, and a network namespace for each service.

As Docker would: one address per service on a network of their own, which has no way out; names in /etc/hosts; named
volumes that take over owner and mode of the folder they are mounted on; the image's user, no capabilities; services
start when what they depend on is healthy or done. Unlike Docker, the services share one container's root file system,
each with its own home and /tmp, and none is restarted. Needs root, buildah, iproute2 and docker-compose.
"""

from __future__ import annotations

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
_SUBNET = "10.213.77"


def call(*command: str | Path, check: bool = True, **more: Any) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, env=BUILDAH, timeout=300, **more)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))[:200]}: {(done.stderr or done.stdout).strip()[-400:]}")
    return done.stdout.strip()


def has_image(image: str) -> bool:
    return bool(shutil.which("buildah")) and bool(call("buildah", "images", "-q", f"localhost/{image}", check=False))


@dataclass
class Stack:
    """The services of one compose file below ``folder``: ``volumes/``, ``homes/`` and a log for each."""

    services: Mapping[str, Mapping[str, Any]]
    folder: Path
    container: str
    root: Path  # the container's file system
    prefix: str
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def namespace(self, name: str) -> str:
        return f"{self.prefix}-{name}"

    def log_file(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def _mounts(self, name: str) -> list[str]:
        mounts = []
        for own in ("home/fedprune", "tmp"):
            place = self.folder / "homes" / name / own.replace("/", "-")
            place.mkdir(parents=True, exist_ok=True)
            _like(place, self.root / own)
            mounts.append(f"{place}:/{own}")
        for volume in self.services[name].get("volumes", []):
            source, target, *mode = volume.split(":")
            if not source.startswith("/"):  # a named one
                place = self.folder / "volumes" / source
                if not place.exists():
                    place.mkdir(parents=True)
                    _like(place, self.root / target.lstrip("/"))
                source = str(place)
            mounts.append(":".join([source, target, *[m for m in mode if m == "ro"]]))
        return [word for mount in mounts for word in ("-v", mount)]

    def _inside(self, name: str, command: list[str]) -> list[str]:
        enter = ["nsenter", f"--net=/run/netns/{self.namespace(name)}"]
        run = ["buildah", "run", "--cap-drop", "all", "--no-hosts", *self._mounts(name)]
        return [*enter, *run, self.container, "--", *command]

    def start(self, name: str, command: list[str] | None = None) -> subprocess.Popen[bytes]:
        """Start a service, or another command in its place."""
        full = self._inside(name, command or list(self.services[name]["command"]))
        with self.log_file(name).open("ab") as log:
            process = subprocess.Popen(
                full, env=BUILDAH, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self.processes[name] = process
        return process

    def is_healthy(self, name: str) -> bool:
        kind, *test = self.services[name]["healthcheck"]["test"]
        assert kind == "CMD"
        return subprocess.run(self._inside(name, test), env=BUILDAH, capture_output=True, timeout=300).returncode == 0

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
    services = described(compose, environment)["services"]
    container = call("buildah", "from", "--pull-never", f"localhost/{image}")
    prefix = f"fp{os.getpid()}"
    switch = f"{prefix}-switch"
    made: Stack | None = None
    try:
        made = Stack(services, folder, container, Path(call("buildah", "mount", container)), prefix)
        hosts = "".join(f"{_SUBNET}.{k} {name}\n" for k, name in enumerate(services, start=2))
        (made.root / "etc/hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
        call("ip", "netns", "add", switch)
        call("ip", "-n", switch, "link", "add", "name", "bridge0", "type", "bridge")
        call("ip", "-n", switch, "link", "set", "bridge0", "up")
        for k, name in enumerate(services, start=2):
            own = made.namespace(name)
            call("ip", "netns", "add", own)
            call("ip", "-n", own, "link", "set", "lo", "up")
            call("ip", "-n", own, "link", "add", "eth0", "type", "veth", "peer", "name", f"p{k}", "netns", switch)
            call("ip", "-n", switch, "link", "set", f"p{k}", "master", "bridge0", "up")
            call("ip", "-n", own, "address", "add", f"{_SUBNET}.{k}/24", "dev", "eth0")
            call("ip", "-n", own, "link", "set", "eth0", "up")
        yield made
    finally:
        for name in reversed(list(services)):
            if made is not None:
                made.end(name)
            call("ip", "netns", "del", f"{prefix}-{name}", check=False)
        call("ip", "netns", "del", switch, check=False)
        call("buildah", "rm", container, check=False)
