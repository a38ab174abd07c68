"""Reading of run folders: digests show damage, and a line cut short by a crash is left out.

run.json has a digest of itself. Its ``records`` have the number of rows, the bytes and the digest of each other file,
so a missing row is detected. Rows that a killed run wrote after its last run.json are left out. Content with a valid
digest is not checked further.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from fedprune_app.config import ConfigError
from fedprune_app.core import digests
from fedprune_app.core.named import ValueDict, Values
from fedprune_app.files import as_path, sha256_of
from fedprune_app.results import system_metrics
from fedprune_app.results.declarations import DECLARATIONS
from fedprune_app.results.metrics import FieldKind
from fedprune_app.results.system_metrics import SystemMetric

if TYPE_CHECKING:  # the command line imports this module
    import numpy as np
    from numpy.typing import NDArray

Row = Values
Matrix: TypeAlias = "NDArray[np.floating[Any]] | Sequence[Sequence[float]]"
# From whom each client receives, by client.
Links = Mapping[int, Sequence[int]]

MAX_MASKS = 1000  # clients: their distances take about 9 MB of masks.json
LOCK = ".lock"  # the file of a run folder that its process locks (engine.store.exclusive)


@dataclass(frozen=True, eq=False)
class Masks:
    """Distances between the clients' masks after ``round``.

    ``distance[i, j]`` is between ``clients[i]`` and ``clients[j]``: the share of coordinates in which the two masks
    differ, their Hamming distance in [0, 1]. ``distance`` (K, K) is symmetric, with a zero diagonal. ``links`` has, by
    client, the senders of that round in decentralised systems; else it is empty.
    """

    round: int
    clients: tuple[int, ...]
    distance: NDArray[np.float64]
    links: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, round: int, clients: Sequence[int], distance: Matrix, links: Links | None = None) -> Masks:
        """Return checked distances. Raises a one-line ``ValueError`` for an invalid matrix."""
        import numpy as np

        matrix = np.asarray(distance, dtype=np.float64)
        count = len(set(clients))
        is_square = 1 <= count <= MAX_MASKS and count == len(clients) and matrix.shape == (count, count)
        is_bounded = bool(((matrix >= 0) & (matrix <= 1)).all())  # also excludes NaN
        if not (is_square and is_bounded and np.allclose(matrix, matrix.T, rtol=0, atol=1e-6) and not np.trace(matrix)):
            allowed = f"numbers in [0, 1], symmetric with a zero diagonal, a row for each of 1 to {MAX_MASKS} clients"
            raise ValueError(f"'distance' has shape {matrix.shape} for {count} different clients, allowed: {allowed}")
        return cls(round, tuple(clients), matrix, {client: tuple(senders) for client, senders in (links or {}).items()})


@dataclass(frozen=True)
class Mark:
    """Identifies the valid part of a record: its first ``rows`` lines, of ``size`` bytes, and their SHA-256."""

    rows: int
    size: int
    sha256: str


@dataclass(frozen=True, eq=False, repr=False)
class Run:
    """The content of one run folder.

    ``info`` is run.json. ``rounds`` and ``clients`` are the rows of the two jsonl files. ``masks`` is masks.json, or
    None for a system that does not compare its clients' masks.
    """

    folder: Path
    info: Values
    rounds: tuple[Row, ...]
    clients: tuple[Row, ...]
    masks: Masks | None = None

    def __repr__(self) -> str:
        rounds = f"{len(self.rounds)} rounds" if len(self.rounds) != 1 else "1 round"
        return f"Run({str(self.folder)!r}: {self.system}, seed {self.seed}, {rounds}, {self.status})"

    @property
    def system(self) -> str:
        return str(self.info["system"])

    @property
    def status(self) -> str:
        return str(self.info["status"])

    @property
    def flaw(self) -> str:
        """Why the run is incomplete: its status, or lost states; else empty."""
        if self.status != "completed":
            return self.status
        return "states lost" if self.info.get("losses") else ""

    @property
    def seed(self) -> int:
        return int(self.info["seed"])

    @property
    def config(self) -> Values:
        config: Values = self.info["config"]
        return config

    def client_name(self, client: int) -> str:
        """Return whose data a client has, where the run knows that, and else its number."""
        return str(self.info.get("client_names", {}).get(str(client), client))

    @cached_property
    def system_metrics(self) -> tuple[SystemMetric, ...]:
        """The metrics that a plug-in's system declared."""
        return system_metrics.from_info(self.info, str(self.folder / "run.json"))

    def frame(self, which: str = "rounds") -> Any:
        """Return the rows of "rounds" or of "clients" as a pandas DataFrame, with NaN for numbers not measured.

        A run without rows has the columns that every run has. Raises ``ValueError`` for another name, and
        ``ImportError`` if pandas is not installed.
        """
        tables = {"rounds": self.rounds, "clients": self.clients}
        if not isinstance(which, str) or which not in tables:
            raise ValueError(f"frame is {which!r}, allowed: {', '.join(tables)}")
        import pandas

        empty = {"rounds": DECLARATIONS.round_fields, "clients": DECLARATIONS.client_fields}[which]
        rows = [dict(row) for row in tables[which]]
        frame = pandas.DataFrame.from_records(rows, columns=None if rows else list(empty))
        own_names = {name for metric in self.system_metrics for name in (metric.name, metric.column)}
        numbers = [
            name
            for name in frame
            if name in DECLARATIONS.kinds[FieldKind.NUMBER] | own_names and frame[name].dtype == object
        ]
        return frame.astype(dict.fromkeys(numbers, "float64"))  # else a column that no row has would be None

    @property
    def headline(self) -> str:
        """The field of rounds.jsonl by which the system is judged."""
        return str(self.info.get("headline") or DECLARATIONS.headlines[0])

    def series(self, field: str) -> list[tuple[int, float]]:
        """Return (round, value) of every round in which ``field`` was measured."""
        return [(row["round"], row[field]) for row in self.rounds if row.get(field) is not None]

    def last(self, field: str) -> float | None:
        """Return the last measured value of ``field``, or None if there is none."""
        series = self.series(field)
        return series[-1][1] if series else None

    def last_table(self, field: str) -> Values:
        """Return the last recorded object of ``field`` in rounds.jsonl, or an empty one."""
        return next((row[field] for row in reversed(self.rounds) if row.get(field)), {})

    def total(self, field: str) -> float | None:
        """Return the sum over all rounds, or None unless every round has the number: a partial sum would mislead.

        A run that continued after it lost records lacks the rows of some rounds.
        """
        values = [row.get(field) for row in self.rounds]
        if self.rounds and len(values) < self.rounds[-1]["round"]:
            return None
        numbers = [value for value in values if value is not None]
        return sum(numbers) if numbers and len(numbers) == len(values) else None

    def mean(self, field: str) -> float | None:
        """Return the mean over all rounds, or None unless every round has the number."""
        total = self.total(field)
        return None if total is None else total / len(self.rounds)


def load_run(folder: str | PathLike[str]) -> Run:
    """Read the run recorded in ``folder``; a last jsonl line that a crash cut short is left out.

    Raises a one-line ``ValueError`` for a folder without run.json, and for a malformed or changed file, which it names
    (with the line).
    """
    folder = as_path("folder", folder)
    info = read_info(folder)
    marks = marks_of(info.get("records"))
    if damages := check_records(folder, marks, whole=info["status"] == "completed"):
        raise ValueError(damages[0])
    rounds, clients = (tuple(read_rows(folder / name, marks.get(name))) for name in RECORDS)
    return Run(folder, info, rounds, clients, read_masks(folder, info))


def client_number(names: Mapping[str, str], client: str) -> int:
    """Return the number of the client of this name, or with this number; ``names`` are by number."""
    by_name = {name: number for number, name in names.items()}
    number = by_name.get(client, client)
    if not number.isdecimal():
        raise ConfigError("--client", client, ", ".join(by_name) or "a client's number")
    return int(number)


def last_of_clients(run: Run, field: str) -> list[Row]:
    """Return the clients' rows of the last round in which any of them measured ``field``."""
    rows = [row for row in run.clients if row.get(field) is not None]
    last_round = max((row["round"] for row in rows), default=0)
    return [row for row in rows if row["round"] == last_round]


RECORDS = ("rounds.jsonl", "clients.jsonl")


def marks_of(records: Values | None) -> dict[str, Mark]:
    """Return the mark of each record from run.json or a checkpoint; empty if it has none."""
    return {name: Mark(**records[name]) for name in RECORDS} if records else {}


def check_records(folder: Path, marks: Mapping[str, Mark], *, whole: bool = False) -> list[str]:
    """Return one line for each file whose marked part is damaged. With ``whole`` nothing may follow that part."""
    parts = {name: _part(folder / name, None if whole else mark) for name, mark in marks.items()}
    digests = {name: hashlib.sha256(part).hexdigest() for name, part in parts.items()}
    return [f"{folder / name} is damaged or cut" for name, mark in marks.items() if digests[name] != mark.sha256]


def check_models(folder: Path, info: Values) -> list[str]:
    """Return one line for each file below ``models`` that is missing or differs from its digest in run.json."""
    digests = {folder / "models" / name: digest for name, digest in info.get("model_files", {}).items()}
    is_whole = {path: path.is_file() and sha256_of(path) == digest for path, digest in digests.items()}
    return [f"{path} is missing or damaged" for path in digests if not is_whole[path]]


def read_info(folder: Path) -> ValueDict:
    """Read the run.json of a run folder.

    The status "running" becomes "interrupted" if no process holds the folder: the run's process was killed.
    """
    path = folder / "run.json"
    if not path.is_file():
        raise ValueError(f"'{folder}' is not a run folder: it has no run.json")
    info = _parse(path.read_bytes(), str(path))
    try:
        digests.check_json(info)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if info["status"] == "running" and not is_held(folder):
        info |= {"status": "interrupted", "error": info.get("error") or "its process ended without a word"}
    return info


def read_masks(folder: Path, info: Values | None = None) -> Masks | None:
    """Read and check the masks.json of a run folder; None if there is none.

    For a completed run, whose run.json is ``info``, the file must match its digest.
    """
    path = folder / "masks.json"
    digest = info["records"]["masks.json"] if info and info["status"] == "completed" and "records" in info else None
    if digest is not None and not (path.is_file() and sha256_of(path) == digest):
        raise ValueError(f"{path} is missing or damaged")
    if not path.is_file():
        return None
    masks = _parse(path.read_bytes(), str(path))
    try:
        links = {int(client): senders for client, senders in masks.get("links", {}).items()}
        return Masks.of(masks["round"], masks["partitions"], masks["distance"], links)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None


def read_rows(path: Path, mark: Mark | None = None) -> Iterator[ValueDict]:
    """Yield the rows of a jsonl file, or of its marked part; none for a missing file.

    Text after the last newline was cut short by a crash and is skipped. Raises ``ValueError`` that names the file and
    line of an invalid row.
    """
    for number, line in enumerate(_part(path, mark).split(b"\n")[:-1], start=1):
        yield _row(line, f"{path} line {number}")


def readable_lines(path: Path, last_round: int, mark: Mark | None = None) -> Iterator[bytes]:
    """Yield the readable lines of rounds up to ``last_round``, of the file or of its marked part."""
    for line in _part(path, mark).splitlines(keepends=True):
        with suppress(ValueError):
            if line.endswith(b"\n") and _row(line, str(path))["round"] <= last_round:
                yield line


def _part(path: Path, mark: Mark | None) -> bytes:
    """Return the content of a file, or its marked part; empty for a missing file."""
    content = path.read_bytes() if path.is_file() else b""
    return content[: mark.size] if mark else content


def _row(line: bytes, where: str) -> ValueDict:
    row = _parse(line, where)
    round = row.get("round")
    if type(round) is not int or not 0 <= round < 1 << 53:
        raise ValueError(f"{where}: 'round' is {round!r:.60}, allowed: an integer")
    for name in DECLARATIONS.kinds[FieldKind.NUMBER] & row.keys():
        if not isinstance(row[name], int | float | None):
            raise ValueError(f"{where}: {name!r} is {row[name]!r:.60}, allowed: a number")
    return row


def _parse(text: bytes, where: str) -> ValueDict:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{where}: {value!r:.60}, allowed: a JSON object")
    return value


def is_held(folder: Path) -> bool:
    """Return whether a process holds the folder's lock.

    Nothing is written, so a read-only folder will do. A copy of a folder is not held. On a file system without locks,
    or if the lock may not be opened, the run counts as held.
    """
    try:
        with (folder / LOCK).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # only for a moment, which `exclusive` waits out
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False
