"""A run goes through Flower from one command: the app is staged, simulated or submitted, followed and stopped.

``flwr run`` exits with 0 even if the run fails. Its local SuperLink is a daemon that all programs on the machine share,
with the environment of the user who started it first, and with a port that every local user may use. So fedprune runs a
simulation in a process of its own, without a SuperLink. On a SuperLink of real nodes fedprune asks for a run's true
status again and again.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

import clients
import fedprune_app
import strategies
from fedprune_app.config import DEFAULTS, Scalar, to_toml
from fedprune_app.engine.watchdog import CLIENTS_VARIABLE, LAUNCHER_VARIABLE, launcher_identity
from fedprune_app.errors import LaunchError
from fedprune_app.files import appending, scratch_folder
from fedprune_app.results.recorder import GIT_VARIABLE, loaded_hash

_PACKAGES = (fedprune_app, strategies, clients)
_COMPONENTS = ("fedprune_app.server_app:app", "fedprune_app.client_app:app")
_START_SECONDS = 90
_ANSWER_SECONDS = 120
_IS_OVER = "[code: 18]"  # of `flwr stop`
_STATUS_SECONDS = 0.5
_UNASKED_SECONDS = 30.0
_PATIENCE = 5  # so many questions in a row may stay unanswered
# loaded here, since nothing should be loaded between fork and exec
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_LINGER_SECONDS = 10.0
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Link:
    """A link says how to reach a SuperLink: the name of its connection, and the environment to call ``flwr`` in."""

    name: str
    environment: Mapping[str, str]
    log_file: Path | None = None


def stage_app(folder: Path, components: tuple[str, str] = _COMPONENTS) -> Path:
    """Lay out the Flower app in ``folder`` from the installed packages, whether these are a wheel or a checkout."""
    for package in _PACKAGES:
        if "." in package.__name__:  # in a wheel it is within another one
            continue
        source = Path(package.__file__ or "").parent
        ignore = shutil.ignore_patterns("__pycache__", "*.pyc")
        try:
            shutil.copytree(source, folder / package.__name__, ignore=ignore, dirs_exist_ok=True)
        except shutil.Error as error:  # on a full disk it has a reason for each file
            raise OSError(error.args[0][0][2]) from None
    server, client = components
    (folder / "pyproject.toml").write_text(
        "[project]\n"
        'name = "fedprune"\n'
        f'version = "{fedprune_app.__version__}"\n'
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
    """A simulation is a process of its own with a log; where the simulation fails, the last line is the reason."""

    process: subprocess.Popen[bytes]
    log_file: Path


@contextmanager
def simulation(
    app: Path,
    config: Mapping[str, Scalar],
    num_clients: int,
    num_workers: int,
    gpus: int,
    ray_address: str = "",
    engine: str = "ray",
) -> Iterator[Simulation]:
    """Start a run of the app in the folder ``app`` with simulated clients, and end all of it when the block ends.

    ``num_workers`` processes hold clients, and share this machine's ``gpus``. With ``ray_address`` ("host:port") there
    are as many processes as the Ray cluster there has CPUs; if the cluster has GPUs and ``gpus`` is not 0, as many as
    it has GPUs. The ``engine`` is ``ray`` or ``flower``.
    """
    settings = {
        "engine": engine,
        "app": str(app),
        "config": dict(config),
        "num-clients": num_clients,
        "gpus": gpus,
        "workers": 0 if ray_address else num_workers,
    }
    # Ray's sockets are below this folder and their paths may have only 107 characters. So it is where Ray puts its own.
    place = Path(os.environ.get("RAY_TMPDIR", "/tmp"))
    place.mkdir(parents=True, exist_ok=True)
    with scratch_folder(place) as folder:
        (folder / "settings.json").write_text(json.dumps(settings))
        environment = {
            **flower_environment(folder / "flwr"),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(app), os.environ.get("PYTHONPATH")])),
            "RAY_worker_niceness": "0",  # Ray's workers run at nice 15 and starve on a busy machine
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_DEDUP_LOGS": "0",
            LAUNCHER_VARIABLE: launcher_identity(),
            CLIENTS_VARIABLE: str(num_clients),
            **(_ray_of_others(ray_address) if ray_address else _ray_of_our_own(folder)),
        }
        command = [sys.executable, "-m", "fedprune_app.engine.simulation", str(folder / "settings.json")]
        process = spawn(command, environment, folder / "log.txt")
        try:
            yield Simulation(process, folder / "log.txt")
        finally:
            end(process)


def _ray_of_our_own(folder: Path) -> dict[str, str]:
    """Return the environment of a Ray that nobody else can use: a secret, loopback, and a private folder for its files.

    By default Ray lets everybody connect and write to its files. A user who connects to Ray can run code as its owner,
    and so can a user who may write to its files.
    """
    return {
        "RAY_ADDRESS": "local",  # without one, Ray would join whatever cluster it finds here
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # on those systems Ray listens on loopback, not on all interfaces
        "RAY_TMPDIR": str(folder),
    }


def _ray_of_others(address: str) -> dict[str, str]:
    """Return the environment that leads to the user's own cluster, with the user's token for it if there is one."""
    has_token = any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    mode = {"RAY_AUTH_MODE": "token"} if has_token and "RAY_AUTH_MODE" not in os.environ else {}
    return {"RAY_ADDRESS": address, **mode}


def wait_for(simulation: Simulation, run_file: Path, on_tick: Callable[[], None]) -> bool:
    """Wait until a simulation is over, and return whether its run was completed.

    Flower waits for clients that never answer. So a run also counts as over a few seconds after its ``run_file`` says
    that it is over.
    """
    record = _Record(run_file)
    while simulation.process.poll() is None:
        on_tick()
        record.read()
        if record.has_lingered:
            return record.is_completed
        time.sleep(0.1)
    return simulation.process.returncode == 0


def flower_environment(home: Path) -> dict[str, str]:
    """Return the environment for Flower's programs beside this Python's, with ``home`` as their ``FLWR_HOME``."""
    bin_folder = str(Path(sys.executable).parent)
    return {
        **direct_on_loopback(os.environ),
        "PATH": f"{bin_folder}{os.pathsep}{os.environ.get('PATH', '')}",
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "PYTHONWARNINGS": "ignore",
        GIT_VARIABLE: loaded_hash() or "",
    }


def direct_on_loopback(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which programs reach this machine itself without a proxy; its other exceptions stay."""
    upper, lower = environment.get("NO_PROXY"), environment.get("no_proxy")
    # some programs read one of the two, and some read the other
    both = {"NO_PROXY": upper or lower or "", "no_proxy": lower or upper or ""}
    for name, value in both.items():
        if value != "*":
            known = [host.strip() for host in value.split(",") if host.strip()]
            both[name] = ",".join(known + [host for host in _LOOPBACK if host not in known])
    return {**environment, **both}


def spawn(command: Sequence[str], environment: Mapping[str, str], log_file: Path) -> subprocess.Popen[bytes]:
    """Start a program that ends with this process.

    The program runs in the folder of ``log_file`` and appends its output to that file.
    """
    with appending(log_file) as log:
        return subprocess.Popen(
            command,
            env=environment,
            cwd=log_file.parent,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )


def _die_with_parent() -> None:
    """Arrange in the child, on Linux, that it is killed when this process is.

    So a run does not go on alone after this process was killed with -9.
    """
    if _LIBC is not None:
        _LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG; for what it started see engine/watchdog.py


def tool(name: str) -> str:
    """Return the path of the program ``name`` beside this Python, or else on the PATH.

    Raises :class:`LaunchError` if the program is not installed.
    """
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise LaunchError(f"command {name!r} is not installed beside {sys.executable}")
    return found


def free_ports(count: int) -> list[int]:
    """Return ``count`` different ports of 127.0.0.1 that no program uses now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def wait_until_up(process: subprocess.Popen[bytes], url: str, log_file: Path, ca: Path | None = None) -> None:
    """Wait until ``url`` answers; ``ca`` is the certificate that the answer is checked with.

    Raises :class:`LaunchError` if ``url`` does not answer in time, or if the process ends before.
    """
    verify = ssl.create_default_context(cafile=ca) if ca else True
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise LaunchError(f"the SuperLink stopped at once: {last_line(log_file)}")
        try:
            if httpx.get(url, timeout=1, trust_env=False, verify=verify).is_success:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise LaunchError(f"the SuperLink did not come up within {_START_SECONDS} s: {last_line(log_file)}")


def last_line(path: Path) -> str:
    """Return the last line of a log that is not blank, or "no output" where there is none."""
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else "no output"


def end(process: subprocess.Popen[bytes]) -> None:
    """End a program, such as a SuperLink, and all processes that it started, even those with sessions of their own.

    Executors, the simulation and Ray have such sessions. All are killed at once: everything worth keeping is written in
    one step, and a simulation that is asked to end may go on.
    """
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(process.pid)
        family = [root, *root.children(recursive=True)]
        for member in family:
            with suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs(family, timeout=10)
    process.wait(timeout=10)


def flwr(link: Link, *arguments: str) -> dict[str, object]:
    """Call the Flower command line and return its JSON answer.

    Raises :class:`LaunchError` with Flower's own words if the command fails.
    """
    command = [tool("flwr"), *arguments, "--format", "json"]
    try:
        done = subprocess.run(
            command,
            env=direct_on_loopback(link.environment),
            capture_output=True,
            text=True,
            timeout=_ANSWER_SECONDS,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C and the terminal's end are handled by this process alone
        )
    except subprocess.TimeoutExpired:
        raise LaunchError(f"flwr {arguments[0]}: no answer within {_ANSWER_SECONDS} s") from None
    start = done.stdout.find("{")
    try:
        answer: dict[str, object] = json.loads(done.stdout[start:]) if start >= 0 else {}
    except json.JSONDecodeError:
        answer = {}
    if done.returncode != 0 or not answer.get("success", False):
        said = str(answer.get("error-message") or done.stderr or done.stdout).strip().splitlines()
        raise LaunchError(f"flwr {arguments[0]}: {said[-1].strip() if said else 'no answer'}")
    return answer


def submit(link: Link, app: Path, config: Mapping[str, Scalar]) -> str:
    """Start a run and return its id."""
    with tempfile.NamedTemporaryFile("w", suffix=".toml", prefix="fedprune-", delete=False) as file:
        file.write(to_toml(config))
    try:
        return str(flwr(link, "run", str(app), link.name, "--run-config", file.name)["run-id"])
    finally:
        Path(file.name).unlink()


def _run_row(link: Link, run_id: str) -> dict[str, object]:
    runs = flwr(link, "ls", link.name, "--run-id", run_id).get("runs")
    if not (isinstance(runs, list) and runs and isinstance(runs[0], dict)):
        raise LaunchError(f"flwr ls: run {run_id} is unknown")
    return runs[0]


def follow(link: Link, run_id: str, folder: Path, on_tick: Callable[[], None]) -> str:
    """Wait until the run has finished and return Flower's final status, such as ``finished:completed``.

    To ask Flower costs a second of CPU. So Flower is asked when run.json says that the run is over, and else seldom.
    Flower waits for clients that never answer. So a run counts as over a few seconds after run.json says so, whatever
    Flower says.
    """
    record = _Record(folder / "run.json")
    asked, unanswered = time.monotonic(), 0
    while True:
        on_tick()
        record.read()
        if time.monotonic() - asked > (_STATUS_SECONDS if record.is_over else _UNASKED_SECONDS):
            try:
                current, unanswered = str(_run_row(link, run_id)["status"]), 0
            except LaunchError:
                unanswered += 1
                if unanswered == _PATIENCE:
                    raise LaunchError("the SuperLink does not answer") from None
                current = "unknown"
            if current.startswith("finished"):
                return current
            asked = time.monotonic()
        if record.has_lingered:
            return "finished:completed" if record.is_completed else "finished:failed"
        time.sleep(0.1)


class _Record:
    """What run.json says, while the run is waited for: whether the run is over, since when, and how it ended."""

    def __init__(self, run_file: Path) -> None:
        self._file = run_file
        self._before = outcome_of(run_file)  # the outcome of an earlier part, if the run is resumed
        self._outcome: tuple[str, int] | None = None
        self._since = 0.0

    def read(self) -> None:
        """Read the file again."""
        was_over = self.is_over
        outcome = outcome_of(self._file)
        self._outcome = outcome if outcome != self._before else None
        if self.is_over and not was_over:
            self._since = time.monotonic()

    @property
    def is_over(self) -> bool:
        """Whether the file says that the run is over."""
        return self._outcome is not None

    @property
    def is_completed(self) -> bool:
        """Whether the file says that the run was completed."""
        return self._outcome is not None and self._outcome[0] == "completed"

    @property
    def has_lingered(self) -> bool:
        """Whether the file has said for a few seconds that the run is over."""
        return self.is_over and time.monotonic() - self._since > _LINGER_SECONDS


def outcome_of(run_file: Path) -> tuple[str, int] | None:
    """Return how the run in a folder ended, and the time at which the file said so, or None while the run goes on."""
    try:
        status = str(json.loads(run_file.read_text())["status"])
        return None if status == "running" else (status, run_file.stat().st_mtime_ns)
    except (OSError, ValueError, KeyError):
        return None


def failure(link: Link, run_id: str) -> str:
    """Return one line on why a run failed that left no reason itself.

    The line is from Flower's details, or the last line of Flower's log.
    """
    details = str(_run_row(link, run_id).get("status-details") or "").strip().splitlines()
    if details:
        return details[-1]
    return last_line(link.log_file) if link.log_file else "the run failed; see `flwr log`"


def stop_run(link: Link, run_id: str) -> None:
    """Stop a run, unless the run has ended by itself.

    Raises :class:`LaunchError` if the SuperLink cannot be told.
    """
    try:
        flwr(link, "stop", run_id, link.name)
    except LaunchError as error:
        if _IS_OVER not in str(error):
            raise
