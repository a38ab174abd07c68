"""The runs of a matrix are made one after another, and tables compare them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from fedprune_app.config import Config, ConfigError, Scalar, to_toml
from fedprune_app.engine.store import exclusive
from fedprune_app.errors import LaunchError
from fedprune_app.files import replace_file
from fedprune_app.preflight import language_models
from fedprune_app.preflight.given import Given
from fedprune_app.preflight.placement import Placement, recorded_clients
from fedprune_app.preflight.prepare import check_out, prepare
from fedprune_app.results.ownership import check_marked, mark
from fedprune_app.results.reader import Run, load_run
from fedprune_app.results.tables import TABLES, write_tables
from fedprune_app.running.session import Session
from fedprune_app.sweeps import search as searching
from fedprune_app.sweeps.matrix import Matrix, to_yaml
from fedprune_app.sweeps.search import (
    BEST,
    STUDY,
    Found,
    Search,
    Searches,
    best_matrix,
    best_settings,
    check_searches,
    check_studies,
    with_overrides,
)

Say = Callable[[str, str], object]
"""This is told what happens: a label, which may be empty, and a text."""


@dataclass(frozen=True)
class Swept:
    """A sweep has these finished runs in the order of the matrix, and files of tables.

    ``failed`` says by name why runs failed, or searches, of ``count`` together. ``best`` is the matrix of what searches
    found.
    """

    runs: tuple[Run, ...]
    tables: tuple[Path, ...]
    failed: Mapping[str, str] = field(default_factory=dict)
    count: int = 0
    of: str = "runs"
    best: Path | None = None

    def check(self, *, with_reasons: bool = False) -> None:
        """Raise :class:`LaunchError` if a run failed; ``with_reasons`` for those who have not been told yet."""
        if self.failed:
            told = "; ".join(f"{name}: {reason}" for name, reason in self.failed.items())
            said = told if with_reasons else ", ".join(self.failed)
            raise LaunchError(f"{len(self.failed)} of {self.count} {self.of} failed: {said}")


def _check_new(out: Path, resume: bool) -> None:
    check_out(out)
    if out.exists() and any(out.iterdir()) and not resume:
        raise ConfigError(f"--out {str(out)!r} is not empty, allowed: a new folder, or --resume")


def sweep(read: Matrix | Searches, given: Given, placement: Placement, console: Console) -> Swept:
    """Make the runs that a matrix file asks for in folders below ``given.out``, and write tables of them.

    What is given on the command line are settings of all runs. With ``resume`` runs that have finished are kept, and
    trials of a search that were made before count. Raises :class:`ConfigError` before anything is written, also where
    a run began with another number of clients.
    """

    def say(label: str, text: str) -> None:
        console.print(Text.assemble((label, "red"), text), soft_wrap=True)

    placement = replace(placement, num_clients=_num_clients(read, given, placement.num_clients, say))
    _check_new(given.folder, given.resume)
    if isinstance(read, Matrix):
        return _run_matrix(read, given, placement, console, say)
    return _run_searches(read, given, placement, console, say)


def _num_clients(read: Matrix | Searches, given: Given, asked: int | None, say: Say) -> int:
    """Return how many clients the runs of a sweep have.

    It is the number ``asked``; else, of a resumed sweep, the number that its runs began with; else that of the file, or
    20.
    """
    if asked is not None:
        return asked
    known = recorded_clients(read.folders(given.folder)) if given.resume else 0
    if known and read.num_clients not in (None, known):
        say(
            "",
            f"{known} clients, as the runs in {str(given.folder)!r} began; clients is {read.num_clients} in the matrix",
        )
    return known or read.num_clients or 20


def _run_searches(read: Searches, given: Given, placement: Placement, console: Console, say: Say) -> Swept:
    """Make all trials of all searches, and write what was best; tables are as for a matrix.

    A search in which no trial succeeds stops no other; alone it raises :class:`LaunchError`.
    """
    out, overrides, count = given.folder, given.chosen, placement.clients
    several = [replace(with_overrides(each, overrides), num_clients=count) for each in read.each]
    check_searches(several, overrides)
    check_studies(several, out)
    if not given.force:
        names = {name for asked in several for name in (asked.table, asked.best)}
        check_marked(out, "sweep", {*TABLES, STUDY, BEST, *names})
    found: list[tuple[Search, Found]] = []
    settled: dict[str, dict[str, Scalar]] = {}
    failed: dict[str, str] = {}
    with ExitStack() as stack:
        session = stack.enter_context(Session(console))
        language_models.prepare_models([_checked(asked, session, placement) for asked in several], console)
        mark(out, "sweep")
        stack.enter_context(exclusive(out, patience_seconds=1))  # two sweeps would make the same runs
        storage = stack.enter_context(searching.storage_in(out))
        studies = [searching.study_of(asked, out, storage) for asked in several]

        def run(config: Config, folder: Path) -> None:
            session.run(prepare(Given(config.to_dict()), placement), folder)

        for asked, study in zip(several, studies, strict=True):
            try:
                best = searching.search(asked, study, out, run, say)
            except LaunchError as error:
                if not asked.name:
                    raise
                failed[asked.name] = str(error)
                say("failed", f" {asked.name}: {error}")
                continue
            settings = best_settings(asked, best)
            same = [name for name, each in settled.items() if each == settings]
            settled[asked.name] = settings
            found.append((asked, best))
            words = ", ".join(f"{key}={value}" for key, value in best.best.items())
            say("", f"{asked.name and f'{asked.name} '}best: {words}  {asked.objective} {best.value:.4f}")
            if same:
                say("", f"{asked.name} has found the settings of {same[0]}, which {BEST} has once")
            if settings.get("dp.enabled"):
                say("", "note: the ε of the chosen run does not cover the other trials, which used the same data")
            replace_file(out / asked.best, to_toml(settings).encode())
        runs = tuple(run for _, each in found for run in each.runs)
        tables = (*(each.table for _, each in found), *(write_tables(runs, out) if runs else ()))
        return Swept(runs, tables, failed, len(several), "searches", _write_best(found, count, out))


def _checked(asked: Search, session: Session, placement: Placement) -> Config:
    """Return the settings of a first trial, with which the search can be made.

    Raises :class:`ConfigError` before anything is written.
    """
    first = asked.config(asked.first, asked.seeds[0])
    session.tell(prepare(Given(first.to_dict(), where=asked.where), placement).notes)
    if placement.shares_data:
        asked.check_data(first)
    return first


def _write_best(found: Sequence[tuple[Search, Found]], num_clients: int, out: Path) -> Path | None:
    """Write the matrix that compares what was found with seeds that no search used, and return its path."""
    if not found:
        return None
    said = "# The best settings of a search, and seeds that the search did not use: fedprune sweep best.yaml\n"
    replace_file(out / BEST, (said + to_yaml(best_matrix(found, num_clients))).encode())
    return out / BEST


def _run_matrix(matrix: Matrix, given: Given, placement: Placement, console: Console, say: Say) -> Swept:
    """Make all runs of a matrix; a run that fails stops no other."""
    out = given.folder
    if not given.force:
        check_marked(out, "sweep", TABLES)
    cells = matrix.cells(given, placement)
    left = [cell for cell in cells if not cell.is_complete]
    failed: dict[str, str] = {}
    with ExitStack() as stack:
        session = stack.enter_context(Session(console))
        for cell in left:
            session.tell(cell.notes)
        # minutes of training or a download, which a mistake should not wait for
        language_models.prepare_models([cell.config for cell in left], console)
        mark(out, "sweep")
        stack.enter_context(exclusive(out, patience_seconds=1))  # two sweeps would make the same runs
        for number, cell in enumerate(cells, start=1):
            name = cell.folder.name
            say("", f"({number}/{len(cells)}) {name}{': finished before' if cell.is_complete else ''}")
            if cell.is_complete:
                continue
            try:
                session.run(cell, cell.folder)
            except (LaunchError, ConfigError) as error:
                failed[name] = " ".join(str(error).split())
                say("failed", f" {name}: {failed[name]}")
        done = [load_run(cell.folder) for cell in cells if cell.folder.name not in failed]
        tables = write_tables(done, out) if done else []
        return Swept(tuple(done), tuple(tables), failed, len(cells))
