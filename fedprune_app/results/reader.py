"""Run folders are read back as they were written: digests show damage, and a line cut short by a crash is left out.

run.json has a digest of its own. Its ``records`` say how many rows and bytes of each other file it vouches for, and
have their digest. So a row that is missing is noticed. Rows that a killed run wrote after its last run.json are left
out. What a digest vouches for is not checked a second time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedprune_app.core import seals
from fedprune_app.files import as_path, sha256_of
from fedprune_app.results import own_measures
from fedprune_app.results.declarations import MEASURES
from fedprune_app.results.lock import is_held
from fedprune_app.results.measures import Kind
from fedprune_app.results.own_measures import OwnMeasure

Row = Mapping[str, Any]
Matrix = NDArray[np.floating[Any]] | Sequence[Sequence[float]]
Links = Mapping[int, Sequence[int]]
"""From whom each client receives, by client."""

MAX_MASKS = 1000  # clients: their distances take about 9 MB of masks.json


@dataclass(frozen=True, eq=False)
class Masks:
    """The distances say how far the clients' masks are apart after ``round``.

    ``distance[i, j]`` is between ``clients[i]`` and ``clients[j]``: the share of coordinates in which the two masks
    differ, their Hamming distance in [0, 1]. ``distance`` (K, K) is symmetric, with a zero diagonal. ``links`` says
    from whom each client received in that round, where clients exchange models with neighbours; else it is empty.
    """

    round: int
    clients: tuple[int, ...]
    distance: NDArray[np.float64]
    links: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, round: int, clients: Sequence[int], distance: Matrix, links: Links | None = None) -> Masks:
        """Return checked distances.

        Raises a one-line ``ValueError`` that says why the numbers are no distances between these clients.
        """
        count = len(clients)
        if not 1 <= count <= MAX_MASKS:
            raise ValueError(f"masks of {count} clients, allowed: 1 to {MAX_MASKS}")
        if len(set(clients)) < count:
            raise ValueError(f"'partitions' is {_short(list(clients))}, allowed: each client once")
        matrix = np.asarray(distance, dtype=np.float64)
        if matrix.shape != (count, count):
            raise ValueError(f"'distance' has shape {matrix.shape}, allowed: {(count, count)}, a row per client")
        if outside := matrix[~((matrix >= 0) & (matrix <= 1))].tolist():  # NaN is outside too
            raise ValueError(f"'distance' has {outside[0]}, allowed: numbers in [0, 1]")
        if matrix.diagonal().any() or not np.allclose(matrix, matrix.T, rtol=0, atol=1e-6):
            raise ValueError("'distance' is not symmetric with a zero diagonal, as distances are")
        return cls(round, tuple(clients), matrix, {client: tuple(senders) for client, senders in (links or {}).items()})


@dataclass(frozen=True)
class Mark:
    """A mark vouches for a part of a record: its first ``rows`` lines, of ``size`` bytes, and their SHA-256."""

    rows: int
    size: int
    sha256: str

    @classmethod
    def of(cls, value: object, where: str) -> Mark:
        """Return a checked mark.

        Raises a one-line ``ValueError`` that names ``where`` a wrong value stands.
        """
        if isinstance(value, Mapping) and _is_count(value.get("rows")) and _is_count(value.get("size")):
            return cls(value["rows"], value["size"], str(value.get("sha256")))
        raise ValueError(f"{where}: {_short(value)}, allowed: rows, size and sha256 of a file")


@dataclass(frozen=True, eq=False, repr=False)
class Run:
    """A run is the content of one run folder.

    ``info`` is run.json. ``rounds`` and ``clients`` are the rows of the two jsonl files. ``masks`` is masks.json, or
    None for a system that does not compare its clients' masks.
    """

    folder: Path
    info: Mapping[str, Any]
    rounds: tuple[Row, ...]
    clients: tuple[Row, ...]
    masks: Masks | None = None

    def __repr__(self) -> str:
        rounds = f"{len(self.rounds)} rounds" if len(self.rounds) != 1 else "1 round"
        return f"Run({str(self.folder)!r}: {self.system}, seed {self.seed}, {rounds}, {self.status})"

    @property
    def system(self) -> str:
        """The system is the key of the system that ran."""
        return str(self.info["system"])

    @property
    def status(self) -> str:
        """The status is running, completed, failed or interrupted."""
        return str(self.info["status"])

    @property
    def flaw(self) -> str:
        """The flaw says why the run is not a whole one: its status, or that states were lost; else it is empty."""
        if self.status != "completed":
            return self.status
        return "states lost" if self.info.get("losses") else ""

    @property
    def seed(self) -> int:
        """The seed is the one that the run was started with."""
        return int(self.info["seed"])

    @property
    def config(self) -> Mapping[str, Any]:
        """The config has the resolved settings of the run by key."""
        config: Mapping[str, Any] = self.info["config"]
        return config

    @cached_property
    def own_measures(self) -> tuple[OwnMeasure, ...]:
        """The numbers of its own that the system declared, where the system is a plug-in's."""
        return own_measures.from_info(self.info, str(self.folder / "run.json"))

    def frame(self, which: str = "rounds") -> Any:
        """Return the rows of "rounds" or of "clients" as a pandas DataFrame, with NaN where a number does not apply.

        A run without rows has the columns that every run has. Raises ``ValueError`` for another name, and
        ``ImportError`` where pandas is not installed.
        """
        tables = {"rounds": self.rounds, "clients": self.clients}
        if not isinstance(which, str) or which not in tables:
            raise ValueError(f"frame is {which!r}, allowed: {', '.join(tables)}")
        import pandas

        measures = MEASURES
        empty = {"rounds": measures.round_fields, "clients": measures.client_fields}[which]
        rows = [dict(row) for row in tables[which]]
        frame = pandas.DataFrame.from_records(rows, columns=None if rows else list(empty))
        own_names = {name for measure in self.own_measures for name in (measure.name, measure.column)}
        numbers = [
            name for name in frame if name in measures.kinds[Kind.NUMBER] | own_names and frame[name].dtype == object
        ]
        return frame.astype(dict.fromkeys(numbers, "float64"))  # else what no row measured would be None

    @property
    def headline(self) -> str:
        """The headline is the field of rounds.jsonl that is the system's main number."""
        return str(self.info.get("headline") or MEASURES.headlines[0])

    def series(self, field: str) -> list[tuple[int, float]]:
        """Return (round, value) of every round in which ``field`` was measured."""
        return [(row["round"], row[field]) for row in self.rounds if row.get(field) is not None]

    def last(self, field: str) -> float | None:
        """Return the value of the last round in which ``field`` was measured, or None if it never was."""
        series = self.series(field)
        return series[-1][1] if series else None

    def last_table(self, field: str) -> Mapping[str, Any]:
        """Return the last object that rounds.jsonl has in ``field``, or an empty one if none was recorded."""
        return next((row[field] for row in reversed(self.rounds) if row.get(field)), {})

    def total(self, field: str) -> float | None:
        """Return the sum over all rounds, or None unless every round has the number: a partial sum would mislead.

        A run that went on without lost records has no rows of some rounds.
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

    Raises a one-line ``ValueError`` for a folder without run.json, and for a file that is malformed or not what was
    written. The error names the file (and line).
    """
    folder = as_path("folder", folder)
    info = read_info(folder)
    rounds, clients = (tuple(row for _, row in _recorded_rows(folder, name, info)) for name in RECORDS)
    return Run(folder, info, rounds, clients, read_masks(folder, info))


RECORDS = ("rounds.jsonl", "clients.jsonl")


def marks_of(records: object, where: str) -> dict[str, Mark]:
    """Return the mark of each record that vouches for it; nothing where there are no marks."""
    if records is None:
        return {}
    if not isinstance(records, Mapping):
        raise ValueError(f"{where}: 'records' is {_short(records)}, allowed: an object by file")
    return {name: Mark.of(records.get(name), f"{where}: 'records' of {name}") for name in RECORDS}


def _recorded_rows(folder: Path, name: str, info: Mapping[str, Any]) -> Iterator[tuple[bytes, dict[str, Any]]]:
    path, mark = folder / name, marks_of(info.get("records"), str(folder / "run.json")).get(name)
    yield from read_rows(path, mark)
    if mark is not None and info["status"] == "completed" and (surplus := path.stat().st_size - mark.size):
        raise ValueError(f"{path} is damaged: {surplus} bytes follow its last row")


def check_records(folder: Path, marks: Mapping[str, Mark]) -> list[str]:
    """Return one line for each file of which a part that its mark vouches for is damaged."""
    return [f"{folder / name} is damaged or cut" for name, mark in marks.items() if not _bears_out(folder / name, mark)]


def check_models(folder: Path, info: Mapping[str, Any]) -> list[str]:
    """Return one line for each file below ``models`` that is damaged or missing, as run.json tells their digests."""
    damaged = []
    for name, digest in info.get("model_files", {}).items():
        path = folder / "models" / name
        if not path.is_file():
            damaged.append(f"{path} is missing")
        elif sha256_of(path) != digest:
            damaged.append(f"{path} is damaged: its content is not what was written")
    return damaged


def _bears_out(path: Path, mark: Mark) -> bool:
    total, bytes_left = hashlib.sha256(), mark.size
    try:
        with path.open("rb") as file:
            while bytes_left and (piece := file.read(min(bytes_left, 1 << 20))):
                total.update(piece)
                bytes_left -= len(piece)
    except OSError:
        return False
    return not bytes_left and total.hexdigest() == mark.sha256


def read_info(folder: Path) -> dict[str, Any]:
    """Read the run.json of a run folder.

    A run that is recorded as running, and that no process works on any more, is "interrupted": its process was killed.
    """
    path = folder / "run.json"
    if not path.is_file():
        raise ValueError(f"'{folder}' is not a run folder: it has no run.json")
    info = _parse(path.read_bytes(), str(path))
    try:
        seals.check_json(info)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if info["status"] == "running" and not is_held(folder):
        info |= {"status": "interrupted", "error": info.get("error") or "its process ended without a word"}
    return info


def read_masks(folder: Path, info: Mapping[str, Any] | None = None) -> Masks | None:
    """Read and check the masks.json of a run folder; the result is None where there is none.

    For a completed run, whose run.json is ``info``, the file must be the one that the run wrote.
    """
    path = folder / "masks.json"
    records = (info or {}).get("records") or {}
    digest = records.get("masks.json") if info and info["status"] == "completed" else None
    if not path.is_file():
        if digest is not None:
            raise ValueError(f"{path} is missing")
        return None
    content = path.read_bytes()
    if digest is not None and hashlib.sha256(content).hexdigest() != digest:
        raise ValueError(f"{path} is damaged: its content is not what was written")
    masks = _parse(content, str(path))
    try:
        links = {int(client): senders for client, senders in masks.get("links", {}).items()}
        return Masks.of(masks["round"], masks["partitions"], masks["distance"], links)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None


def read_rows(path: Path, mark: Mark | None = None) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield every complete line of a jsonl file as (line, row); a file that is missing has none.

    A line counts once its newline is on disk: what follows the last newline was cut short and is skipped. With a
    ``mark``, the lines are those that it vouches for. Raises ``ValueError`` naming the file where these are not what
    was written, at the latest after the last of them.
    """
    if not path.is_file():
        if mark is not None and mark.rows:
            raise ValueError(f"{path} is missing: it had {mark.rows} rows")
        return
    total = hashlib.sha256()
    rows = size = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n") or (mark is not None and size >= mark.size):
                break
            row = _row(line, f"{path} line {number}")
            total.update(line)
            rows, size = number, size + len(line)
            yield line, row
    if mark is not None and rows < mark.rows:
        raise ValueError(f"{path} is damaged: it has {rows} of {mark.rows} rows")
    if mark is not None and (size, total.hexdigest()) != (mark.size, mark.sha256):
        raise ValueError(f"{path} is damaged: its content is not what was written")


def readable_lines(path: Path, last_round: int, mark: Mark | None = None) -> Iterator[bytes]:
    """Yield the readable lines of rounds up to ``last_round``; with a ``mark``, those of its part of the file."""
    content = path.read_bytes() if path.is_file() else b""
    for line in content[: mark.size if mark else None].splitlines(keepends=True):
        with suppress(ValueError):
            if line.endswith(b"\n") and _row(line, str(path))["round"] <= last_round:
                yield line


def _row(line: bytes, where: str) -> dict[str, Any]:
    row = _parse(line, where)
    if not _is_count(row.get("round")):
        raise ValueError(f"{where}: 'round' is {_short(row.get('round'))}, allowed: an integer")
    return row


def _parse(text: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = str(error) if isinstance(error, json.JSONDecodeError) else type(error).__name__
        raise ValueError(f"{where}: not valid JSON ({reason})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{where}: {_short(value)}, allowed: a JSON object")
    return value


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 53


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
