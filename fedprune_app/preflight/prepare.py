"""Preparation of a run: its inputs are parsed, and all that can be checked before its start is checked."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedprune_app import plugins
from fedprune_app.config import (
    DEFAULTS,
    OPTIONS,
    Config,
    ConfigError,
    PathKind,
    check_effects,
    check_resumable,
    has_effect,
    is_whole,
    naming_source,
    parse_config,
    paths_from_here,
)
from fedprune_app.core.named import Values
from fedprune_app.files import may_write
from fedprune_app.preflight.combinations import check_system
from fedprune_app.preflight.inputs import Placement, RunInputs, origin_of
from fedprune_app.registry import SYSTEMS, System

_FEW_NODES = 10  # with fewer real nodes all take part in a round, unless fraction-train says otherwise


@dataclass(frozen=True)
class Prepared:
    """A run that passed all checks, with its settings and its placement.

    ``notes`` are warnings for the user. With ``is_complete`` the folder has the run with all its rounds already.
    """

    config: Config
    placement: Placement
    system: System
    notes: tuple[str, ...] = ()
    is_complete: bool = False

    @property
    def folder(self) -> Path:
        return Path(self.config.out_dir)


def prepare(inputs: RunInputs, placement: Placement | None = None) -> Prepared:
    """Return the prepared run, or raise :class:`ConfigError` if it could not start at ``placement``.

    Without a ``placement`` only the settings are checked, as in a process of the run itself.
    """
    return prepare_all([inputs], placement)[0]


def prepare_all(all_inputs: Sequence[RunInputs], placement: Placement | None = None) -> list[Prepared]:
    """Prepare several runs together: a setting must have an effect in at least one of the runs that have it."""
    runs = []
    for inputs in all_inputs:
        with naming_source(inputs.where):
            runs.append(_prepared_run(inputs, placement))
    idle_keys = _idle_keys(all_inputs, [run.config for run in runs])
    prepared = []
    for inputs, run in zip(all_inputs, runs, strict=True):
        notes = [*_notes(inputs, run.config, idle_keys)]
        if placement is not None and not run.is_complete:
            from fedprune_app.preflight.can_start import warnings  # the module imports torch

            with naming_source(inputs.where):
                notes += warnings(run.config, run.placement)
        prepared.append(replace(run, notes=tuple(notes)))
    return prepared


def _prepared_run(inputs: RunInputs, placement: Placement | None) -> Prepared:
    info = _recorded_info(inputs, placement) if inputs.resume else {}
    if placement is not None and inputs.out is not None:
        _check_folder(inputs, placement)
    values = {**inputs.base, **inputs.chosen}
    if inputs.out is not None:
        values["out-dir"] = str(inputs.folder)
    if inputs.resume:
        if not inputs.is_whole:
            plugins.check_named(info.get("config", {}), inputs.chosen)
            values = {**info.get("config", {}), **values}
        values["resume-from"] = str(inputs.folder)
    if inputs.accept_loss:
        values["accept-loss"] = True
    if placement and not (placement.is_simulation or info):
        num_nodes = len(placement.nodes) or int(str(values.get("min-clients", 1)))
        values.setdefault("fraction-train", 1.0 if num_nodes < _FEW_NODES else DEFAULTS["fraction-train"])
    plugins.load(values)
    for key in set(info.get("config", {})) - set(OPTIONS):
        raise ConfigError("setting", key, which="is unknown", where=origin_of(info))
    for key, value in inputs.chosen.items():
        if key in OPTIONS and OPTIONS[key].kind is PathKind.RUN_FOLDER and value:
            raise ConfigError(key, value, which="the command decides", hint="out and resume say it")
    config = check_system(parse_config(values))
    if info:
        check_resumable(info["config"], config)
    made_rounds = info["rounds_completed"] if info.get("status") == "completed" else 0
    if made_rounds > (num_rounds := config.num_server_rounds):
        raise ConfigError("num-server-rounds", num_rounds, f"at least {made_rounds}", condition="when resuming")
    place = (placement or Placement("inprocess")).resumed(info).with_nodes_for(config)
    return Prepared(config, place, SYSTEMS[config.system], (), bool(info) and is_whole(info, config))


def _recorded_info(inputs: RunInputs, placement: Placement | None) -> Values:
    """Return the run.json of the run to resume.

    It is empty if run.json is only on the server, whose ServerApp then compares the settings.
    """
    from fedprune_app.results.reader import read_info

    if (inputs.folder / "run.json").exists():
        return read_info(inputs.folder)
    if placement is not None and placement.superlink:
        return {}
    raise ConfigError("--out", inputs.folder, which="holds no run to resume")


def _check_folder(inputs: RunInputs, placement: Placement) -> None:
    from fedprune_app.results.ownership import check_free
    from fedprune_app.results.recorder import holds_run

    if inputs.resume:
        return
    if not placement.superlink:
        check_out(inputs.folder)
        check_free(inputs.folder)
    if holds_run(inputs.folder):
        raise ConfigError("--out", inputs.out, "a new folder", which="already holds a run", hint="resume continues it")


def check_out(folder: Path) -> None:
    from fedprune_app.results.reader import is_held

    if not may_write(folder):
        raise ConfigError("--out", folder, "a folder in which you may write")
    if is_held(folder):
        raise ConfigError("--out", folder, "a new folder", which="is in use by another process")


def _idle_keys(all_inputs: Sequence[RunInputs], configs: Sequence[Config]) -> set[str]:
    """Return the keys without effect in all runs that have them, but with effect in their own file's settings.

    A file may be for another system than the command line's. Raises :class:`ConfigError` for a key without any effect.
    """
    idle_keys = set()
    for key in dict.fromkeys(key for inputs in all_inputs for key in inputs.chosen):
        pairs = [(inputs, config) for inputs, config in zip(all_inputs, configs, strict=True) if key in inputs.chosen]
        if not any(has_effect(key, config) for _, config in pairs):
            idle_keys.add(key)
            inputs, config = pairs[0]
            if key in inputs.on_command_line:
                check_effects([key], config)
            for file in inputs.files:
                if key in file:
                    file_settings = paths_from_here(file)
                    plugins.load(file_settings)
                    with naming_source(inputs.where):
                        check_effects([key], parse_config(file_settings))
    return idle_keys


def _notes(inputs: RunInputs, config: Config, idle: Collection[str]) -> Iterator[str]:
    """Yield warnings about a private system without privacy, and about settings without effect."""
    if SYSTEMS[config.system].is_private and not config.dp.enabled:
        yield f"dp.enabled is false, so this run of system {config.system!r} protects nobody"
    if keys := [key for key in inputs.chosen if key in idle]:
        yield f"without effect with system {config.system!r}: {', '.join(keys)}"
