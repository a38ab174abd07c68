"""The one way from what is given to a run: settings are parsed, and all is checked that can be before it starts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedprune_app import plugins
from fedprune_app.config import (
    Config,
    ConfigError,
    check_effects,
    check_resumable,
    has_effect,
    parse_config,
    told_of,
)
from fedprune_app.files import check_writable
from fedprune_app.preflight.combinations import check_names, check_system, unprotected
from fedprune_app.preflight.given import Given, check_chosen
from fedprune_app.preflight.placement import Placement
from fedprune_app.registry import SYSTEMS, System


@dataclass(frozen=True)
class Prepared:
    """A run is prepared when it may start, with these settings and at this place.

    ``notes`` say in what the run is less than it seems. ``clears_the_way`` says that what is in its way in its folder
    is removed, and ``is_complete`` that the folder holds the run with all of its rounds.
    """

    config: Config
    placement: Placement
    system: System
    notes: tuple[str, ...] = ()
    clears_the_way: bool = False
    is_complete: bool = False

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return Path(self.config.out_dir)


def prepare(
    given: Given, placement: Placement | None = None, *, allows: Callable[[plugins.Code], None] | None = None
) -> Prepared:
    """Return the run that is given, or raise :class:`ConfigError` where it could not start at ``placement``.

    Without a ``placement`` nothing is to start: the settings alone are checked, as in a process of the run itself.
    ``allows`` is asked before code of a plug-in is loaded, and raises what it does not allow.
    """
    return prepare_all([given], placement, allows=allows)[0]


def prepare_all(
    several: Sequence[Given],
    placement: Placement | None = None,
    *,
    allows: Callable[[plugins.Code], None] | None = None,
) -> list[Prepared]:
    """Return the runs that are given together: a setting needs to have an effect in one of the runs that have it."""
    recorded = [_recorded(given, placement) for given in several]
    configs = [_parsed(*each, placement, allows) for each in zip(several, recorded, strict=True)]
    idle = _idle(several, configs)
    runs = []
    for given, before, config in zip(several, recorded, configs, strict=True):
        with told_of(given.where):
            if before:
                check_resumable(before["config"], config)
            check_system(config)  # when all names are right, since this imports the systems
            place = (placement or Placement("inprocess")).resumed(before or {}).with_nodes_for(config)
        notes = tuple(_notes(given, config, idle))
        clears = given.force and not given.resume
        runs.append(Prepared(config, place, SYSTEMS[config.system], notes, clears, _is_complete(before or {}, config)))
    if placement is None:
        return runs
    return [run if run.is_complete else _startable(run, given) for run, given in zip(runs, several, strict=True)]


def _recorded(given: Given, placement: Placement | None) -> Mapping[str, Any] | None:
    """Return the run.json of the run that is to continue, or None for a new run.

    It is empty if run.json is on the server alone. Its ServerApp then compares the settings.
    """
    if given.accept_loss and not given.resume:
        raise ConfigError("--accept-loss is given, allowed: with --resume")
    if not given.resume:
        return None
    from fedprune_app.results.reader import read_info

    if (given.folder / "run.json").exists():
        return read_info(given.folder)
    if placement is not None and placement.superlink:
        return {}
    raise ConfigError(f"--out {str(given.folder)!r} holds no run to resume")


def _parsed(
    given: Given,
    before: Mapping[str, Any] | None,
    placement: Placement | None,
    allows: Callable[[plugins.Code], None] | None,
) -> Config:
    """Return the settings of a run, all of whose names are registered."""
    with told_of(given.where):
        if placement is not None and given.out is not None:
            _check_folder(given, placement)
        values = {**given.base, **given.chosen}
        if given.out is not None:
            values["out-dir"] = str(given.folder)
        if before is not None:
            if not given.is_whole:
                plugins.check_named(before.get("config", {}), given.chosen)
                values = {**before.get("config", {}), **values}
            values |= {"resume-from": str(given.folder)} | ({"accept-loss": True} if given.accept_loss else {})
        plugins.load(values, allows=allows)
        check_chosen(given.chosen)
        return check_names(parse_config(values))


def _check_folder(given: Given, placement: Placement) -> None:
    """Raise ``ValueError`` where a run may not write to its folder, as far as this machine can tell."""
    from fedprune_app.results.lock import is_held
    from fedprune_app.results.ownership import check_free, check_marked, in_the_way
    from fedprune_app.results.recorder import holds_run

    folder, named = given.folder, f"--out {str(given.out)!r}"
    if given.force and placement.superlink:
        raise ConfigError("--force is given, allowed with --superlink: nothing; the folder is on the server")
    if placement.deployment is not None and not given.force:
        check_marked(placement.deployment, "deployment")
    if given.resume:
        return
    if not placement.superlink:
        check_out(folder, named)
        if is_held(folder):
            raise ConfigError(f"{named} is in use by another process, allowed: a new folder")
        if not given.force:
            check_free(folder)
    if holds_run(folder) and not in_the_way(folder):
        raise ConfigError(f"{named} already holds a run, allowed: a new folder, or --resume")


def check_out(folder: Path, named: str) -> None:
    """Raise ``ValueError`` where ``folder`` is a file, or a folder in which this process may not write."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{named} is a file, allowed: a new folder")
    check_writable("--out", folder)


def _idle(several: Sequence[Given], configs: Sequence[Config]) -> set[str]:
    """Return the keys that have an effect in none of the runs to which they are given, but with their file alone.

    A file may be meant for another system than the command line asks for. Raises :class:`ConfigError` for a key without
    any effect.
    """
    idle = set()
    for key in dict.fromkeys(key for given in several for key in given.chosen):
        asked = [(given, config) for given, config in zip(several, configs, strict=True) if key in given.chosen]
        if any(has_effect(key, config) for _, config in asked):
            continue
        given, config = asked[0]
        if key in given.on_command_line:
            check_effects([key], config)
        with told_of(given.where):
            for file in given.files:
                if key in file:
                    plugins.load(file)
                    check_effects([key], parse_config(file))
        idle.add(key)
    return idle


def _is_complete(before: Mapping[str, Any], config: Config) -> bool:
    """Return whether a run ended well after all the rounds of ``config``; ``before`` is its run.json."""
    return before.get("status") == "completed" and int(before["rounds_completed"]) >= config.num_server_rounds


def _notes(given: Given, config: Config, idle: Collection[str]) -> Iterator[str]:
    """Yield in what a run is less than its system's name says, and which of the given settings change nothing."""
    if line := unprotected(config):
        yield line
    if keys := [key for key in given.chosen if key in idle]:
        yield f"without effect with system {config.system!r}: {', '.join(keys)}"
    for name in plugins.idle(given.chosen):
        yield f"plug-in {name!r} registers no name"


def _startable(run: Prepared, given: Given) -> Prepared:
    from fedprune_app.preflight.can_start import doubts

    with told_of(given.where):
        return replace(run, notes=(*run.notes, *doubts(run.config, run.placement)))
