"""A search tries settings at random or by Optuna's Bayesian sampler, and keeps those that do best on validation data.

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

With ``systems`` beside ``search``, each of these is searched by itself, with as many trials. Its entry may have
settings and a ``space`` of its own, which win over ``common`` and the space of the search::

    systems:
      - fedavg
      - {system: dispfl, space: {density: [0.2, 0.5]}}

Each trial is a run for each seed, and counts with the mean of the objective in the last evaluated round. Optuna's study
is in ``optuna.db`` in the sweep's folder, so that a search that was stopped goes on. The draws of a trial derive from
its number and the first seed, whatever was interrupted before. What was best is written as a matrix, ``best.yaml``, and
as a run-config file for each system.
"""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedprune_app.config import ConfigError, Scalar, has_effect, paths_from_here
from fedprune_app.errors import LaunchError
from fedprune_app.files import replace_file
from fedprune_app.preflight.given import Given
from fedprune_app.preflight.prepare import prepare
from fedprune_app.results.reader import Run, load_run
from fedprune_app.sweeps.matrix import OBJECTIVES, Search, optuna

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial

STUDY = "optuna.db"
BEST = "best.yaml"


@dataclass(frozen=True)
class SearchResult:
    """A search has found that these settings have the best ``value`` of its objective, and made these runs."""

    settings: Mapping[str, Scalar]
    value: float
    runs: tuple[Run, ...]


@contextmanager
def storage_in(out: Path) -> Iterator[Any]:
    """Give Optuna's storage in ``out``, and close its database when the block ends."""
    storage = optuna().storages.RDBStorage(f"sqlite:///{out / STUDY}")
    try:
        yield storage
    finally:
        storage.remove_session()
        storage.engine.dispose()


def study_of(search: Search, num_clients: int, storage: Any) -> Study:
    """Return the search's study in ``storage``, which may hold trials that were made before.

    Raises :class:`ConfigError` if these were of another search.
    """
    study: Study = optuna().create_study(
        storage=storage,
        study_name=search.name or "fedprune",
        direction=OBJECTIVES[search.objective],
        load_if_exists=True,
    )
    identity = [search.settings, search.space, search.seeds, search.sampler, search.objective, num_clients]
    text = json.dumps(identity, sort_keys=True, default=str)
    if study.user_attrs.get("asked", text) != text:
        raise ConfigError(
            "--out",
            ...,
            f"{study.user_attrs['asked']}, or a new folder",
            which=f"has a search {study.study_name!r} that began with other settings or clients",
        )
    study.set_user_attr("asked", text)
    return study


def find(
    search: Search,
    study: Study,
    out: Path,
    make: Callable[[str, Mapping[str, Scalar]], Run],
    say: Callable[[str, str], object],
) -> SearchResult:
    """Make all trials of a search, the runs of each by ``make(name, settings)``, and return what was found.

    Trials that the ``study`` has from before count. A trial whose run fails counts for nothing, and one that draws the
    settings of an earlier trial takes its value without a run. Raises :class:`LaunchError` if no trial succeeded.
    """
    distributions = search.distributions()
    label = f"{search.name} ".lstrip()
    while trial := _next_trial(search, study, distributions):
        params = dict(trial.params)
        twin = _distinct_trials(search, study).get(_identity(search, params))
        remark = f": as trial {twin.number + 1}, whose value counts" if twin else ""
        words = ", ".join(f"{key}={value}" for key, value in params.items())
        say("", f"{label}({trial.number + 1}/{search.trials}) {words}{remark}")
        try:
            study.tell(trial.number, twin.value if twin else _value_of(search, trial.number, params, make))
        except (LaunchError, ConfigError) as error:
            say("failed", f" {label}trial {trial.number + 1}: {' '.join(str(error).split())}")
            study.tell(trial.number, state=optuna().trial.TrialState.FAIL)
        _write_table(out / search.file("search.csv"), study, search)
    _write_table(out / search.file("search.csv"), study, search)  # of a search that was killed before it did
    if not (trials := _distinct_trials(search, study)):
        raise LaunchError(f"none of {search.trials} trials succeeded")
    runs = [load_run(out / search.folder(trial.number, seed)) for trial in trials.values() for seed in search.seeds]
    return SearchResult(effective(search, study.best_params), float(study.best_value), tuple(runs))


def effective(search: Search, params: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Return those of the settings of a trial, but for the seed, that have an effect; paths are absolute."""
    settings = paths_from_here({**search.settings, **params})
    config = prepare(Given(settings)).config
    values = config.to_dict()
    return {key: values[key] for key in settings if has_effect(key, config)}


def _distinct_trials(search: Search, study: Study) -> dict[str, FrozenTrial]:
    """Return the trials that have a value, of those with the same settings the first.

    The same settings and seeds make the same run. A second one would cost its time, and count as another seed.
    """
    trials: dict[str, FrozenTrial] = {}
    for trial in study.trials:
        if trial.value is not None:
            trials.setdefault(_identity(search, trial.params), trial)
    return trials


def _identity(search: Search, params: Mapping[str, Scalar]) -> str:
    return json.dumps(effective(search, params), sort_keys=True)


def _next_trial(search: Search, study: Study, distributions: Mapping[str, Any]) -> FrozenTrial | None:
    """Return a trial that is not over: one that was interrupted, else a new one."""
    for trial in study.trials:
        if not trial.state.is_finished():
            return trial
    number = len(study.trials)
    if number >= search.trials:
        return None
    samplers, seed = optuna().samplers, 1000 * search.seeds[0] + number
    study.sampler = {"tpe": samplers.TPESampler, "random": samplers.RandomSampler}[search.sampler](seed=seed)
    study.ask(dict(distributions))
    return study.trials[number]


def _value_of(
    search: Search, number: int, params: Mapping[str, Scalar], make: Callable[[str, Mapping[str, Scalar]], Run]
) -> float:
    values = []
    for seed in search.seeds:
        name = search.folder(number, seed)
        value = make(name, {**search.settings, **params, "seed": seed}).last(search.objective)
        if value is None:
            raise LaunchError(f"{name} has no {search.objective}: no round was evaluated on validation data")
        values.append(value)
    return statistics.fmean(values)


def _write_table(path: Path, study: Study, search: Search) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["trial", *search.space, search.objective, "state"])
    for trial in study.trials:
        values = [trial.params.get(key, "") for key in search.space]  # None becomes an empty cell
        writer.writerow([trial.number + 1, *values, trial.value, trial.state.name.lower()])
    replace_file(path, text.getvalue().encode())


def best_matrix(best: Sequence[Mapping[str, Scalar]], seeds: Sequence[int], num_clients: int) -> dict[str, Any]:
    """Return the document of a matrix that compares the ``best`` settings of searches with these ``seeds``.

    It has as many seeds, and none of theirs: settings that were chosen with a seed are luckier there. What two searches
    of one system found alike is there once.
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
