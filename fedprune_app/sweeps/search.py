"""A search tries settings at random or by Optuna's Bayesian sampler, and keeps those that do best on validation data.

A search file is a matrix file with the entry ``search`` in place of ``systems`` and ``datasets``::

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
import math
import reprlib
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedprune_app.config import (
    Config,
    ConfigError,
    Scalar,
    check_effects,
    has_effect,
    paths_from_here,
    told_of,
)
from fedprune_app.errors import LaunchError
from fedprune_app.files import replace_file
from fedprune_app.preflight.given import Given, check_chosen
from fedprune_app.preflight.prepare import prepare
from fedprune_app.registry import SYSTEMS
from fedprune_app.results.reader import Run, load_run
from fedprune_app.results.recorder import holds_run

if TYPE_CHECKING:
    from optuna import Study

OBJECTIVES = {"accuracy_validation_mean": "maximize", "loss_mean": "minimize"}
"""What a search may go by, and where better is; no number of test data, which nothing may be decided by."""
_SAMPLERS = ("tpe", "random")
_ENTRIES = ("trials", "sampler", "objective", "space")
STUDY = "optuna.db"
BEST = "best.yaml"


@dataclass(frozen=True)
class Search:
    """A search draws ``trials`` settings from ``space``: for each key its choices, or its low and high end.

    ``where`` names the file in errors. ``name`` tells the searches of several systems apart; alone it is empty. ``own``
    has the settings of this system alone.
    """

    common: Mapping[str, Scalar]
    seeds: tuple[int, ...]
    num_clients: int | None
    trials: int
    sampler: str
    objective: str
    space: Mapping[str, Mapping[str, Any] | list[Scalar]]
    where: str = "matrix"
    name: str = ""
    own: frozenset[str] = frozenset()

    @property
    def table(self) -> str:
        """The file of all trials has this name."""
        return f"search-{self.name}.csv" if self.name else "search.csv"

    @property
    def best(self) -> str:
        """The run-config file of the best settings has this name."""
        return f"best-{self.name}.toml" if self.name else "best.toml"

    def folder(self, number: int, seed: int) -> str:
        """Return the name of the folder of a trial's run."""
        trial = f"trial{number + 1:03d}-seed{seed}"
        return f"{self.name}-{trial}" if self.name else trial

    def config(self, drawn: Mapping[str, Scalar], seed: int, place: Mapping[str, Scalar] | None = None) -> Config:
        """Return the settings of one run, checked."""
        return prepare(Given(paths_from_here({**self.common, **drawn, "seed": seed, **(place or {})}))).config

    def effective(self, drawn: Mapping[str, Scalar]) -> dict[str, Scalar]:
        """Return those of the settings of a trial, ``drawn`` ones included, that have an effect with the others."""
        config = self.config(drawn, self.seeds[0])
        return {key: value for key, value in {**self.common, **drawn}.items() if has_effect(key, config)}

    def identity(self, drawn: Mapping[str, Scalar]) -> str:
        """Return a text that two trials share which make the same run: they may differ in what has no effect."""
        return json.dumps(self.effective(drawn), sort_keys=True, default=str)

    @property
    def first(self) -> dict[str, Scalar]:
        """The first choice, or the low end, of each key."""
        return {key: _values(each)[0] for key, each in self.space.items()}

    def check(self) -> list[Config]:
        """Raise :class:`ConfigError` for settings that cannot be, in each range and for each choice.

        So are settings with which the objective is not measured, and what Optuna cannot draw from. Return the settings
        that were checked.
        """
        self.distributions(_optuna())
        checked = []
        first = self.first
        with told_of(self.where):
            check_chosen({**self.common, **first})
            for seed in self.seeds:
                self.config(first, seed)
            for key, each in self.space.items():
                for value in _values(each):
                    config = self.config({**first, key: value}, self.seeds[0])
                    self._check_measured(config)
                    checked.append(config)
            for key in self.space:  # which may have an effect with some choice of another key alone
                if not any(has_effect(key, each) for each in checked):
                    check_effects([key], checked[-1])
        return checked

    def _check_measured(self, config: Config) -> None:
        """Raise :class:`ConfigError` where no run with ``config`` measures the objective."""
        of_text = SYSTEMS[config.system].data == "text"
        if self.objective == "loss_mean":
            unmeasured = {
                ("dp.enabled", "false"): config.dp.enabled,
                ("fedspallm.merge", "mean"): of_text and config.fedspallm.merge == "hessians",
            }
        else:
            unmeasured = {
                ("system", "one that learns from images"): of_text,
                ("validation-fraction", "above 0"): not config.validation_fraction,
                ("dp.accuracies", "noised, open"): config.dp.enabled and config.dp.accuracies == "none",
            }
        for (key, allowed), is_so in unmeasured.items():
            if is_so:
                value = config.to_dict()[key]
                raise ConfigError(f"{key} is {value!r}, allowed with objective {self.objective!r}: {allowed}")

    def check_data(self, config: Config) -> None:
        """Raise :class:`ConfigError` where the search goes by validation data, and no client has any."""
        from fedprune_app.data.data_config import data_config
        from fedprune_app.data.splits import label_counts

        assert self.num_clients is not None
        if self.objective == "loss_mean":
            return
        counts = (label_counts(data_config(config), k, self.num_clients) for k in range(self.num_clients))
        if not any(sum(each["validation"]) for each in counts):
            value, why = config.validation_fraction, f"allowed with objective {self.objective!r} and these data"
            raise ConfigError(f"validation-fraction is {value!r}, {why}: enough for a validation image of some client")

    def distributions(self, optuna: Any) -> dict[str, Any]:
        """Return what Optuna draws each key from. Raises :class:`ConfigError` for a range that it does not take."""
        found = {}
        for key, each in self.space.items():
            try:
                found[key] = _distribution(optuna, each)
            except (ArithmeticError, TypeError, ValueError) as error:
                why = " ".join(str(error).split())
                allowed = f"what Optuna draws from ({why})"
                raise ConfigError(f"{self.where}: {key} in space is {_short(each)}, allowed: {allowed}") from None
        return found

    def folders(self, out: Path) -> list[Path]:
        """Return the folders of the trials' runs that are below ``out``."""
        return sorted(out.glob(f"{self.name}-trial*-seed*" if self.name else "trial*-seed*"))

    @property
    def asked(self) -> str:
        """What was asked, as text: a search that goes on asks the same."""
        return json.dumps(
            [dict(self.common), self.seeds, self.sampler, self.objective, dict(self.space)], sort_keys=True, default=str
        )


@dataclass(frozen=True)
class Searches:
    """A file asks for these searches, one for each of its systems."""

    each: tuple[Search, ...]
    num_clients: int | None

    def folders(self, out: Path) -> list[Path]:
        """Return the folders of all trials' runs that are below ``out``."""
        return [folder for search in self.each for folder in search.folders(out)]


def check_searches(several: Sequence[Search], overrides: Mapping[str, Scalar]) -> None:
    """Raise :class:`ConfigError` for settings that cannot be, and for one that has an effect in no search that has it.

    ``overrides`` are those that the command line gives for all of them. See :meth:`Search.check`.
    """
    checked = [(asked, asked.check()) for asked in several]
    for key in dict.fromkeys(key for asked in several for key in asked.common):
        having = [(asked, configs) for asked, configs in checked if key in asked.common]
        if not any(has_effect(key, config) for _, configs in having for config in configs):
            asked, configs = having[0]
            if key in overrides:
                check_effects([key], configs[0])
            with told_of(asked.where):
                check_effects([key], configs[0])


@dataclass(frozen=True)
class Entry:
    """An entry of ``systems`` beside a search has settings, and a ``space`` as it stands in the file, or None."""

    name: str
    settings: Mapping[str, Scalar]
    space: object


def searches_of(
    document: Mapping[str, Any], common: Mapping[str, Any], seeds: list[int], path: Path | str, entries: Sequence[Entry]
) -> Searches:
    """Return the searches that a matrix file describes: one for each entry of ``systems``, or one if there is none.

    Raises :class:`ConfigError` naming the file and the entry.
    """
    where = f"matrix {str(path)!r}"
    if "datasets" in document:
        raise ConfigError(f"{where} has datasets beside search, allowed: common, systems, seeds, clients and search")
    if entries and "system" in common:
        raise ConfigError(f"{where}: common sets 'system', allowed: in systems")
    if not entries and "system" not in common:
        raise ConfigError(f"{where}: common has no system, allowed with search: one system, or the entry systems")
    found = _search_of(document, common, seeds, where, needs_space=not entries)
    if not entries:
        return Searches((found,), found.num_clients)
    several = []
    for entry in entries:
        place = f"{where}: {entry.name!r} in systems"
        own = {} if entry.space is None else entry.space
        if not isinstance(own, dict):
            raise ConfigError(f"{place}: space is {_short(own)}, allowed: a range or choices for each key")
        _check_space(place, own, entry.settings, "the entry")
        space = {key: each for key, each in {**found.space, **own}.items() if key not in entry.settings}
        if not space:
            raise ConfigError(f"{place} has nothing to draw, allowed: a space in search or in the entry")
        settings = {key: value for key, value in {**common, **entry.settings}.items() if key not in space}
        own_keys = frozenset(entry.settings)
        several.append(replace(found, common=settings, space=space, name=entry.name, where=place, own=own_keys))
    if unused := [key for key in found.space if not any(key in search.space for search in several)]:
        raise ConfigError(f"{where}: {unused[0]} is in space and in each entry of systems, allowed: in one of them")
    return Searches(tuple(several), found.num_clients)


def _search_of(
    document: Mapping[str, Any], common: Mapping[str, Any], seeds: list[int], where: str, *, needs_space: bool
) -> Search:
    if "seed" in common:
        raise ConfigError(f"{where}: common sets 'seed', allowed: in seeds")
    found = document["search"]
    if not isinstance(found, dict):
        raise ConfigError(f"{where}: search is {_short(found)}, allowed: {', '.join(_ENTRIES)}")
    for key in found:
        if key not in _ENTRIES:
            raise ConfigError(f"{where}: search has unknown entry {_short(key)}, allowed: {', '.join(_ENTRIES)}")
    if needs_space and "space" not in found:
        raise ConfigError(f"{where}: search lacks the entry 'space', allowed: a range or choices for each key")
    trials, sampler = found.get("trials", 20), found.get("sampler", "tpe")
    objective, space = found.get("objective", "accuracy_validation_mean"), found.get("space", {})
    if type(trials) is not int or trials < 1:
        raise ConfigError(f"{where}: trials is {_short(trials)}, allowed: a whole number, at least 1")
    if sampler not in _SAMPLERS:
        raise ConfigError(f"{where}: sampler is {_short(sampler)}, allowed: {', '.join(_SAMPLERS)}")
    if not isinstance(objective, str) or objective not in OBJECTIVES:
        allowed = f"{', '.join(OBJECTIVES)}; nothing may be decided by test data"
        raise ConfigError(f"{where}: objective is {_short(objective)}, allowed: {allowed}")
    if not isinstance(space, dict) or ("space" in found and not space):
        raise ConfigError(f"{where}: space is {_short(space)}, allowed: a range or choices for each key")
    _check_space(where, space, common, "common")
    return Search(common, tuple(seeds), document.get("clients"), trials, sampler, objective, space, where)


_short = reprlib.repr  # a few lines of YAML aliases can stand for billions of entries


def _check_space(where: str, space: Mapping[Any, Any], settings: Mapping[str, Scalar], place: str) -> None:
    """Raise :class:`ConfigError` for what is no range, and for a key that ``settings``, those of a ``place``, fix."""
    for key, each in space.items():
        _check_range(where, key, each)
        if key in settings:
            raise ConfigError(f"{where}: {key} is in {place} and in space, allowed: in one of them")


def _check_range(where: str, key: object, each: Any) -> None:
    if not isinstance(key, str):
        raise ConfigError(f"{where}: space has the key {_short(key)}, allowed: names of settings")
    if key == "seed":
        raise ConfigError(f"{where}: space has the key 'seed', allowed: in seeds")
    if isinstance(each, list) and each and all(isinstance(value, bool | int | float | str) for value in each):
        if twice := [value for value, count in Counter(each).items() if count > 1]:
            raise ConfigError(f"{where}: {key} in space has the choice {_short(twice[0])} twice, allowed: once")
        return
    ends: list[Any] = [each.get("low"), each.get("high")] if isinstance(each, dict) else [None, None]
    low, high = ends
    is_range = all(map(_is_number, ends)) and low < high
    if not is_range or set(each) - {"low", "high", "log", "step"}:
        allowed = "a list of choices, or {low: ..., high: ...} with log: true or step: ..."
    elif type(each.get("log", False)) is not bool:
        allowed = "log: true or false"
    elif each.get("log") and low <= 0:
        allowed = "with log a low above 0"
    elif each.get("log") and "step" in each:
        allowed = "log or step, not both"
    elif "step" in each and not (_is_number(each["step"]) and 0 < each["step"] <= high - low):
        allowed = "a step above 0 that is not larger than the range"
    else:
        return
    raise ConfigError(f"{where}: {key} in space is {_short(each)}, allowed: {allowed}")


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _values(each: Mapping[str, Any] | list[Scalar]) -> list[Scalar]:
    """Return all choices, or the ends of a range and the value that is a step from the low one."""
    if isinstance(each, list):
        return each
    return [each["low"], each["high"], *([each["low"] + each["step"]] if "step" in each else [])]


def _is_whole(each: Mapping[str, Any]) -> bool:
    return all(type(each[end]) is int for end in ("low", "high", "step") if end in each)


@dataclass(frozen=True)
class Found:
    """A search has found the ``best`` settings with the ``value`` of their objective, and made these runs."""

    best: Mapping[str, Scalar]
    value: float
    runs: tuple[Run, ...]
    table: Path


def check_studies(several: Sequence[Search], out: Path) -> None:
    """Raise :class:`ConfigError` where ``out`` has trials of a search that is none of ``several``."""
    if not (out / STUDY).exists():
        return
    names = {_study_name(asked) for asked in several}
    with storage_in(out) as storage:
        studies = _optuna().get_all_study_summaries(storage)
    for study in studies:
        if study.n_trials and study.study_name not in names:
            said = f"--out {str(out)!r} has trials of another search, {study.study_name!r}"
            raise ConfigError(f"{said}, allowed: the systems that it has and more, or a new folder")


@contextmanager
def storage_in(out: Path) -> Iterator[Any]:
    """Give Optuna's storage in ``out``, and close its database when the block ends."""
    storage = _optuna().storages.RDBStorage(f"sqlite:///{out / STUDY}")
    try:
        yield storage
    finally:
        storage.remove_session()
        storage.engine.dispose()


def _study_name(asked: Search) -> str:
    return asked.name or "fedprune"


def study_of(asked: Search, out: Path, storage: Any) -> Study:
    """Return the search's study in the ``storage`` of ``out``, which may hold trials that were made before.

    Raises :class:`ConfigError` if ``out`` has another search.
    """
    optuna = _optuna()
    study: Study = optuna.create_study(
        storage=storage,
        study_name=_study_name(asked),
        direction=OBJECTIVES[asked.objective],
        load_if_exists=True,
    )
    before = study.user_attrs.get("asked")
    if study.trials and before != asked.asked:
        raise ConfigError(f"--out {str(out)!r} has a search with other settings, allowed: the same, or a new folder")
    began_with = study.user_attrs.get("clients")
    if study.trials and began_with != asked.num_clients:
        raise ConfigError(
            f"--clients is {asked.num_clients}, allowed when resuming the search in {str(out)!r}: {began_with}, as it "
            "began; or a new folder"
        )
    study.set_user_attr("asked", asked.asked)
    study.set_user_attr("clients", asked.num_clients)
    return study


def search(
    asked: Search,
    study: Study,
    out: Path,
    run: Callable[[Config, Path], object],
    say: Callable[[str, str], object],
) -> Found:
    """Make all trials of a search, each by ``run(config, folder)``, and return what was found.

    Trials that the ``study`` has from before count; their runs are in ``out``. A trial whose run fails counts for
    nothing, and one that draws the settings of an earlier trial takes its value without a run. Raises
    :class:`LaunchError` if no trial succeeded.
    """
    optuna = _optuna()
    prefix = f"{asked.name} " if asked.name else ""
    distributions = asked.distributions(optuna)
    while open_trial := _next_trial(optuna, study, asked, distributions):
        number, drawn = open_trial
        words = ", ".join(f"{key}={value}" for key, value in drawn.items())
        same = _different(optuna, study, asked).get(asked.identity(drawn))
        said = f": as trial {same.number + 1}, whose value counts" if same else ""
        say("", f"{prefix}({number + 1}/{asked.trials}) {words}{said}")
        try:
            value = same.value if same else _value_of(asked, number, drawn, out, run)
        except (LaunchError, ConfigError) as error:
            say("failed", f" {prefix}trial {number + 1}: {' '.join(str(error).split())}")
            study.tell(number, state=optuna.trial.TrialState.FAIL)
        else:
            study.tell(number, value)
        _write_table(out / asked.table, study, asked)
    done = _different(optuna, study, asked).values()
    if not done:
        raise LaunchError(f"none of {asked.trials} trials succeeded")
    # the process may have been killed before it wrote the last trial's row
    _write_table(out / asked.table, study, asked)
    runs = [load_run(out / asked.folder(trial.number, seed)) for trial in done for seed in asked.seeds]
    return Found(dict(study.best_params), float(study.best_value), tuple(runs), out / asked.table)


def _different(optuna: Any, study: Study, asked: Search) -> dict[str, Any]:
    """Return the trials that have a value by their identity, of those with the same settings the first.

    The same settings and seeds make the same run. A second one would cost its time, and count as another seed.
    """
    found: dict[str, Any] = {}
    for trial in study.trials:
        if trial.state == optuna.trial.TrialState.COMPLETE:
            found.setdefault(asked.identity(trial.params), trial)
    return found


def _next_trial(
    optuna: Any, study: Study, asked: Search, distributions: Mapping[str, Any]
) -> tuple[int, dict[str, Scalar]] | None:
    """Return number and settings of a trial that is not over: one that was interrupted, else a new one."""
    for trial in study.trials:
        if trial.state == optuna.trial.TrialState.RUNNING:
            return trial.number, dict(trial.params)
    number = len(study.trials)
    if number >= asked.trials:
        return None
    seed = 1000 * asked.seeds[0] + number
    samplers = optuna.samplers
    study.sampler = samplers.TPESampler(seed=seed) if asked.sampler == "tpe" else samplers.RandomSampler(seed=seed)
    asked_for = study.ask(dict(distributions))
    return asked_for.number, dict(asked_for.params)


def _value_of(
    asked: Search, number: int, drawn: Mapping[str, Scalar], out: Path, run: Callable[[Config, Path], object]
) -> float:
    values = []
    for seed in asked.seeds:
        folder = out / asked.folder(number, seed)
        place: dict[str, Scalar] = {"out-dir": str(folder)}
        if holds_run(folder):
            place["resume-from"] = str(folder)
        config = asked.config(drawn, seed, place)
        if not (holds_run(folder) and load_run(folder).status == "completed"):
            run(config, folder)
        series = load_run(folder).series(asked.objective)
        if not series:
            raise LaunchError(f"{folder.name} has no {asked.objective}: no round was evaluated on validation data")
        values.append(series[-1][1])
    return statistics.fmean(values)


def _distribution(optuna: Any, each: Mapping[str, Any] | list[Scalar]) -> Any:
    if isinstance(each, list):
        return optuna.distributions.CategoricalDistribution(each)
    kind = optuna.distributions.IntDistribution if _is_whole(each) else optuna.distributions.FloatDistribution
    return partial(kind, low=each["low"], high=each["high"], log=bool(each.get("log")))(
        **({"step": each["step"]} if "step" in each else {})
    )


def _write_table(path: Path, study: Study, asked: Search) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["trial", *asked.space, asked.objective, "state"])
    for trial in study.trials:
        drawn = [trial.params.get(key, "") for key in asked.space]
        writer.writerow(
            [trial.number + 1, *drawn, "" if trial.value is None else trial.value, trial.state.name.lower()]
        )
    replace_file(path, text.getvalue().encode())


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise ConfigError("a search needs the package optuna: install the extra fedprune[search]") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def with_overrides(asked: Search, overrides: Mapping[str, Scalar]) -> Search:
    """Return a search with more settings for all runs. Raises :class:`ConfigError` for one that the search draws."""
    for key in overrides:
        if key in asked.space or key == "seed":
            raise ConfigError(f"{key} is given on the command line, allowed: what the search does not draw")
        if key in asked.own:
            raise ConfigError(
                f"{key} is given on the command line, allowed: what the entry {asked.name!r} does not set"
            )
    return replace(asked, common={**asked.common, **overrides})


# --- what was best ------------------------------------------------------------------------------------------------


def best_settings(asked: Search, found: Found) -> dict[str, Scalar]:
    """Return the settings of a run with what a search found, but for the seed; paths are absolute.

    A setting that had an effect with other choices alone is left out.
    """
    settings: dict[str, Scalar] = paths_from_here(asked.effective(found.best))
    return settings


def best_matrix(several: Sequence[tuple[Search, Found]], num_clients: int) -> dict[str, Any]:
    """Return the document of a matrix that compares what searches found.

    It has as many seeds as the searches, and none of theirs: settings that were chosen with a seed are luckier there.
    What two searches of one system found alike is there once.
    """
    settings: list[dict[str, Scalar]] = []
    for asked, found in several:
        if (best := best_settings(asked, found)) not in settings:
            settings.append(best)
    first, _ = several[0]
    shared = {
        key: value
        for key, value in settings[0].items()
        if key in first.common and key != "system" and all(each.get(key) == value for each in settings)
    }
    systems = [
        {"system": each["system"], **{key: value for key, value in each.items() if key not in {"system", *shared}}}
        for each in settings
    ]
    datasets = {"datasets": [shared.pop("dataset")]} if "dataset" in shared else {}
    unused = max(first.seeds) + 1
    seeds = list(range(unused, unused + len(first.seeds)))
    return {"clients": num_clients, "common": shared, "systems": systems, **datasets, "seeds": seeds}
