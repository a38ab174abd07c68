"""The one way from what is given to a run: settings are parsed, and all is checked that can be before it starts."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedprune_app import plugins
from fedprune_app.config import (
    DEFAULTS,
    OPTIONS,
    Config,
    ConfigError,
    Kind,
    check_effects,
    check_resumable,
    has_effect,
    parse_config,
    paths_from_here,
    told_of,
)
from fedprune_app.core.named import Values
from fedprune_app.files import may_write
from fedprune_app.preflight.combinations import check_system
from fedprune_app.preflight.given import Given, Placement, made_by
from fedprune_app.registry import SYSTEMS, System

_FEW_NODES = 10  # with fewer real nodes all take part in a round, unless fraction-train says otherwise


@dataclass(frozen=True)
class Prepared:
    """A run is prepared when it may start, with these settings and at this place.

    ``notes`` say in what the run is less than it seems. ``is_complete`` says that the folder holds the run with all of
    its rounds.
    """

    config: Config
    placement: Placement
    system: System
    notes: tuple[str, ...] = ()
    is_complete: bool = False

    @property
    def folder(self) -> Path:
        return Path(self.config.out_dir)


def prepare(given: Given, placement: Placement | None = None) -> Prepared:
    """Return the run that is given, or raise :class:`ConfigError` where it could not start at ``placement``.

    Without a ``placement`` nothing is to start: the settings alone are checked, as in a process of the run itself.
    """
    return prepare_all([given], placement)[0]


def prepare_all(givens: Sequence[Given], placement: Placement | None = None) -> list[Prepared]:
    """Return the runs that are given together: a setting needs to have an effect in one of the runs that have it."""
    runs = []
    for given in givens:
        with told_of(given.where):
            runs.append(_prepared_run(given, placement))
    idle_keys = _idle_keys(givens, [run.config for run in runs])
    prepared = []
    for given, run in zip(givens, runs, strict=True):
        notes = [*_notes(given, run.config, idle_keys)]
        if placement is not None and not run.is_complete:
            from fedprune_app.preflight.can_start import doubts  # the module imports torch

            with told_of(given.where):
                notes += doubts(run.config, run.placement)
        prepared.append(replace(run, notes=tuple(notes)))
    return prepared


def _prepared_run(given: Given, placement: Placement | None) -> Prepared:
    info = _recorded_info(given, placement) if given.resume else {}
    if placement is not None and given.out is not None:
        _check_folder(given, placement)
    values = {**given.base, **given.chosen}
    if given.out is not None:
        values["out-dir"] = str(given.folder)
    if given.resume:
        if not given.is_whole:
            plugins.check_named(info.get("config", {}), given.chosen)
            values = {**info.get("config", {}), **values}
        values["resume-from"] = str(given.folder)
    if given.accept_loss:
        values["accept-loss"] = True
    if placement and not (placement.is_simulation or given.resume):
        num_nodes = len(placement.nodes) or int(str(values.get("min-clients", 1)))
        values.setdefault("fraction-train", 1.0 if num_nodes < _FEW_NODES else DEFAULTS["fraction-train"])
    plugins.load(values)
    for key in set(info.get("config", {})) - set(OPTIONS):
        raise ConfigError("setting", key, which="is unknown", where=made_by(info))
    for key, value in given.chosen.items():
        if key in OPTIONS and OPTIONS[key].kind is Kind.RUN_FOLDER and value:
            raise ConfigError(key, value, which="the command decides", hint="out and resume say it")
    config = check_system(parse_config(values))
    if info:
        check_resumable(info["config"], config)
    is_complete = info.get("status") == "completed" and info["rounds_completed"] >= config.num_server_rounds
    place = (placement or Placement("inprocess")).resumed(info).with_nodes_for(config)
    return Prepared(config, place, SYSTEMS[config.system], (), is_complete)


def _recorded_info(given: Given, placement: Placement | None) -> Values:
    """Return the run.json of the run that is to continue.

    It is empty if run.json is on the server alone. Its ServerApp then compares the settings.
    """
    from fedprune_app.results.reader import read_info

    if (given.folder / "run.json").exists():
        return read_info(given.folder)
    if placement is not None and placement.superlink:
        return {}
    raise ConfigError("--out", given.folder, which="holds no run to resume")


def _check_folder(given: Given, placement: Placement) -> None:
    from fedprune_app.results.ownership import check_free
    from fedprune_app.results.recorder import holds_run

    if given.resume:
        return
    if not placement.superlink:
        check_out(given.folder)
        check_free(given.folder)
    if holds_run(given.folder):
        raise ConfigError("--out", given.out, "a new folder", which="already holds a run", hint="resume continues it")


def check_out(folder: Path) -> None:
    from fedprune_app.results.reader import is_held

    if not may_write(folder):
        raise ConfigError("--out", folder, "a folder in which you may write")
    if is_held(folder):
        raise ConfigError("--out", folder, "a new folder", which="is in use by another process")


def _idle_keys(givens: Sequence[Given], configs: Sequence[Config]) -> set[str]:
    """Return the keys that have an effect in none of the runs to which they are given, but with their file alone.

    A file may be meant for another system than the command line asks for. Raises :class:`ConfigError` for a key without
    any effect.
    """
    idle_keys = set()
    for key in dict.fromkeys(key for given in givens for key in given.chosen):
        pairs = [(given, config) for given, config in zip(givens, configs, strict=True) if key in given.chosen]
        if not any(has_effect(key, config) for _, config in pairs):
            idle_keys.add(key)
            given, config = pairs[0]
            if key in given.on_command_line:
                check_effects([key], config)
            for file in given.files:
                if key in file:
                    file_settings = paths_from_here(file)
                    plugins.load(file_settings)
                    with told_of(given.where):
                        check_effects([key], parse_config(file_settings))
    return idle_keys


def _notes(given: Given, config: Config, idle: Collection[str]) -> Iterator[str]:
    """Yield in what a run is less than its system's name says, and which of the given settings change nothing."""
    if SYSTEMS[config.system].is_private and not config.dp.enabled:
        yield f"dp.enabled is false, so this run of system {config.system!r} protects nobody"
    if keys := [key for key in given.chosen if key in idle]:
        yield f"without effect with system {config.system!r}: {', '.join(keys)}"
