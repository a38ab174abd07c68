"""Trackers that also receive a run's metrics: TensorBoard and MLflow.

They receive the settings once, the numbers of each row of rounds.jsonl, and the final ones. Tracking writes on the
server's machine, in the run folder unless the environment names another place. A tracker that fails during a run, or on
resuming, is no longer used, and the run continues. A new run whose tracker cannot be opened fails at once.
"""

import importlib.util
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote

from fedprune_app.core.named import ValueDict, Values

_AT_ONCE = 100  # parameters that MLflow accepts in one request


def check_tracker(kind: str) -> None:
    """Raise ``ValueError`` if the package of the tracker ``kind`` is missing; the package is not imported."""
    if importlib.util.find_spec(kind) is None:
        extra = "tracking" if kind == "tensorboard" else kind
        raise ValueError(f"tracking is {kind!r}, which needs the package {kind}: install the extra fedprune[{extra}]")


def scalars(row: Values, prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers of a row by name; those within a mapping as ``name/key``."""
    for key, value in row.items():
        if isinstance(value, Mapping):
            yield from scalars(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and key != "round":
            yield prefix + key, value


class TensorBoard:
    """Writes event files to ``folder/tensorboard``; a resumed run replaces those of lost rounds."""

    def __init__(self, folder: Path, info: Values) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._settings = _settings(info)
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=info["rounds_completed"] + 1)

    def log(self, numbers: Mapping[str, float], round: int) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, round)
        self._writer.flush()

    def close(self, status: str, numbers: Mapping[str, float]) -> None:
        if numbers:
            final = {f"final/{name}": value for name, value in numbers.items()}
            self._writer.add_hparams({**self._settings, "status": status}, final, run_name=".")
        self._writer.close()


@contextmanager
def _redacted_logs() -> Iterator[None]:
    """Remove user name, password and query of MLFLOW_TRACKING_URI from MLflow's errors, which quote it."""
    try:
        yield
    except Exception as error:
        place, text = os.environ.get("MLFLOW_TRACKING_URI", ""), str(error)
        users, queries = re.findall("//(.*)@", place), re.findall(r"\?(.*)", place)
        parts = [*users, *(name for user in users for name in user.split(":", 1)), *queries]
        parts += [place.partition("//")[2].rstrip("/")] if parts else []
        parts += [entry.partition("=")[2] for query in queries for entry in query.split("&")]
        for secret in sorted({form for part in parts for form in (part, unquote(part))}, key=len, reverse=True):
            text = text.replace(secret, "***") if secret else text
        raise RuntimeError(f"{type(error).__name__}: {text}") from None


class MLflow:
    """Logs to the store in MLFLOW_TRACKING_URI, or else to ``folder/mlflow/mlflow.db``."""

    @_redacted_logs()
    def __init__(self, folder: Path, info: Values) -> None:
        # else MLflow retries a server that does not respond for minutes
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        from mlflow import MlflowClient
        from mlflow.entities import Param

        place = os.environ.get("MLFLOW_TRACKING_URI")
        if not place:
            (folder / "mlflow").mkdir(exist_ok=True)
            place = f"sqlite:///{folder / 'mlflow' / 'mlflow.db'}"
        self._client = MlflowClient(tracking_uri=place)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "fedprune")
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else self._client.create_experiment(name)
        # the run's key finds the run again when fedprune resumes it
        key = str(info.get("run_key") or folder.name)
        settings = {name: str(value)[:6000] for name, value in _settings(info).items()}
        runs = self._client.search_runs([number], f"tags.`fedprune.run_key` = '{key}'", max_results=1)
        if runs:
            self._run = runs[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
            return
        tags = {"fedprune.run_key": key, "fedprune.folder": str(folder)}
        self._run = self._client.create_run(number, run_name=f"{info['system']} {folder.name}", tags=tags).info.run_id
        params = [Param(name, value) for name, value in settings.items()]
        for start in range(0, len(params), _AT_ONCE):
            self._client.log_batch(self._run, params=params[start : start + _AT_ONCE])

    @_redacted_logs()
    def log(self, numbers: Mapping[str, float], round: int) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = [Metric(name, value, now, round) for name, value in numbers.items()]
        for start in range(0, len(metrics), _AT_ONCE):
            self._client.log_batch(self._run, metrics=metrics[start : start + _AT_ONCE])

    @_redacted_logs()
    def close(self, status: str, numbers: Mapping[str, float]) -> None:
        ends = {"completed": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
        self._client.set_terminated(self._run, status=ends[status])


Tracker = TensorBoard | MLflow
# The class of each kind of tracker, called with a run folder and its run.json.
TRACKERS: Mapping[str, Callable[[Path, Values], Tracker]] = {"tensorboard": TensorBoard, "mlflow": MLflow}


def _settings(info: Values) -> ValueDict:
    return {key: value for key, value in info["config"].items() if value != ""}
