"""Sweeps: the runs of a matrix, or of searches, one after another, and tables that compare them.

A search draws settings at random or by Optuna's Bayesian sampler, and keeps those that are best on validation data.

A search file is a matrix file with the entry ``search``::

    clients: 20
    common: {system: dispfl, num-server-rounds: 20}
    seeds: [0, 1]
    search:
      trials: 20
      sampler: tpe                        # or random
      objective: accuracy_validation_mean
      space:
        learning-rate: {low: 0.001, high: 0.3, log: true}
        local-epochs: {low: 1, high: 10}
        dispfl.topology: [ring, random]

With ``systems`` and ``search``, there is a search for each system, with as many trials. A system's entry may have
settings and a ``space`` of its own, which override ``common`` and the space of the search::

    systems:
      - fedavg
      - {system: dispfl, space: {density: [0.2, 0.5]}}

Each trial is a run for each seed; its value is the mean of the objective in the last evaluated round. Optuna's study is
in ``optuna.db`` in the sweep's folder, so that a search can be resumed. The draws of a trial derive from its number,
the first seed and the system's name, even after an interruption. The best settings are written as a matrix,
``best.yaml``, and as a run-config file for each system.
"""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from fedprune_app import plugins
from fedprune_app.config import Config, ConfigError, Scalar, Settings, has_effect, paths_from_here, to_toml
from fedprune_app.core.named import ValueDict, Values
from fedprune_app.core.rng import derive_seed
from fedprune_app.core.texts import one_line
from fedprune_app.engine.store import exclusive
from fedprune_app.errors import LaunchError
from fedprune_app.files import replace_file
from fedprune_app.preflight import can_start
from fedprune_app.preflight.inputs import Placement, RunInputs, recorded_clients
from fedprune_app.preflight.prepare import Prepared, check_out, prepare
from fedprune_app.registry import SYSTEMS
from fedprune_app.results.ownership import check_free, mark
from fedprune_app.results.reader import Run, load_run
from fedprune_app.results.recorder import holds_run
from fedprune_app.results.tables import write_tables
from fedprune_app.running import Session
from fedprune_app.sweeps.matrix import AFTER_LAST_PHASE, OBJECTIVES, Matrix, Search, optuna, to_yaml

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial


STUDY = "optuna.db"
BEST = "best.yaml"


@dataclass(frozen=True)
class SearchResult:
    """The best settings of a search, the ``value`` of its objective, and all its runs."""

    settings: Settings
    value: float
    runs: tuple[Run, ...]


@contextmanager
def storage_in(out: Path) -> Iterator[Any]:
    """Yield Optuna's storage in ``out``, and close its database when the block ends."""
    storage = optuna().storages.RDBStorage(f"sqlite:///{out / STUDY}")
    try:
        yield storage
    finally:
        storage.remove_session()
        storage.engine.dispose()


def study_of(search: Search, num_clients: int, storage: Any) -> Study:
    """Return the search's study in ``storage``, possibly with earlier trials.

    Raises :class:`ConfigError` if these are of another search.
    """
    study: Study = optuna().create_study(
        storage=storage,
        study_name=search.name or "fedprune",
        direction=OBJECTIVES[search.objective],
        load_if_exists=True,
    )
    code = plugins.described(search.settings).items()
    identity = [search.settings, search.space, search.seeds, search.sampler, search.objective, num_clients, *code]
    text = json.dumps(identity, sort_keys=True, default=str)
    if study.user_attrs.get("asked", text) != text:
        raise ConfigError(
            "--out",
            ...,
            f"{study.user_attrs['asked']}, or a new folder",
            which=f"has a search {study.study_name!r} that began with other settings, clients or plug-ins",
        )
    study.set_user_attr("asked", text)
    return study


def find(
    search: Search,
    study: Study,
    out: Path,
    make: Callable[[str, Settings], Run],
    say: Callable[[str, str], object],
) -> SearchResult:
    """Run all trials of a search, by ``make(name, settings)`` for each run, and return the result.

    Earlier trials of the ``study`` count. A trial whose run fails is left for a resumed search, and one with the
    settings of an earlier trial has its value without a run. Raises :class:`LaunchError` if no trial succeeded.
    """
    failed = set[int]()
    distributions = search.distributions()
    label = f"{search.name} ".lstrip()
    while trial := _next_trial(search, study, distributions, failed):
        params = dict(trial.params)
        twin = _distinct_trials(search, study).get(_identity(search, params))
        footnote = f": as trial {twin.number + 1}, whose value counts" if twin else ""
        words = ", ".join(f"{key}={value}" for key, value in params.items())
        say("", f"{label}({trial.number + 1}/{search.trials}) {words}{footnote}")
        try:
            study.tell(trial.number, twin.value if twin else _value_of(search, trial.number, params, make))
        except (LaunchError, ValueError) as error:
            say("failed", f" {label}trial {trial.number + 1}: {one_line(error)}")
            failed.add(trial.number)
        _write_table(out / search.file("search.csv"), study, search, failed)
    _write_table(out / search.file("search.csv"), study, search, failed)  # if a killed search did not write it
    if not (trials := _distinct_trials(search, study)):
        raise LaunchError(f"none of {search.trials} trials succeeded")
    runs = [load_run(out / search.folder(trial.number, seed)) for trial in trials.values() for seed in search.seeds]
    return SearchResult(effective(search, study.best_params), float(study.best_value), tuple(runs))


def effective(search: Search, params: Settings) -> dict[str, Scalar]:
    """Return the settings of a trial that have an effect, without the seed; paths are absolute."""
    settings = paths_from_here({**search.settings, **params})
    config = prepare(RunInputs(settings)).config
    values = config.to_dict()
    return {key: values[key] for key in settings if has_effect(key, config)}


def _distinct_trials(search: Search, study: Study) -> dict[str, FrozenTrial]:
    """Return the trials with a value; of equal settings only the first.

    Equal settings and seeds give the same run: a second one would cost time, and count as another seed.
    """
    trials: dict[str, FrozenTrial] = {}
    for trial in study.trials:
        if trial.value is not None:
            trials.setdefault(_identity(search, trial.params), trial)
    return trials


def _identity(search: Search, params: Settings) -> str:
    return json.dumps(effective(search, params), sort_keys=True)


def _next_trial(search: Search, study: Study, distributions: Values, failed: Collection[int]) -> FrozenTrial | None:
    """Return an interrupted trial or one that failed earlier, else a new one, or None if all are finished."""
    for trial in study.trials:
        if not trial.state.is_finished() and trial.number not in failed:
            return trial
    number = len(study.trials)
    if number >= search.trials:
        return None
    samplers = optuna().samplers
    seed = derive_seed(search.seeds[0], f"search {search.name}", round=number) % 2**32  # as numpy takes it
    study.sampler = {"tpe": samplers.TPESampler, "random": samplers.RandomSampler}[search.sampler](seed=seed)
    study.ask(dict(distributions))
    return study.trials[number]


def _value_of(search: Search, number: int, params: Settings, make: Callable[[str, Settings], Run]) -> float:
    values = []
    for seed in search.seeds:
        name = search.folder(number, seed)
        value = make(name, {**search.settings, **params, "seed": seed}).last(search.objective)
        if value is None:
            raise LaunchError(f"{name} has no {search.objective}: no round was evaluated on validation data")
        values.append(value)
    return statistics.fmean(values)


def _write_table(path: Path, study: Study, search: Search, failed: Collection[int]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["trial", *search.space, search.objective, "state"])
    for trial in study.trials:
        values = [trial.params.get(key, "") for key in search.space]  # None becomes an empty cell
        state = "fail" if trial.number in failed else trial.state.name.lower()
        writer.writerow([trial.number + 1, *values, trial.value, state])
    replace_file(path, text.getvalue().encode())


def best_matrix(best: Sequence[Settings], seeds: Sequence[int], num_clients: int) -> ValueDict:
    """Return the document of a matrix that compares the ``best`` settings of searches with these ``seeds``.

    It has as many other seeds, since chosen settings are favoured by the seeds of the search. Duplicate settings are
    listed once.
    """
    shared = {
        key: value
        for key, value in best[0].items()
        if key != "system" and all(settings.get(key) == value for settings in best)
    }
    systems = [{key: value for key, value in settings.items() if key not in shared} for settings in best]
    datasets = {"datasets": [shared.pop("dataset")]} if "dataset" in shared else {}
    unused = range(max(seeds) + 1, max(seeds) + 1 + len(seeds))
    distinct = [system for number, system in enumerate(systems) if system not in systems[:number]]
    return {"clients": num_clients, "common": shared, "systems": distinct, **datasets, "seeds": list(unused)}


Say = Callable[[str, str], object]  # prints progress: a label, which may be empty, and a text


# --- runs and searches ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SweepResult:
    """Finished runs of a sweep in the order of the matrix, and the files of tables.

    ``failed`` has by name the reasons of failed runs or searches, among ``count``. ``best`` is the matrix of the best
    settings.
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


def sweep(matrix: Matrix, inputs: RunInputs, placement: Placement, console: Console) -> SweepResult:
    """Run a matrix in folders below ``inputs.out``, and write tables of its runs.

    Settings of the command line apply to all runs. With ``resume`` finished runs are kept, and earlier trials of a
    search count. A failed run or search does not stop the others. Raises :class:`ConfigError` before anything is
    written, also if a run began with another number of clients.
    """

    def say(label: str, text: str) -> None:
        console.print(Text.assemble((label, "red"), text), soft_wrap=True)

    out = inputs.folder
    num_recorded = recorded_clients(sorted(out.glob("*/"))) if inputs.resume else 0
    num_clients = num_recorded or matrix.num_clients or 20
    if num_recorded and matrix.num_clients not in (None, num_recorded):
        say("note", f": the sweep goes on with {num_recorded} clients, as it began, and not with {matrix.num_clients}")
    placement = replace(placement, num_clients=num_clients if placement.num_clients is None else placement.num_clients)
    check_out(out)
    if out.exists() and any(out.iterdir()) and not inputs.resume:
        raise ConfigError("--out", out, "a new folder", which="is not empty", hint="resume goes on with it")
    searches = [replace(search, settings={**search.settings, **inputs.chosen}) for search in matrix.searches]
    check_free(out)
    runs = matrix.cells(inputs, None if searches else placement)
    if searches:
        probes = dict(zip((name for name, _ in matrix.settings), runs, strict=True))
        for search in searches:
            search.distributions()
            _check_objective(search, probes[search.name].config)
        firsts = [{**probes[search.name].config.to_dict(), "out-dir": ""} for search in searches]
        runs = [prepare(RunInputs(first, where=matrix.where), placement) for first in firsts]
    with Session(console) as session:
        # after all checks, since training or a download takes minutes
        can_start.prepare_models([run.config for run in runs if not run.is_complete], console)
        mark(out, "sweep")

        def make(run: Prepared) -> Run:
            if not run.is_complete:
                session.run(run, run.folder)
            made = load_run(run.folder)
            for line in plugins.changed_since(made.info):
                say("warning", f" {run.folder.name}: {line}")
            return made

        def trial(name: str, settings: Settings) -> Run:
            has_begun = holds_run(out / name)
            trial_settings = RunInputs(paths_from_here(settings), out=out / name, resume=has_begun, is_whole=True)
            return make(prepare(trial_settings, placement))

        with exclusive(out, patience_seconds=1):  # else two sweeps could make the same runs
            if searches:
                outcome = _run_searches(searches, out, placement.clients, trial, say)
            else:
                outcome = _run_matrix(runs, make, say)
    return replace(outcome, tables=(*outcome.tables, *(write_tables(outcome.runs, out) if outcome.runs else ())))


def _run_matrix(cells: Sequence[Prepared], make: Callable[[Prepared], Run], say: Say) -> SweepResult:
    runs, failed = [], {}
    for number, cell in enumerate(cells, start=1):
        name = cell.folder.name
        say("", f"({number}/{len(cells)}) {name}{': finished before' if cell.is_complete else ''}")
        try:
            runs.append(make(cell))
        except (LaunchError, ValueError) as error:  # also of damaged records
            failed[name] = one_line(error)
            say("failed", f" {name}: {failed[name]}")
    return SweepResult(tuple(runs), (), failed, len(cells))


def _run_searches(
    searches: Sequence[Search], out: Path, num_clients: int, trial: Callable[[str, Settings], Run], say: Say
) -> SweepResult:
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
    return SweepResult(runs, tables, failed, len(searches), "searches", out / BEST if results else None)


def _check_objective(search: Search, config: Config) -> None:
    """Raise :class:`ConfigError` if the runs of a search do not measure its objective."""
    has_validation = not SYSTEMS[config.system].reads_text and config.validation_fraction > 0
    if search.objective == AFTER_LAST_PHASE and not config.last_phase:
        raise ConfigError(
            "objective",
            search.objective,
            "'accuracy_validation_mean'",
            condition="with last-phase false",
            where=search.where,
        )
    if search.objective != "loss_mean" and not has_validation:
        raise ConfigError(
            "objective",
            search.objective,
            "'loss_mean'",
            condition=f"with system {config.system!r} and validation-fraction {config.validation_fraction:g}",
            where=search.where,
        )
