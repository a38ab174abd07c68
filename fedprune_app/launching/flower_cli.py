"""Flower's command line, asked about one run on one SuperLink."""

import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fedprune_app.config import Scalar, to_toml
from fedprune_app.errors import LaunchError
from fedprune_app.launching import processes
from fedprune_app.launching.processes import RecordedEnd

_ANSWER_SECONDS = 120
_IS_OVER = "[code: 18]"  # of `flwr stop`
_STATUS_SECONDS = 0.5
_UNASKED_SECONDS = 30.0
_PATIENCE = 5  # so many questions in a row may stay unanswered


@dataclass(frozen=True)
class Link:
    """A link says how to reach a SuperLink: the name of its connection, and the environment to call ``flwr`` in."""

    name: str
    environment: Mapping[str, str]
    log_file: Path | None = None


def flwr(link: Link, *arguments: str) -> dict[str, object]:
    """Call the Flower command line and return its JSON answer.

    Raises :class:`LaunchError` with Flower's own words if the command fails.
    """
    command = [processes.tool("flwr"), *arguments, "--format", "json"]
    try:
        process = subprocess.run(
            command,
            env=processes.direct_on_loopback(link.environment),
            capture_output=True,
            text=True,
            timeout=_ANSWER_SECONDS,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C and the terminal's end are handled by this process alone
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


def submit(link: Link, app: Path, config: Mapping[str, Scalar]) -> str:
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

    To ask Flower costs a second of CPU. So Flower is asked when run.json says that the run is over, and else seldom.
    Flower waits for clients that never answer. So a run counts as over a few seconds after run.json says so, whatever
    Flower says.
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
    """Return one line on why a run failed that left no reason itself.

    The line is from Flower's details, or the last line of Flower's log.
    """
    details = str(_run_row(link, run_id).get("status-details") or "").strip().splitlines()
    if details:
        return details[-1]
    return processes.last_line(link.log_file) if link.log_file else "the run failed; see `flwr log`"


def stop_run(link: Link, run_id: str) -> None:
    """Stop a run, unless the run has ended by itself.

    Raises :class:`LaunchError` if the SuperLink cannot be told.
    """
    try:
        flwr(link, "stop", run_id, link.name)
    except LaunchError as error:
        if _IS_OVER not in str(error):
            raise
