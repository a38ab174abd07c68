"""The runs of a matrix are made one after another, and tables compare them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from fedprune_app import demo, searching
from fedprune_app.config import ConfigError, Scalar
from fedprune_app.errors import LaunchError
from fedprune_app.experiment import Placement, Session
from fedprune_app.matrices import Matrix, is_complete
from fedprune_app.registry import unprotected
from fedprune_app.results.ownership import check_free, check_marked, clear_the_way, mark
from fedprune_app.results.reader import Run, load_run
from fedprune_app.results.tables import TABLES, write_tables
from fedprune_app.searching import STUDY, TABLE, Search, with_overrides
from fedprune_app.starting import check_clients, recorded_clients

Say = Callable[[str, str], object]
"""This is told what happens: a label, which may be empty, and a text."""


@dataclass(frozen=True)
class Swept:
    """A sweep has these finished runs in the order of the matrix, files of tables, and why runs failed, by name."""

    runs: tuple[Run, ...]
    tables: tuple[Path, ...]
    failed: Mapping[str, str] = field(default_factory=dict)

    def check(self, *, with_reasons: bool = False) -> None:
        """Raise :class:`LaunchError` if a run failed; ``with_reasons`` for those who have not been told yet."""
        if self.failed:
            count = len(self.runs) + len(self.failed)
            told = "; ".join(f"{name}: {reason}" for name, reason in self.failed.items())
            said = told if with_reasons else ", ".join(self.failed)
            raise LaunchError(f"{len(self.failed)} of {count} runs failed: {said}")


def num_clients_of(read: Matrix | Search, out: Path, asked: int | None, say: Say, *, resume: bool) -> int:
    """Return how many clients the runs of a sweep have.

    It is the number ``asked``; else, with ``resume``, the number that the runs in ``out`` began with; else that of the
    file, or 20.
    """
    if asked is not None:
        return asked
    known = recorded_clients(read.folders(out)) if resume else 0
    if known and read.num_clients not in (None, known):
        say("", f"{known} clients, as the runs in {str(out)!r} began; clients is {read.num_clients} in the matrix")
    return known or read.num_clients or 20


def _check_new(out: Path, resume: bool) -> None:
    if out.exists() and any(out.iterdir()) and not resume:
        raise ConfigError(f"--out {str(out)!r} is not empty, allowed: a new folder, or --resume")


def run_search(
    asked: Search,
    out: Path,
    overrides: Mapping[str, Scalar],
    placement: Placement,
    console: Console,
    say: Say,
    *,
    resume: bool = False,
    force: bool = False,
) -> Swept:
    """Make all trials of a search in folders below ``out``, and say what was best; tables are as for a matrix.

    The arguments and errors are those of :func:`run_matrix`. With ``resume`` trials that were made before count.
    """
    _check_new(out, resume)
    asked = replace(with_overrides(asked, overrides), num_clients=placement.num_clients)
    asked.check()
    for folder in asked.folders(out):
        check_clients(folder, placement.num_clients)
    if not force:
        check_marked(out, "sweep", (*TABLES, TABLE, STUDY))
    first = asked.config({key: _first(each) for key, each in asked.space.items()}, asked.seeds[0])
    with Session(placement, console) as session:
        session.check(first)
        if placement.shares_data:
            asked.check_data(first)
        demo.prepare_models([first], console)
        mark(out, "sweep")
        found = searching.search(asked, out, lambda config, folder: session.run(config, folder), say)
    words = ", ".join(f"{key}={value}" for key, value in found.best.items())
    say("", f"best: {words}  {asked.objective} {found.value:.4f}")
    return Swept(found.runs, (found.table, *write_tables(found.runs, out)))


def _first(each: Any) -> Scalar:
    first: Scalar = each[0] if isinstance(each, list) else each["low"]
    return first


def run_matrix(
    matrix: Matrix,
    out: Path,
    overrides: Mapping[str, Scalar],
    placement: Placement,
    console: Console,
    say: Say,
    *,
    resume: bool = False,
    force: bool = False,
) -> Swept:
    """Make all runs of a matrix in folders below ``out``, and write tables of them; a run that fails stops no other.

    With ``resume`` runs that have finished are kept. Raises :class:`ConfigError` before anything is written, also where
    a run began with another number of clients.
    """
    _check_new(out, resume)
    cells = matrix.cells(out, overrides, resume)
    if not force:
        check_marked(out, "sweep", TABLES)
        for cell in cells:
            if not cell.config.resume_from:
                check_free(out / cell.name)
    count = placement.num_clients
    left = [cell for cell in cells if not is_complete(out / cell.name, cell.config, count)]
    failed: dict[str, str] = {}
    with Session(placement, console) as session:
        for line in dict.fromkeys(unprotected(cell.config) for cell in left):
            if line:
                say("", f"note: {line}")
        for cell in left:
            with matrix.told_of(cell.name):
                session.check(cell.config)
        # minutes of training or a download, which a mistake should not wait for
        demo.prepare_models([cell.config for cell in left], console)
        mark(out, "sweep")
        for number, cell in enumerate(cells, start=1):
            folder = out / cell.name
            if is_complete(folder, cell.config, count):
                say("", f"({number}/{len(cells)}) {cell.name}: finished before")
                continue
            say("", f"({number}/{len(cells)}) {cell.name}")
            if force and not cell.config.resume_from:
                clear_the_way(folder)
            try:
                session.run(cell.config, folder, checked=True)
            except (LaunchError, ConfigError) as error:
                failed[cell.name] = " ".join(str(error).split())
                say("failed", f" {cell.name}: {failed[cell.name]}")
    done = [load_run(out / cell.name) for cell in cells if is_complete(out / cell.name, cell.config, count)]
    tables = write_tables(done, out) if done else []
    return Swept(tuple(done), tuple(tables), failed)
