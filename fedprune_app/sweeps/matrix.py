"""Experiment matrices from a YAML file: combinations of systems, datasets and seeds, or a space to search."""

import hashlib
import itertools
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from fedprune_app.config import OPTIONS, ConfigError, Scalar, Settings, flatten, naming_source
from fedprune_app.config.options import Option
from fedprune_app.core.named import ValueDict, Values
from fedprune_app.core.texts import one_line
from fedprune_app.preflight.inputs import Placement, RunInputs
from fedprune_app.preflight.prepare import Prepared, prepare_all
from fedprune_app.results.recorder import holds_run

Range = list[Scalar] | Values  # choices, or a table with low and high, and with log or step


@dataclass(frozen=True)
class Search:
    """Draws ``trials`` settings from ``space``, which override ``settings``; each trial is a run for each seed.

    ``name`` distinguishes the searches of several systems; it is empty for a single one. ``where`` names the file in
    errors.
    """

    name: str
    settings: Settings
    space: Mapping[str, Range]
    seeds: tuple[int, ...]
    where: str
    trials: int
    sampler: str
    objective: str

    def file(self, name: str) -> str:
        """Return the name of this search's own file: ``name``, such as ``search.csv``, for a single search."""
        stem, _, ending = name.partition(".")
        return f"{stem}-{self.name}.{ending}" if self.name else name

    def folder(self, number: int, seed: int) -> str:
        return f"{self.name and f'{self.name}-'}trial{number + 1:03d}-seed{seed}"

    def probes(self) -> Iterator[tuple[str, dict[str, Scalar]]]:
        """Yield names and settings that cover each seed, each choice and each end of a range once."""
        values = {
            key: spec if isinstance(spec, list) else [spec["low"], spec["high"]] for key, spec in self.space.items()
        }
        first = {**self.settings, **{key: choices[0] for key, choices in values.items()}, "seed": self.seeds[0]}
        yield self.name, first
        for key, choices in {"seed": list(self.seeds), **values}.items():
            for value in choices[1:]:
                yield f"{self.name} {key}={value}".strip(), {**first, key: value}

    def distributions(self) -> ValueDict:
        """Return Optuna's distribution of each key. Raises :class:`ConfigError` for an unsupported range."""
        with naming_source(self.where):
            return {key: _distribution(key, spec) for key, spec in self.space.items()}


def check_range(where: str, key: object, spec: Any) -> None:
    """Raise :class:`ConfigError` unless ``spec`` is a list of choices or a table with two ends."""
    if not isinstance(key, str) or key == "seed":
        raise ConfigError("space", key, "names of settings, and seed in seeds", where=where)
    are_choices = isinstance(spec, list) and spec and all(isinstance(each, bool | int | float | str) for each in spec)
    is_range = isinstance(spec, dict) and {"low", "high"} <= spec.keys() <= {"low", "high", "log", "step"}
    if not are_choices and not is_range:
        raise ConfigError(
            f"{key} in space",
            spec,
            "a list of choices, or {low: ..., high: ...} with log: true or step: ...",
            where=where,
        )


def optuna() -> Any:
    """Return the library Optuna. Raises :class:`ConfigError` if it is not installed."""
    try:
        import optuna
    except ImportError:
        raise ConfigError("a search needs the package optuna: install the extra fedprune[search]") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _distribution(key: str, spec: Range) -> Any:
    kinds = optuna().distributions
    option = OPTIONS[key]
    if isinstance(spec, list):
        return kinds.CategoricalDistribution([option.parse(key, option.from_here(value)) for value in spec])
    kind = {int: kinds.IntDistribution, float: kinds.FloatDistribution}.get(type(option.default))
    if kind is None:
        raise ConfigError(f"{key} in space", spec, "a list of choices")
    low, high = (option.parse(key, spec[end]) for end in ("low", "high"))
    arguments = {name: value for name, value in spec.items() if name in ("log", "step")}
    try:
        return kind(low, high, **arguments)
    except (ArithmeticError, TypeError, ValueError) as error:
        raise ConfigError(f"{key} in space", spec, "what Optuna draws from", hint=str(error)) from None


# --- the matrix -------------------------------------------------------------------------------------------------------


_SECTIONS = ("clients", "common", "systems", "datasets", "seeds", "search")
# the objectives of a search, and their directions; no metric of test data, which must not decide anything
AFTER_LAST_PHASE = "accuracy_last_phase_validation_mean"
OBJECTIVES = {"accuracy_validation_mean": "maximize", AFTER_LAST_PHASE: "maximize", "loss_mean": "minimize"}
_OF_SEARCH = {
    "trials": Option(20, "how many settings are drawn", bounds=(("at least", 1, operator.ge),)),
    "sampler": Option("tpe", "how settings are drawn", {"tpe": "by what was good before", "random": "at random"}),
    "objective": Option("accuracy_validation_mean", "what is best", OBJECTIVES),
}


@dataclass(frozen=True)
class Matrix:
    """Named settings of runs, and the number of clients, from a matrix file.

    ``num_clients`` is None if the command line decides. ``where`` names the file in errors. With ``searches`` the
    settings are not run, but checked: they cover each choice and each end of a range.
    """

    settings: tuple[tuple[str, Settings], ...]
    num_clients: int | None
    common: frozenset[str] = frozenset()  # keys that are the same in all cells
    where: str = "matrix"
    searches: tuple[Search, ...] = ()

    def cells(self, inputs: RunInputs, placement: Placement | None = None) -> list[Prepared]:
        """Return the runs of the matrix, prepared for ``placement``.

        Their folders are below ``inputs.out``. Settings of the command line apply to all runs. In a resumed sweep, runs
        that have begun continue.
        """
        varied = {key for _, values in self.settings for key in values} - self.common
        for key in inputs.on_command_line:
            if key in varied:
                raise ConfigError(key, inputs.on_command_line[key], which="the matrix varies")
        all_inputs = []
        for name, settings in self.settings:
            folder, where = inputs.folder / name, f"{self.where}, run {name!r}" if name else self.where
            goes_on = inputs.resume and holds_run(folder)
            all_inputs.append(replace(inputs, files=[settings], out=folder, resume=goes_on, is_whole=True, where=where))
        return prepare_all(all_inputs, placement)


class _Loader(yaml.SafeLoader):
    """Safe YAML loader that rejects duplicate keys, of which PyYAML would use the last one."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        names = [(key.tag, key.value) for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for name in names:
            if names.count(name) > 1:
                line = node.start_mark.line + 1
                raise yaml.YAMLError(f"it has the key {name[1]!r} twice, in the table that begins in line {line}")
        return node


def to_yaml(document: Values) -> str:
    text: str = yaml.safe_dump(dict(document), sort_keys=False, allow_unicode=True)
    return text


def read_matrix(path: Path) -> Matrix:
    """Read a matrix file, see :func:`matrix_of`. Raises :class:`ConfigError` that names the file and the entry."""
    try:
        document = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError("matrix", path, which="cannot be read", hint=one_line(error)) from None
    return matrix_of(document, path)


def matrix_of(document: object, path: Path | str) -> Matrix:
    """Return the matrix, or the searches, in a document; ``path`` names it in errors.

    The document's entries are:

    * ``common``: settings of every run.
    * ``systems`` and ``datasets``: lists of settings. Each entry has at least the key ``system`` or ``dataset``.
    * ``seeds``: a list of whole numbers.
    * ``clients``: a number.
    * ``search``: settings to draw from, see :mod:`fedprune_app.sweeps.sweep`.

    Raises :class:`ConfigError` that names the entry.
    """
    where, sections = f"matrix {str(path)!r}", ", ".join(_SECTIONS)
    if not isinstance(document, dict):
        raise ConfigError("matrix", path, f"a table with {sections}", which="holds no table")
    for key in document:
        if key not in _SECTIONS or (key == "datasets" and "search" in document):
            raise ConfigError("entry", key, sections, where=where)
    common = _settings(where, "common", document.get("common", {}))
    for key in ("system", "dataset"):
        if key in common and (f"{key}s" in document or "search" not in document):
            raise ConfigError(f"{key} in common", common[key], f"in {key}s", where=where)
    seeds = document.get("seeds", [0])
    are_numbers = isinstance(seeds, list) and seeds and all(type(seed) is int for seed in seeds)
    if not are_numbers or len(set(seeds)) != len(seeds):
        raise ConfigError("seeds", seeds, "a list of whole numbers, each once", where=where)
    num_clients = document.get("clients")
    if "clients" in document and (type(num_clients) is not int or num_clients < 1):
        raise ConfigError("clients", num_clients, "a whole number, at least 1", where=where)
    searches: tuple[Search, ...] = ()
    if "search" in document:
        searches = tuple(_searches(where, document, common, tuple(seeds)))
        settings = [probe for search in searches for probe in search.probes()]
    else:
        settings = _cells(where, document, common, seeds)
    fixed = frozenset(key for key in common if all(values[key] == common[key] for _, values in settings))
    return Matrix(tuple(settings), num_clients, fixed, where, searches)


def _cells(where: str, document: Values, common: Values, seeds: Sequence[int]) -> list[tuple[str, ValueDict]]:
    systems = _variants(where, "systems", "system", document.get("systems"))
    datasets = _variants(where, "datasets", "dataset", document.get("datasets", ["digits"]))
    settings = []
    for system, dataset, seed in itertools.product(systems, datasets, seeds):
        values = {**common, **dataset, **system, "seed": seed}
        name = _cut(f"{_name(system, 'system')}-{_name(dataset, 'dataset')}")
        settings.append((f"{name}-seed{seed}", values))
    _check_distinct(where, "runs", [name for name, _ in settings])
    return settings


def _searches(where: str, document: Values, common: Values, seeds: tuple[int, ...]) -> Iterator[Search]:
    table = document["search"]
    keys = (*_OF_SEARCH, "space")
    if not isinstance(table, dict) or not table.keys() <= {*keys}:
        raise ConfigError("search", table, f"a table with {', '.join(keys)}", where=where)
    with naming_source(where):
        options: ValueDict = {
            key: option.parse(key, table.get(key, option.default)) for key, option in _OF_SEARCH.items()
        }
    shared = _space(where, table.get("space", {}))
    if "systems" in document:
        entries = document["systems"]
        bare = [_without_space(entry) for entry in entries] if isinstance(entries, list) else entries
        variants = _variants(where, "systems", "system", bare)
        names = [_cut(_name(variant, "system")) for variant in variants]
        _check_distinct(where, "systems", names)
        spaces = [entry.get("space", {}) if isinstance(entry, dict) else {} for entry in entries]
    elif "system" in common:
        names, variants, spaces = [""], [{}], [{}]
    else:
        raise ConfigError(
            "system", ..., "in common, or the entry systems", condition="with search", which="is not given", where=where
        )
    for name, variant, own_space in zip(names, variants, spaces, strict=True):
        place = f"{where}: {name!r} in systems" if name else where
        space = {key: spec for key, spec in shared.items() if key not in variant} | _space(place, own_space)
        if not space:
            raise ConfigError("space", space, "settings to draw, in search or in the entry", where=place)
        yield Search(name, {**common, **variant}, space, seeds, where, **options)


def _without_space(entry: Any) -> Any:
    return {key: value for key, value in entry.items() if key != "space"} if isinstance(entry, dict) else entry


def _space(where: str, space: Any) -> ValueDict:
    if not isinstance(space, dict):
        raise ConfigError("space", space, "a range or choices for each key", where=where)
    for key, spec in space.items():
        check_range(where, key, spec)
    return space


_LONGEST = 200  # characters of a name; a folder's may have 255, and a digest, trial and seed may follow


def _settings(where: str, section: str, table: Any) -> ValueDict:
    if not isinstance(table, dict) or not all(isinstance(key, str) for key in table):
        raise ConfigError(f"an entry of {section}", table, "key: value pairs", where=where)
    with naming_source(f"{where}: an entry of {section}"):
        settings = flatten(table)
    if "seed" in settings:
        raise ConfigError(f"seed in {section}", settings["seed"], "in seeds", where=where)
    return settings


def _variants(where: str, section: str, key: str, entries: Any) -> Sequence[ValueDict]:
    if not (isinstance(entries, list) and entries):
        raise ConfigError(section, entries, "a list of settings", where=where)
    variants = [{key: e} if isinstance(e, str) else _settings(where, section, e) for e in entries]
    for variant in variants:
        if key not in variant:
            raise ConfigError(f"an entry of {section}", variant, f"one with the key {key!r}", where=where)
    return variants


def _check_distinct(where: str, kind: str, names: Sequence[str]) -> None:
    if len(set(names)) != len(names):
        duplicate = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"name of {kind}", duplicate, "distinct settings", which="is there twice", where=where)


def _name(variant: Values, key: str) -> str:
    """Return a folder name with the settings that distinguish a variant, such as ``subfedavg-target-rate50``."""
    unnamed = {key, "plugins", *(k for k, option in OPTIONS.items() if option.kind.is_folder)}
    settings = {k: v for k, v in variant.items() if k not in unnamed}
    parts = [str(variant[key]), *(f"{k.rpartition('.')[2]}{v}" for k, v in settings.items())]
    return re.sub(r"[^A-Za-z0-9._-]+", "_", "-".join(parts))


def _cut(name: str) -> str:
    """Return a name for a file or folder; one too long for a file system is cut and ends with its digest."""
    digest = hashlib.sha256(name.encode()).hexdigest()[:16]
    return name if len(name) <= _LONGEST else f"{name[:_LONGEST]}-{digest}"
