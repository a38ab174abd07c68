"""Checks and summaries of clients' metrics, and the recorder of a run folder.

The folder has run.json, rounds.jsonl, clients.jsonl and, for a system that compares its clients' masks, masks.json. It
stays readable if the process dies: run.json is replaced in one step, jsonl rows are on disk before the next round
begins, and :meth:`Recorder.resume` removes rows that a crash cut short. run.json has digests of itself and of the rows
so far.
"""

import hashlib
import importlib.metadata
import json
import logging
import math
import os
import platform
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Literal

from fedprune_app.core import digests
from fedprune_app.core.named import ValueDict, Values
from fedprune_app.core.texts import error_text
from fedprune_app.files import append_lines, replace_file, sha256_of
from fedprune_app.results.declarations import DECLARATIONS
from fedprune_app.results.metrics import ClientMetric, Declarations, FieldKind, Recorded, ReplyKind, Row, Take
from fedprune_app.results.ownership import check_free
from fedprune_app.results.reader import RECORDS, Links, Mark, Masks, Matrix, read_info, read_masks, readable_lines
from fedprune_app.results.statistics import noise_of_mean
from fedprune_app.results.tracking import TRACKERS, Tracker, check_tracker, scalars

# Accuracies by class are recorded for at most so many classes.
MOST_CLASSES = 1000


def number_in(name: str, fields: Row, *, about: str | None = None, most: float | None = None) -> float:
    """Return the metric ``name`` from the fields of a reply, checked by :meth:`ClientMetric.of`."""
    return DECLARATIONS.of_clients[name].of(fields, about=about, most=most)


def row_of(
    reply: ReplyKind,
    fields: Row,
    *,
    private: bool = False,
    layers: Iterable[str] = (),
    num_classes: int = 0,
    declared: Declarations | None = None,
) -> ValueDict:
    """Return the metrics of this kind of reply by name, each checked.

    A missing optional metric is None, and so is a withheld one in a ``private`` run. Metrics by layer are read for
    ``layers``, those by class for ``num_classes``. ``declared`` are all declarations, by default fedprune's own. Raises
    ``ValueError`` that names the first field that is missing or out of bounds.
    """
    names = {"layer": sorted(layers), "class": [str(number) for number in range(min(num_classes, MOST_CLASSES))]}
    return {
        metric.name: None if private and metric.withheld else metric.value_in(fields, reply, names, private)
        for metric in (declared or DECLARATIONS).in_reply(reply)
    }


def from_training(row: Row, trained: Row) -> ValueDict:
    """Return the metrics that an evaluation's ``row`` lacks, from the training of the round."""
    names = (name for name, metric in DECLARATIONS.of_clients.items() if _is_of_either(metric))
    return {name: trained.get(name) for name in names if row[name] is None}


def _is_of_either(metric: ClientMetric) -> bool:
    return {ReplyKind.TRAINING, ReplyKind.EVALUATION} <= metric.replies


def recorded_of_client(row: Row) -> ValueDict:
    """Return the fields of a row for clients.jsonl: no metrics of the round alone, and no missing objects."""
    left_out = {name for name, metric in DECLARATIONS.of_clients.items() if metric.recorded is Recorded.NEVER}
    objects = DECLARATIONS.kinds[FieldKind.BY_NAME]
    return {
        name: value for name, value in row.items() if name not in left_out and not (value is None and name in objects)
    }


def round_columns(
    rows: Iterable[Row], reply: ReplyKind, others: Sequence[Row] = (), declared: Declarations | None = None
) -> ValueDict:
    """Return the columns of a round, by name, from the clients' rows of one kind of reply.

    A client without a metric is left out of its columns. Metrics by layer or class become a column of numbers by name,
    in the order in which clients report the names. ``others`` are the training rows of clients that were not evaluated
    in the round: a metric that both replies may have is summarised over them, too. ``declared`` are all declarations,
    by default fedprune's own.
    """
    rows = list(rows)
    columns: ValueDict = {}
    for metric in (declared or DECLARATIONS).in_reply(reply):
        if metric.is_evaluated and not reply.is_evaluation:
            continue
        telling_rows = _rows_telling(metric, rows, others)
        values = [row[metric.name] for row in telling_rows]
        is_open = all(row.get("accuracy_noise") is None for row in telling_rows)
        for column in metric.columns:
            if column.take is not None and (is_open or not column.needs_open):
                columns[column.name] = _by_name(values, column.take) if metric.by else column.take(values)
    return columns | (_columns_of_fewer(rows, others) if reply is ReplyKind.EVALUATION else {})


def _rows_telling(metric: ClientMetric, rows: Sequence[Row], others: Sequence[Row]) -> list[Row]:
    candidates = (*rows, *others) if _is_of_either(metric) else rows
    return [row for row in candidates if row.get(metric.name) is not None]


def _columns_of_fewer(rows: Sequence[Row], others: Sequence[Row]) -> ValueDict:
    """Return two columns with an entry for each column of accuracies that some clients did not report.

    One has the number of clients that did, the other the noise in their mean, if they reported their noise. A client
    reports no accuracy if its privacy budget is spent, or if it has no test images.
    """
    clients: dict[str, float] = {}
    noises: dict[str, float | None] = {}
    for metric in (metric for metric in DECLARATIONS.in_reply(ReplyKind.EVALUATION) if metric.may_be_noised):
        telling_rows = _rows_telling(metric, rows, others)
        if len(telling_rows) not in (0, len(rows)):
            clients |= {column.name: len(telling_rows) for column in metric.columns if column.footnote}
            if deviations := [row["accuracy_noise"] for row in telling_rows if row.get("accuracy_noise") is not None]:
                noises |= {column.name: noise_of_mean(deviations) for column in metric.columns if column.is_noised_mean}
    columns = {"clients_by_column": clients, "noise_by_column": noises}
    return {name: entries for name, entries in columns.items() if entries}


def _by_name(rows: Iterable[Mapping[str, float]], take: Take) -> dict[str, float | None]:
    values: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            values.setdefault(name, []).append(value)
    return {name: take(numbers) for name, numbers in values.items()}


# --- the run folder ---------------------------------------------------------------------------------------------------


log = logging.getLogger("flwr.fedprune")
GIT_VARIABLE = "FEDPRUNE_GIT_HASH"
Status = Literal["completed", "failed", "interrupted"]


class _Tally:
    """Counts the rows and bytes of a record so far, and their digest, for its :class:`Mark`."""

    def __init__(self) -> None:
        self._total = hashlib.sha256()
        self._rows = self._size = 0

    def add(self, lines: bytes, rows: int) -> None:
        self._total.update(lines)
        self._rows, self._size = self._rows + rows, self._size + len(lines)

    @property
    def mark(self) -> Mark:
        return Mark(self._rows, self._size, self._total.hexdigest())


class Recorder:
    """Writes one run folder: :meth:`start` or :meth:`resume`, then rounds and clients, then :meth:`finish`.

    Between :meth:`reopen` and :meth:`resume` it writes nothing: a run that is not resumed in the end does not change.

    Accuracies and densities are shares in [0, 1], traffic is in bytes, times are in seconds. A declared field that a
    row lacks is written as null, an undeclared field is kept, and NaN and infinities become null.

    With ``tracking`` the numbers of each round also go to a tracker, see :mod:`fedprune_app.results.tracking`. Raises
    ``ValueError`` at once if the tracker's package is missing.
    """

    def __init__(self, folder: Path, *, tracking: str = "none") -> None:
        self.folder = Path(folder)
        self._masks_path = self.folder / "masks.json"
        self._tracking = tracking
        self._tracker: Tracker | None = None
        self._last: dict[str, float] = {}  # the numbers of the last round
        self._info: ValueDict = {}
        self._tallies = {name: _Tally() for name in RECORDS}
        self._masks_sha256: str | None = None
        self._writes = False  # False: changes stay in memory
        # a signal may close the run while another thread records; reentrant, since both may be the same thread
        self._writing = threading.RLock()
        self._seconds_before = 0.0  # spent by earlier processes of a resumed run
        self._started_at = 0.0
        if tracking != "none":
            check_tracker(tracking)

    def start(self, config: Values, seed: int, extra: Values | None = None) -> None:
        """Begin a new run; ``extra`` is added to run.json (``headline``, ``partition``, ``model``, ...).

        ``headline`` is the metric by which the system is judged. ``partition`` lists per client ``{partition, train,
        validation, test}`` with counts per class. ``model`` is ``{name, parameters, classes}``. Raises ``ValueError``
        if the folder already has a run, or files of others that a run would replace: nothing is ever overwritten.
        """
        check_free(self.folder)
        if holds_run(self.folder):
            raise ValueError(f"'{self.folder}' already holds a run, allowed: a new folder, or resuming it")
        info = {
            "status": "running",
            "system": config["system"],
            "config": dict(config),
            "versions": versions(),
            "seed": seed,
            "git_hash": git_hash(),
            "rounds_completed": 0,
            "final_sha256": None,
            "seconds": 0.0,
            "error": None,
            "headline": DECLARATIONS.headlines[0],
            "partition": None,
            "model": None,
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        self._begin({**info, **(extra or {})})  # first, to mark the folder as a run's
        for name in RECORDS:
            replace_file(self.folder / name, b"")
        self._masks_path.unlink(missing_ok=True)

    def reopen(self) -> None:
        """Read the run of this folder, and keep changes in memory until :meth:`resume`.

        Raises ``ValueError`` if the folder has no run.
        """
        self._info = read_info(self.folder)

    def resume(self, rounds_completed: int, marks: Mapping[str, Mark] | None = None) -> None:
        """Continue this folder's run after ``rounds_completed`` rounds; drop the rows of later rounds.

        ``marks``, by file, identify the part of each record that the run had written by then. Later rows are dropped,
        and so are unreadable rows. The data of :meth:`start` stay, with annotations since :meth:`reopen`. ``seconds``
        continues from the time so far, including lost rounds. Raises ``ValueError`` if the folder has no run.
        """
        if not self._info:
            self.reopen()
        info = self._info
        for name in RECORDS:
            self._tallies[name] = _Tally()
            lines = list(readable_lines(self.folder / name, rounds_completed, (marks or {}).get(name)))
            for line in lines:
                self._tallies[name].add(line, 1)
            replace_file(self.folder / name, b"".join(lines))
        self._drop_masks_after(rounds_completed)
        info |= {"status": "running", "error": None, "final_sha256": None, "rounds_completed": rounds_completed}
        info["resumed_after_rounds"] = [*info.get("resumed_after_rounds", []), rounds_completed]
        if new_versions := _changed_versions(info):
            since = {"round": rounds_completed, **new_versions}
            info["versions_since"] = [*info.get("versions_since", []), since]
            log.warning("the run goes on with %s", ", ".join(f"{name} {new}" for name, new in new_versions.items()))
        self._begin(info)

    def annotate(self, **extra: Any) -> None:
        """Add values that are known only after registration, such as ``partition`` and ``model``, to run.json."""
        self.info.update(_plain(extra))
        self._write_info()

    def note(self, lines: Iterable[str]) -> None:
        """Add new lines to run.json's ``notes``, and log them."""
        earlier_notes = self.info.get("notes", [])
        new_lines = [line for line in lines if line not in earlier_notes]
        for line in new_lines:
            log.warning("%s", line)
        if new_lines:
            self.annotate(notes=[*earlier_notes, *new_lines])

    @property
    def marks(self) -> dict[str, ValueDict]:
        return {name: vars(tally.mark) for name, tally in self._tallies.items()}

    @property
    def info(self) -> ValueDict:
        """The run.json of the open run. Raises ``ValueError`` if no run is open."""
        if not self._info:
            raise ValueError(f"run in '{self.folder}' is not open: call start, reopen or resume first")
        return self._info

    def round(self, row: Values) -> None:
        full_row = _complete(row, DECLARATIONS.round_fields)
        with self._writing:
            info = self.info
            self._append("rounds.jsonl", [full_row])
            info["rounds_completed"] = full_row["round"]
            self._write_info()
        self._last = dict(scalars(full_row))
        self._track(lambda tracker: tracker.log(self._last, full_row["round"]))

    def clients(self, rows: Iterable[Values]) -> None:
        fields = DECLARATIONS.client_fields
        full_rows = [_complete(recorded_of_client(row), fields) for row in rows]
        with self._writing:
            assert self.info  # raises unless the run is open
            self._append("clients.jsonl", full_rows)

    def masks(self, clients: Sequence[int], distance: Matrix, links: Links | None = None) -> None:
        """Record the distances between the clients' masks after the last recorded round; replace those of earlier ones.

        ``distance`` (K, K) has the Hamming distance in [0, 1] of each two of the K ``clients``, symmetric with a zero
        diagonal; six decimals are kept. ``links`` has, by client, its senders in decentralised systems. Raises
        ``ValueError`` for an invalid matrix.
        """
        masks = Masks.of(self.info["rounds_completed"], clients, distance, links)
        content = {"round": masks.round, "partitions": masks.clients, "distance": masks.distance.round(6)}
        if masks.links:
            content["links"] = {str(client): list(senders) for client, senders in masks.links.items()}
        data = json.dumps(_plain(content), allow_nan=False).encode()
        replace_file(self._masks_path, data)
        self._masks_sha256 = hashlib.sha256(data).hexdigest()
        self._write_info()

    def progress(self, done: int, total: int, text: str) -> None:
        self._tell({"done": done, "total": total, "text": text})

    def waiting(self, text: str) -> None:
        self._tell({"text": text})

    def done_waiting(self) -> None:
        (self.folder / "progress.json").unlink(missing_ok=True)

    def _tell(self, content: Values) -> None:
        with suppress(OSError):
            replace_file(self.folder / "progress.json", json.dumps(content).encode(), durable=False)

    def finish(self, status: Status, final_sha256: str | None = None, error: str | None = None) -> None:
        """Close the run; ``final_sha256`` is the digest of all final models in the order of the clients."""
        with self._writing:
            self.info.update(status=status, final_sha256=final_sha256, error=error)
            self._write_info()
            self.done_waiting()
            self._info, self._writes = {}, False
        self._track(lambda tracker: tracker.close(status, self._last))
        self._tracker = None

    @property
    def is_open(self) -> bool:
        return bool(self._info) and self._writes

    def _drop_masks_after(self, rounds_completed: int) -> None:
        try:
            masks = read_masks(self.folder)
            keep = masks is not None and masks.round <= rounds_completed
        except ValueError:  # masks can be made again, so a damaged file must not stop the run
            keep = False
        self._masks_sha256 = sha256_of(self._masks_path) if keep else None
        if not keep:
            self._masks_path.unlink(missing_ok=True)

    def _begin(self, info: ValueDict) -> None:
        self._info, self._writes = _plain(info), True
        self._seconds_before = float(info["seconds"])
        self._started_at = time.monotonic()
        self._write_info()
        if self._tracking == "none":
            return
        try:
            self._tracker = TRACKERS[self._tracking](self.folder, self._info)
        except Exception as error:  # an error of the library, of files or of a network
            if "resumed_after_rounds" not in self._info:
                raise
            self._stop_tracking(error)

    def _track(self, call: Callable[[Tracker], None]) -> None:
        """Call the tracker. After its first error it is not used again, and the run continues."""
        if self._tracker is None:
            return
        try:
            call(self._tracker)
        except Exception as error:  # an error of the library, of files or of a network
            self._tracker = None
            self._stop_tracking(error)

    def _stop_tracking(self, error: Exception) -> None:
        line = f"tracking stops: {error_text(error)}"
        if self.is_open:
            self.note([line])
        else:
            log.warning("%s", line)

    def _write_info(self) -> None:
        with self._writing:
            if not self._writes:
                return
            self._info["records"] = {**self.marks, "masks.json": self._masks_sha256}
            self._info["seconds"] = round(self._seconds_before + time.monotonic() - self._started_at, 3)
            write_info(self.folder, self._info)

    def _append(self, name: str, rows: Sequence[Values]) -> None:
        lines = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows).encode()
        append_lines(self.folder / name, lines)
        self._tallies[name].add(lines, len(rows))


def write_info(folder: Path, info: Values) -> None:
    replace_file(folder / "run.json", _info_text(digests.json_with_digest(info)).encode())


def holds_run(folder: Path) -> bool:
    """Return whether a folder has a run with results; one that ended before its first round has none.

    A run.json with the status "running" counts in the same way: the caller holds the folder's lock, so that no other
    process works on the run.
    """
    if not (folder / "run.json").exists():
        return False
    try:
        info = read_info(folder)
    except ValueError:
        return True
    return bool(info["rounds_completed"]) or info["status"] == "completed"


def _changed_versions(info: Values) -> dict[str, str | None]:
    earlier_versions = dict(info.get("versions", {}))
    for change in info.get("versions_since", []):
        earlier_versions |= change
    return {name: version for name, version in versions().items() if earlier_versions.get(name) != version}


def versions() -> dict[str, str | None]:
    """Return what results depend on: the processor, and the versions of packages, None for one not installed."""
    version_by_package: dict[str, str | None] = {"processor": processor(), "python": platform.python_version()}
    for package in (
        "fedprune",
        "flwr",
        "torch",
        "torchvision",
        "numpy",
        "ray",
        "opacus",
        "dp-accounting",
        "transformers",
    ):
        try:
            version_by_package[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            version_by_package[package] = None  # an app bundle is unpacked, not installed
    return version_by_package


def processor() -> str:
    """Return the processor's name and the instructions that PyTorch uses of it."""
    import torch  # late, for programs that only read records

    name = torch.cpu.get_capabilities().get("cpu_name", platform.machine())
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


@cache  # a sweep runs the code that it loaded, even after later commits
def git_hash() -> str | None:
    """Return the commit of the checkout that tracks this file, with ``-dirty`` if it has changes, or None without one.

    A bundle that Flower unpacked is in no checkout: its commit is in the environment.
    """
    if GIT_VARIABLE in os.environ:
        return os.environ[GIT_VARIABLE] or None
    path = Path(__file__)
    try:
        # An unpacked app or a site-packages folder may be inside another project's checkout.
        _git(path.parent, "ls-files", "--error-unmatch", path.name)
        dirty = "-dirty" if _git(path.parent, "status", "--porcelain", "--untracked-files=no") else ""
        return _git(path.parent, "rev-parse", "HEAD") + dirty
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    process = subprocess.run(command, check=True, capture_output=True, text=True, timeout=20)
    return process.stdout.strip()


def _complete(row: Values, fields: Iterable[str]) -> ValueDict:
    plain: ValueDict = _plain({**dict.fromkeys(fields), **row})
    return plain


def _plain(value: Any) -> Any:
    """Return ``value`` as JSON types: arrays, tensors and numpy scalars by ``tolist``, non-finite numbers as None."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _info_text(info: Values) -> str:
    """Return readable JSON: a line per key of each object, and long lists of counts on one line."""
    indents = {key: 2 if isinstance(value, dict) else None for key, value in info.items()}
    texts = {key: json.dumps(value, indent=indents[key], allow_nan=False) for key, value in info.items()}
    return "{\n" + ",\n".join(f"{json.dumps(key)}: {text}" for key, text in texts.items()) + "\n}\n"
