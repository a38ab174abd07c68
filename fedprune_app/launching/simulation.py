"""Simulation of a run through Flower: the app is staged, simulated and followed.

``flwr run`` exits with 0 even if the run fails. Its local SuperLink is a daemon that all programs on the machine share,
with the environment of the user who started it first, and with a port that every local user may use. So fedprune runs a
simulation in a process of its own, without a SuperLink.
"""

import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import clients
import strategies
from fedprune_app.config import DEFAULTS, Settings, to_toml
from fedprune_app.files import scratch_folder
from fedprune_app.launching import processes
from fedprune_app.launching.processes import CLIENTS_VARIABLE, LAUNCHER_VARIABLE, RecordedEnd, launcher_identity

_ROOT = sys.modules[__name__.partition(".")[0]]  # not imported, since that would be circular
_PACKAGES = (_ROOT, strategies, clients)
_COMPONENTS = ("fedprune_app.server_app:app", "fedprune_app.client_app:app")


def stage_app(folder: Path, components: tuple[str, str] = _COMPONENTS) -> Path:
    """Copy the Flower app into ``folder`` from the installed packages, of a wheel or a checkout."""
    for package in _PACKAGES:
        if "." in package.__name__:  # in a wheel it is within another package
            continue
        source = Path(package.__file__ or "").parent
        ignore = shutil.ignore_patterns("__pycache__", "*.pyc")
        shutil.copytree(source, folder / package.__name__, ignore=ignore, dirs_exist_ok=True)
    server, client = components
    (folder / "pyproject.toml").write_text(
        "[project]\n"
        'name = "fedprune"\n'
        f'version = "{_ROOT.__version__}"\n'
        'description = "Personalised federated pruning"\n'
        'license = "Apache-2.0"\n'
        "dependencies = []\n\n"
        "[tool.flwr.app]\n"
        'publisher = "fedprune"\n\n'
        "[tool.flwr.app.components]\n"
        f'serverapp = "{server}"\n'
        f'clientapp = "{client}"\n\n'
        f"[tool.flwr.app.config]\n{to_toml(DEFAULTS)}"
    )
    return folder


@dataclass(frozen=True)
class Simulation:
    """The process of a simulated run, and its log, whose last line is the reason of a failure."""

    process: subprocess.Popen[bytes]
    log_file: Path


@contextmanager
def started(
    app: Path,
    config: Settings,
    num_clients: int,
    num_workers: int,
    gpus: int,
    ray_address: str = "",
    engine: str = "ray",
) -> Iterator[Simulation]:
    """Start a run of the app in the folder ``app`` with simulated clients, and end all of it when the block ends.

    ``num_workers`` processes run clients, and share this machine's ``gpus``. With ``ray_address`` ("host:port") the
    number of processes is that of the Ray cluster's CPUs, or of its GPUs if it has any and ``gpus`` is not 0. The
    ``engine`` is ``ray`` or ``flower``.
    """
    settings = {
        "engine": engine,
        "app": str(app),
        "config": dict(config),
        "num-clients": num_clients,
        "gpus": gpus,
        "workers": 0 if ray_address else num_workers,
    }
    # Ray's default place: its sockets are below this folder, and their paths may have only 107 characters.
    place = Path(os.environ.get("RAY_TMPDIR", "/tmp"))
    place.mkdir(parents=True, exist_ok=True)
    with scratch_folder(place) as folder:
        (folder / "settings.json").write_text(json.dumps(settings))
        environment = {
            **processes.flower_environment(folder / "flwr"),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(app), os.environ.get("PYTHONPATH")])),
            "RAY_worker_niceness": "0",  # Ray's workers run at nice 15 and starve on a busy machine
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_DEDUP_LOGS": "0",
            LAUNCHER_VARIABLE: launcher_identity(),
            CLIENTS_VARIABLE: str(num_clients),
            **(_ray_of_others(ray_address) if ray_address else _ray_of_our_own(folder)),
        }
        command = [sys.executable, "-m", "fedprune_app.engine.simulation", str(folder / "settings.json")]
        process = processes.spawn(command, environment, folder / "log.txt")
        try:
            yield Simulation(process, folder / "log.txt")
        finally:
            processes.end(process)


def _ray_of_our_own(folder: Path) -> dict[str, str]:
    """Return the environment of a private Ray: with a secret, on loopback, and with a private folder for its files.

    By default Ray allows everybody to connect and to write to its files, and both are enough to run code as its owner.
    """
    return {
        "RAY_ADDRESS": "local",  # otherwise Ray would join any cluster on this machine
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # on those systems Ray listens on loopback, not on all interfaces
        "RAY_TMPDIR": str(folder),
    }


def _ray_of_others(address: str) -> dict[str, str]:
    """Return the environment for the user's own cluster, with the user's token for it, if any."""
    has_token = any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    mode = {"RAY_AUTH_MODE": "token"} if has_token and "RAY_AUTH_MODE" not in os.environ else {}
    return {"RAY_ADDRESS": address, **mode}


def wait_for(simulation: Simulation, run_file: Path, on_tick: Callable[[], None]) -> bool:
    """Wait until a simulation is over, and return whether its run was completed.

    Flower waits for clients that never reply, so a run also counts as over a few seconds after ``run_file`` records its
    end.
    """
    record = RecordedEnd(run_file)
    while simulation.process.poll() is None:
        on_tick()
        record.read()
        if record.has_lingered:
            return record.is_completed
        time.sleep(0.1)
    return simulation.process.returncode == 0
