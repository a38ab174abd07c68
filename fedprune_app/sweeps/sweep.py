"""The runs of a matrix, or of searches, are made one after another, and tables compare them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from fedprune_app.config import Config, ConfigError, Scalar, paths_from_here, to_toml
from fedprune_app.engine.store import exclusive
from fedprune_app.errors import LaunchError
from fedprune_app.files import replace_file
from fedprune_app.preflight import can_start
from fedprune_app.preflight.given import Given, Placement, recorded_clients
from fedprune_app.preflight.prepare import Prepared, check_out, prepare
from fedprune_app.registry import SYSTEMS
from fedprune_app.results.ownership import check_free, mark
from fedprune_app.results.reader import Run, load_run
from fedprune_app.results.recorder import holds_run
from fedprune_app.results.tables import write_tables
from fedprune_app.running import Session
from fedprune_app.sweeps.matrix import Matrix, Search, to_yaml
from fedprune_app.sweeps.search import BEST, SearchResult, best_matrix, find, storage_in, study_of

Say = Callable[[str, str], object]  # told what happens: a label, which may be empty, and a text


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

    def check(self) -> None:
        """Raise :class:`LaunchError` with all reasons if a run failed."""
        if self.failed:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self.failed.items())
            raise LaunchError(f"{len(self.failed)} of {self.count} {self.of} failed: {reasons}")


def sweep(matrix: Matrix, given: Given, placement: Placement, console: Console) -> Swept:
    """Make the runs that a matrix file asks for in folders below ``given.out``, and write tables of them.

    What is given on the command line are settings of all runs. With ``resume`` runs that have finished are kept, and
    trials of a search that were made before count. A run that fails stops no other, nor does a search in which no trial
    succeeds. Raises :class:`ConfigError` before anything is written, also where a run began with another number of
    clients.
    """

    def say(label: str, text: str) -> None:
        console.print(Text.assemble((label, "red"), text), soft_wrap=True)

    out = given.folder
    num_recorded = recorded_clients(sorted(out.glob("*/"))) if given.resume else 0
    num_clients = num_recorded or matrix.num_clients or 20
    placement = replace(placement, num_clients=num_clients if placement.num_clients is None else placement.num_clients)
    check_out(out)
    if out.exists() and any(out.iterdir()) and not given.resume:
        raise ConfigError("--out", out, "a new folder", which="is not empty", hint="resume goes on with it")
    searches = [replace(search, settings={**search.settings, **given.chosen}) for search in matrix.searches]
    check_free(out)
    runs = matrix.cells(given, None if searches else placement)
    if searches:
        probes = dict(zip((name for name, _ in matrix.settings), runs, strict=True))
        for search in searches:
            search.distributions()
            _check_objective(search, probes[search.name].config)
        firsts = [{**probes[search.name].config.to_dict(), "out-dir": ""} for search in searches]
        runs = [prepare(Given(first, where=matrix.where), placement) for first in firsts]
    with Session(console) as session:
        # minutes of training or a download, which a mistake should not wait for
        can_start.prepare_models([run.config for run in runs if not run.is_complete], console)
        mark(out, "sweep")

        def make(run: Prepared) -> Run:
            if not run.is_complete:
                session.run(run, run.folder)
            return load_run(run.folder)

        def trial(name: str, settings: Mapping[str, Scalar]) -> Run:
            has_begun = holds_run(out / name)
            trial_settings = Given(paths_from_here(settings), out=out / name, resume=has_begun, is_whole=True)
            return make(prepare(trial_settings, placement))

        with exclusive(out, patience_seconds=1):  # two sweeps would make the same runs
            if searches:
                outcome = _run_searches(searches, out, placement.clients, trial, say)
            else:
                outcome = _run_matrix(runs, make, say)
    return replace(outcome, tables=(*outcome.tables, *(write_tables(outcome.runs, out) if outcome.runs else ())))


def _run_matrix(cells: Sequence[Prepared], make: Callable[[Prepared], Run], say: Say) -> Swept:
    runs, failed = [], {}
    for number, cell in enumerate(cells, start=1):
        name = cell.folder.name
        say("", f"({number}/{len(cells)}) {name}{': finished before' if cell.is_complete else ''}")
        try:
            runs.append(make(cell))
        except (LaunchError, ConfigError) as error:
            failed[name] = " ".join(str(error).split())
            say("failed", f" {name}: {failed[name]}")
    return Swept(tuple(runs), (), failed, len(cells))


def _run_searches(
    searches: Sequence[Search], out: Path, num_clients: int, trial: Callable[[str, Mapping[str, Scalar]], Run], say: Say
) -> Swept:
    results: dict[str, SearchResult] = {}
    failed: dict[str, str] = {}
    with storage_in(out) as storage:
        studies = [study_of(search, num_clients, storage) for search in searches]
        for search, study in zip(searches, studies, strict=True):
            name = search.name or "search"
            try:
                best = results[name] = find(search, study, out, trial, say)
            except LaunchError as error:
                failed[name] = str(error)
                say("failed", f" {name}: {error}")
                continue
            words = ", ".join(f"{key}={value}" for key, value in study.best_params.items())
            say("", f"{name} best: {words}  {search.objective} {best.value:.4f}")
            if best.settings.get("dp.enabled"):
                say("", "note: the ε of the chosen run does not cover the other trials, which used the same data")
            replace_file(out / search.file("best.toml"), to_toml(best.settings).encode())
    if results:
        document = best_matrix([result.settings for result in results.values()], searches[0].seeds, num_clients)
        comment = "# The best settings of a search, and seeds that the search did not use: fedprune sweep best.yaml\n"
        replace_file(out / BEST, (comment + to_yaml(document)).encode())
    runs = tuple(run for result in results.values() for run in result.runs)
    tables = tuple(out / search.file("search.csv") for search in searches if (search.name or "search") in results)
    return Swept(runs, tables, failed, len(searches), "searches", out / BEST if results else None)


def _check_objective(search: Search, config: Config) -> None:
    """Raise :class:`ConfigError` where no run of a search measures what the search goes by."""
    has_validation = SYSTEMS[config.system].data == "images" and config.validation_fraction > 0
    if search.objective == "accuracy_validation_mean" and not has_validation:
        raise ConfigError(
            "objective",
            search.objective,
            "'loss_mean'",
            condition=f"with system {config.system!r} and validation-fraction {config.validation_fraction:g}",
            where=search.where,
        )
