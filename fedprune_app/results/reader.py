"""Run folders read back, with nothing taken on trust: sizes, types and a line cut short by a crash."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedprune_app.results.fields import CLIENT_FIELDS, HEADLINES, ROUND_FIELDS, STATUSES

Row = Mapping[str, Any]

MAX_JSON_BYTES = 64 << 20  # run.json: the class counts of 10,000 clients take about 10 MB
MAX_JSONL_BYTES = 1 << 30  # clients.jsonl: a million rows take about 300 MB
_INFO_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "system": ((str,), "text"),
    "config": ((dict,), "an object"),
    "seed": ((int,), "an integer"),
    "seconds": ((int, float), "a number"),
    "rounds_completed": ((int,), "an integer"),
    "status": ((str,), "text"),
    "headline": ((str, type(None)), "text or null"),
    "error": ((str, type(None)), "text or null"),
    "versions": ((dict, type(None)), "an object or null"),
    "model": ((dict, type(None)), "an object or null"),
}
_NUMERIC = {*ROUND_FIELDS, *CLIENT_FIELDS} - {"density_by_layer"}


@dataclass(frozen=True)
class Run:
    """One run folder: ``info`` is run.json, ``rounds`` and ``clients`` the rows of the two jsonl files."""

    folder: Path
    info: Mapping[str, Any]
    rounds: tuple[Row, ...]
    clients: tuple[Row, ...]

    @property
    def system(self) -> str:
        return str(self.info["system"])

    @property
    def status(self) -> str:
        return str(self.info["status"])

    @property
    def seed(self) -> int:
        return int(self.info["seed"])

    @property
    def config(self) -> Mapping[str, Any]:
        config: Mapping[str, Any] = self.info["config"]
        return config

    @property
    def headline(self) -> str:
        """Field of rounds.jsonl that is the system's main number."""
        return str(self.info.get("headline") or HEADLINES[0])

    def series(self, field: str) -> list[tuple[int, float]]:
        """(round, value) of every round in which ``field`` was measured."""
        return [(row["round"], row[field]) for row in self.rounds if row.get(field) is not None]

    def last(self, field: str) -> float | None:
        """Value of the last round in which ``field`` was measured, None if it never was."""
        series = self.series(field)
        return series[-1][1] if series else None

    def total(self, field: str) -> float | None:
        """Sum over all rounds; None unless every round measured it, since a partial sum would mislead."""
        values = [row.get(field) for row in self.rounds]
        known = [value for value in values if value is not None]
        return sum(known) if known and len(known) == len(values) else None


def load_run(folder: Path) -> Run:
    """The run recorded in ``folder``; a last jsonl line cut short by a crash is left out.

    Raises a one-line ``ValueError`` for a folder without run.json and for a file that is malformed, too large
    or has a field of the wrong type, naming the file (and line).
    """
    folder = Path(folder)
    info = read_info(folder)
    rounds = tuple(row for _, row in read_rows(folder / "rounds.jsonl"))
    return Run(folder, info, rounds, tuple(row for _, row in read_rows(folder / "clients.jsonl")))


def read_info(folder: Path) -> dict[str, Any]:
    """run.json of a run folder, with the types of the fields that others rely on checked."""
    path = folder / "run.json"
    if not path.is_file():
        raise ValueError(f"'{folder}' is not a run folder: it has no run.json")
    _check_size(path, MAX_JSON_BYTES)
    info = _parse(path.read_bytes(), str(path))
    for key, (kinds, allowed) in _INFO_TYPES.items():
        if type(info.get(key)) not in kinds:
            raise ValueError(f"{path}: '{key}' is {_short(info.get(key))}, allowed: {allowed}")
    for key, values in {"status": STATUSES, "headline": (*HEADLINES, None)}.items():
        if info.get(key) not in values:
            raise ValueError(f"{path}: '{key}' is {_short(info[key])}, allowed: {', '.join(map(str, values))}")
    partition = info.get("partition")
    for row in [] if partition is None else partition if isinstance(partition, list) else [partition]:
        _check_partition(row, path)
    return info


def read_rows(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """(line, row) for every complete line of a jsonl file; a file that is not there has none.

    A line counts once its newline is on disk: what follows the last newline was cut short and is skipped.
    """
    if not path.is_file():
        return
    _check_size(path, MAX_JSONL_BYTES)
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            where = f"{path} line {number}"
            row = _parse(line, where)
            _check_row(row, where)
            yield line, row


def _parse(text: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text, parse_constant=lambda _: None, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        reason = str(error) if isinstance(error, json.JSONDecodeError) else type(error).__name__
        raise ValueError(f"{where}: not valid JSON ({reason})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{where}: {_short(value)}, allowed: a JSON object")
    return value


def _finite(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None  # 1e999 is valid JSON


def _check_row(row: dict[str, Any], where: str) -> None:
    if type(row.get("round")) is not int:
        raise ValueError(f"{where}: 'round' is {_short(row.get('round'))}, allowed: an integer")
    layers = row.get("density_by_layer") or {}
    if not isinstance(layers, dict):
        raise ValueError(f"{where}: 'density_by_layer' is {_short(layers)}, allowed: an object of numbers")
    numbers = {key: value for key, value in row.items() if key in _NUMERIC} | layers
    for key, value in numbers.items():
        # Python reads integers of any length; beyond 1e300 they no longer become a float.
        is_number = type(value) in (int, float) and abs(value) < 1e300
        if not (value is None or is_number):
            raise ValueError(f"{where}: '{key}' is {_short(value)}, allowed: a number or null")


def _check_partition(row: object, path: Path) -> None:
    """One client of run.json's ``partition``: its number and, for each split, its examples per class."""
    if isinstance(row, dict) and _is_count(row.get("partition")):
        splits = [row.get(split) or [] for split in ("train", "validation", "test")]
        if all(isinstance(counts, list) and all(map(_is_count, counts)) for counts in splits):
            return
    allowed = "{partition, train, validation, test} with counts per class"
    raise ValueError(f"{path}: 'partition' has {_short(row)}, allowed: {allowed}")


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 53


def _check_size(path: Path, limit: int) -> None:
    size = path.stat().st_size
    if size > limit:
        raise ValueError(f"{path}: {size} bytes, allowed: at most {limit}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
