"""Flower's programs as child processes: environment, logs, end; and calls of Flower's command line.

A run ends with the process of ``fedprune run``, even if that was killed with -9. Otherwise Flower's simulation could
outlive it and write into the run folder while the run is resumed. So the launcher's identity is in the environment, and
the ServerApp watches the launcher.
"""

import ctypes
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from fedprune_app.config import Settings, to_toml
from fedprune_app.core.named import ValueDict
from fedprune_app.errors import LaunchError
from fedprune_app.files import appending, replace_file
from fedprune_app.results.recorder import GIT_VARIABLE, git_hash

_START_SECONDS = 90


# loaded here, since loading between fork and exec is unsafe
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_LOOPBACK = "localhost,127.0.0.1,::1"


def flower_environment(home: Path) -> dict[str, str]:
    """Return the environment for the Flower programs of this Python, with ``home`` as their ``FLWR_HOME``."""
    bin_folder = str(Path(sys.executable).parent)
    return {
        **direct_on_loopback(os.environ),
        "PATH": f"{bin_folder}{os.pathsep}{os.environ.get('PATH', '')}",
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "PYTHONWARNINGS": "ignore",
        GIT_VARIABLE: git_hash() or "",
    }


def direct_on_loopback(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which programs use no proxy for loopback; other exceptions stay."""
    hosts = environment.get("no_proxy") or environment.get("NO_PROXY") or _LOOPBACK
    if hosts != "*" and not hosts.endswith(_LOOPBACK):
        hosts = f"{hosts},{_LOOPBACK}"
    return {**environment, "NO_PROXY": hosts, "no_proxy": hosts}  # programs differ in which one they read


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
    """In the child, on Linux: have it killed when this process dies, even by kill -9."""
    if _LIBC is not None:
        _LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG; for its own children see watch_launcher


def tool(name: str) -> str:
    """Return the path of the program ``name`` beside this Python, or else on the PATH.

    Raises :class:`LaunchError` if the program is not installed.
    """
    path = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if path is None:
        raise LaunchError(f"command {name!r} is not installed beside {sys.executable}")
    return path


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]


def wait_until_up(process: subprocess.Popen[bytes], url: str, log_file: Path, ca: Path) -> None:
    """Wait until ``url`` responds with a certificate that ``ca`` has signed.

    Raises :class:`LaunchError` if it does not respond in time, or if the process ends first.
    """
    verify = ssl.create_default_context(cafile=ca)
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
    """Return the last line of a log that is not blank, or "no output" if there is none."""
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else "no output"


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a program, such as a SuperLink, and all processes that it started, even those with sessions of their own.

    Executors, the simulation and Ray have such sessions. They are killed, not terminated: files are replaced in one
    step, so none is left half written, and a terminated simulation may continue.
    """
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(process.pid)
        family = [root, *root.children(recursive=True)]
        for member in family:
            with suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs(family, timeout=10)
    process.wait(timeout=10)


_LINGER_SECONDS = 10.0


class RecordedEnd:
    """Watches run.json for the end of a run: whether the run is over, since when, and with which status."""

    def __init__(self, run_file: Path) -> None:
        self._file = run_file
        self._before = outcome_of(run_file)  # the outcome of an earlier part, if the run is resumed
        self._outcome: tuple[str, int] | None = None
        self._since = 0.0

    def read(self) -> None:
        was_over = self.is_over
        outcome = outcome_of(self._file)
        self._outcome = outcome if outcome != self._before else None
        if self.is_over and not was_over:
            self._since = time.monotonic()

    @property
    def is_over(self) -> bool:
        return self._outcome is not None

    @property
    def is_completed(self) -> bool:
        return self._outcome is not None and self._outcome[0] == "completed"

    @property
    def has_lingered(self) -> bool:
        """Whether the file has recorded the end for a few seconds already."""
        return self.is_over and time.monotonic() - self._since > _LINGER_SECONDS


def outcome_of(run_file: Path) -> tuple[str, int] | None:
    """Return the final status of a run and the time of its run.json, or None while the run is running."""
    status = read_json(run_file).get("status", "running")
    return None if status == "running" else (str(status), run_file.stat().st_mtime_ns)


def read_json(path: Path) -> ValueDict:
    """Return the object in a JSON file; empty if the file is missing or incomplete."""
    try:
        table = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return table if isinstance(table, dict) else {}


# --- watching the launcher --------------------------------------------------------------------------------------------


# the environment variable with the number of clients in a launcher's simulation
CLIENTS_VARIABLE = "FEDPRUNE_CLIENTS"
LAUNCHER_VARIABLE = "FEDPRUNE_LAUNCHER"
_CHECK_SECONDS = 0.5
_SAME_START = 2.0  # seconds; no process number is reused so soon
_REFUSAL = ".refusal"


def launcher_identity() -> str:
    """Return this process as a value of :data:`LAUNCHER_VARIABLE`.

    It has the process's start time, since a later process may have the same number.
    """
    return f"{os.getpid()}:{psutil.Process().create_time()}"


def watch_launcher() -> None:
    """End this process, and Ray with it, as soon as the launcher in the environment has ended.

    Without a launcher in the environment nothing is watched.
    """
    identity = os.environ.get(LAUNCHER_VARIABLE)
    if identity is None:
        return
    pid, _, start = identity.partition(":")
    if int(pid) == os.getpid():
        return

    def watch() -> None:
        with suppress(psutil.NoSuchProcess):
            launcher = psutil.Process(int(pid))
            if abs(launcher.create_time() - float(start)) < _SAME_START:
                while launcher.is_running() and launcher.status() != psutil.STATUS_ZOMBIE:
                    time.sleep(_CHECK_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="launcher-watch", daemon=True).start()


def notify_launcher(folder: Path, refusal: str) -> None:
    """Write for a waiting launcher why the settings or the run folder are rejected.

    It is not written to run.json, since a run that is not resumed must not change. Flower keeps only 300 characters of
    an error.
    """
    if LAUNCHER_VARIABLE in os.environ:
        with suppress(OSError):
            replace_file(folder / _REFUSAL, refusal.encode())


def read_setting_error(folder: Path) -> str:
    """Return the text of :func:`notify_launcher` in a run folder, and remove it; empty if there is none."""
    with suppress(OSError):
        text = (folder / _REFUSAL).read_text()
        (folder / _REFUSAL).unlink()
        return text
    return ""


# --- Flower's command line --------------------------------------------------------------------------------------------


_ANSWER_SECONDS = 120
_IS_OVER = "[code: 18]"  # of `flwr stop`
_STATUS_SECONDS = 0.5
_UNASKED_SECONDS = 30.0
_PATIENCE = 5  # failed status requests in a row until a run counts as lost


@dataclass(frozen=True)
class Link:
    """How to reach a SuperLink: the name of its connection, and the environment for ``flwr``."""

    name: str
    environment: Mapping[str, str]
    log_file: Path | None = None


def flwr(link: Link, *arguments: str) -> dict[str, object]:
    """Call the Flower command line and return its JSON output.

    Raises :class:`LaunchError` with Flower's own message if the command fails.
    """
    command = [tool("flwr"), *arguments, "--format", "json"]
    try:
        process = subprocess.run(
            command,
            env=direct_on_loopback(link.environment),
            capture_output=True,
            text=True,
            timeout=_ANSWER_SECONDS,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # only this process handles Ctrl-C and the end of the terminal
        )
    except subprocess.TimeoutExpired:
        raise LaunchError(f"flwr {arguments[0]}: no answer within {_ANSWER_SECONDS} s") from None
    try:
        answer: dict[str, object] = json.loads("{" + process.stdout.partition("{")[2])
    except json.JSONDecodeError:
        answer = {}
    if process.returncode != 0 or not answer.get("success", False):
        lines = str(answer.get("error-message") or process.stderr or process.stdout).strip().splitlines()
        raise LaunchError(f"flwr {arguments[0]}: {lines[-1].strip() if lines else 'no answer'}")
    return answer


def submit(link: Link, app: Path, config: Settings) -> str:
    with tempfile.NamedTemporaryFile("w", suffix=".toml", prefix="fedprune-") as file:
        file.write(to_toml(config))
        file.flush()
        return str(flwr(link, "run", str(app), link.name, "--run-config", file.name)["run-id"])


def _run_row(link: Link, run_id: str) -> dict[str, object]:
    runs = flwr(link, "ls", link.name, "--run-id", run_id).get("runs")
    if not (isinstance(runs, list) and runs and isinstance(runs[0], dict)):
        raise LaunchError(f"flwr ls: run {run_id} is unknown")
    return runs[0]


def follow(link: Link, run_id: str, folder: Path, on_tick: Callable[[], None]) -> str:
    """Wait until the run has finished and return Flower's final status, such as ``finished:completed``.

    A status request costs a second of CPU, so it is made after run.json records the end, and otherwise rarely. Flower
    waits for clients that never reply, so a run counts as over a few seconds after run.json records its end.
    """
    record = RecordedEnd(folder / "run.json")
    asked_at, unanswered = time.monotonic(), 0
    while True:
        on_tick()
        record.read()
        if time.monotonic() - asked_at > (_STATUS_SECONDS if record.is_over else _UNASKED_SECONDS):
            try:
                current, unanswered = str(_run_row(link, run_id)["status"]), 0
            except LaunchError:
                unanswered += 1
                if unanswered == _PATIENCE:
                    raise LaunchError("the SuperLink does not answer") from None
                current = "unknown"
            if current.startswith("finished"):
                return current
            asked_at = time.monotonic()
        if record.has_lingered:
            return "finished:completed" if record.is_completed else "finished:failed"
        time.sleep(0.1)


def failure(link: Link, run_id: str) -> str:
    """Return one line on why a run failed that recorded no reason: from Flower's details, or Flower's last log line."""
    details = str(_run_row(link, run_id).get("status-details") or "").strip().splitlines()
    if details:
        return details[-1]
    return last_line(link.log_file) if link.log_file else "the run failed; see `flwr log`"


def stop_run(link: Link, run_id: str) -> None:
    """Stop a run, unless it has already ended. Raises :class:`LaunchError` if the SuperLink cannot be reached."""
    try:
        flwr(link, "stop", run_id, link.name)
    except LaunchError as error:
        if _IS_OVER not in str(error):
            raise
