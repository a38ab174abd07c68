"""The settings that somebody gives become the configuration of a run in a folder, for the command line and the API."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedprune_app import plugins
from fedprune_app.config import (
    OPTIONS,
    Config,
    ConfigError,
    Kind,
    Scalar,
    check_effects,
    check_resumable,
    has_effect,
    parse_override,
    paths_from_here,
    read_toml,
)
from fedprune_app.files import check_writable
from fedprune_app.registry import check_names, check_system
from fedprune_app.shipped import config_file


@dataclass(frozen=True)
class Given:
    """These settings are given: those of files, and those of the command line, which win."""

    files: Sequence[dict[str, Scalar]]
    on_command_line: dict[str, Scalar]

    @property
    def values(self) -> dict[str, Scalar]:
        """These are all settings by key; later files win, and the command line wins over them."""
        return {key: value for source in (*self.files, self.on_command_line) for key, value in source.items()}

    def check_effects(self, config: Config) -> None:
        """Raise :class:`ConfigError` for a setting that has no effect in a run with ``config``.

        A file may be meant for another system than the command line asks for. What has an effect with the file alone is
        no error, see :meth:`idle`.
        """
        check_effects(self.on_command_line, config)
        for file in self.files:
            check_effects([key for key in file if not has_effect(key, config)], plugins.parse(file))

    def idle(self, config: Config) -> list[str]:
        """Return the keys in files that have no effect in a run with ``config``."""
        return list({key: None for file in self.files for key in file if not has_effect(key, config)})


def given_in(
    files: Sequence[Path] | None, overrides: Sequence[str] | None, more_plugins: Sequence[str] | None = None
) -> Given:
    """Return the settings in run-config files, or shipped ones by name, and in texts ``key=value``.

    ``more_plugins`` are added to the key ``plugins``. All code that the settings name is loaded.
    """
    on_command_line: dict[str, Scalar] = {}
    for key, value in map(parse_override, overrides or []):
        if key in on_command_line:
            raise ConfigError(f"{key} is given twice on the command line, allowed: once")
        on_command_line[key] = value
    in_files = [read_toml(config_file(file)) for file in files or []]
    return with_plugins(in_files, on_command_line, more_plugins)


def with_plugins(
    files: Sequence[dict[str, Scalar]], on_command_line: dict[str, Scalar], more_plugins: Sequence[str] | None = None
) -> Given:
    """Return settings with absolute paths, when the plug-ins that the settings name are loaded."""
    for name in more_plugins or ():
        if not name.strip():
            raise ConfigError(f"--plugin is {name!r}, allowed: a module, or a file that ends in .py")
    named = plugins.names_in(Given(files, on_command_line).values)
    if more_plugins:
        on_command_line = {**on_command_line, "plugins": ",".join(dict.fromkeys([*named, *more_plugins]))}
    # the paths in a plug-in's options are known once it is loaded
    plugins.load(paths_from_here(Given(files, on_command_line).values))
    return Given([paths_from_here(file) for file in files], paths_from_here(on_command_line))


def placed(
    given: Given,
    out: Path,
    before: Mapping[str, Any] | None,
    *,
    accept_loss: bool = False,
    force: bool = False,
    is_here: bool = True,
) -> Config:
    """Return the configuration of a run in the folder ``out``.

    Without ``before`` the run is a new one. With ``before``, which is a run.json, the run continues that one. A new run
    is refused where it would replace what fedprune did not write, unless ``force`` allows that. Where the folder is not
    on this machine (not ``is_here``), nothing is looked up here: the ServerApp then looks.
    """
    from fedprune_app.results.lock import is_held
    from fedprune_app.results.ownership import check_free, in_the_way
    from fedprune_app.results.recorder import holds_run

    folder = out.expanduser().resolve()
    values = given.values
    check_no_place(values)
    if before is None:
        if is_here:
            check_out(out)
        if is_here and is_held(folder):
            raise ConfigError(f"--out {str(out)!r} is in use by another process, allowed: a new folder")
        if is_here and not force:
            check_free(folder)
        if holds_run(folder) and not in_the_way(folder):
            raise ConfigError(f"--out {str(out)!r} already holds a run, allowed: a new folder, or --resume")
    if before is not None:
        plugins.check_named(before.get("config", {}), values)
        accepting: dict[str, Scalar] = {"accept-loss": True} if accept_loss else {}
        values = {**before.get("config", {}), **values, **accepting, "resume-from": str(folder)}
    config = check_names(plugins.parse({**values, "out-dir": str(folder)}))
    given.check_effects(config)
    if before:
        check_resumable(before["config"], config)
    return check_system(config)


def check_out(out: Path) -> None:
    """Raise ``ValueError`` where ``out`` is a file, or a folder in which this process may not write."""
    folder = out.expanduser().resolve()
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--out {str(out)!r} is a file, allowed: a new folder")
    check_writable("--out", folder)


def check_no_place(values: Mapping[str, object]) -> None:
    """Raise :class:`ConfigError` for a setting that names the run's own folder, which the command decides."""
    for key, option in OPTIONS.items():
        if option.kind is Kind.RUN_FOLDER and values.get(key):
            raise ConfigError(f"{key} is {values[key]!r}, allowed here: --out DIR and --resume say it")


def check_accept_loss(accept_loss: bool, resume: bool) -> None:
    """Raise :class:`ConfigError` where a loss is accepted and nothing is resumed."""
    if accept_loss and not resume:
        raise ConfigError("--accept-loss is given, allowed: with --resume")


def recorded(out: Path, superlink: str = "") -> dict[str, Any]:
    """Return the run.json of the run to resume.

    The result is empty if run.json is on the server alone. Its ServerApp then compares the settings.
    """
    from fedprune_app.results.reader import read_info

    if not (out / "run.json").exists():
        if superlink:
            return {}
        raise ConfigError(f"--out {str(out)!r} holds no run to resume")
    return read_info(out)


def clients_of(before: Mapping[str, Any] | None) -> int:
    """Return how many clients a recorded run began with, those that were left out included; 0 if that is unknown."""
    return (before or {}).get("num_partitions") or len((before or {}).get("partition") or [])


def number_of_clients(asked: int | None, before: Mapping[str, Any] | None) -> int:
    """Return how many clients a run has: those ``asked`` for, those that the recorded run had ``before``, or 20.

    Raises :class:`ConfigError` for another number than before, and where a recorded run does not say its number.
    """
    known = clients_of(before)
    if asked is None and before and not known:
        raise ConfigError("--clients is not given, allowed when resuming a run that does not say its number: 1, 2, ...")
    count = (known or 20) if asked is None else asked
    if known not in (0, count):
        raise ConfigError(f"--clients is {count}, allowed when resuming: {known}, as the run began")
    return count


def recorded_clients(folders: Iterable[Path]) -> int:
    """Return how many clients the first run in these folders began with; 0 if no run says that."""
    return next(filter(None, map(_clients_in, folders)), 0)


def check_clients(folder: Path, num_clients: int) -> None:
    """Raise :class:`ConfigError` where ``folder`` has a run that began with another number of clients."""
    known = _clients_in(folder)
    if known not in (0, num_clients):
        where = f"when resuming {folder.name!r}: {known}, as this run began"
        raise ConfigError(f"--clients is {num_clients}, allowed {where}; or a new folder")


def _clients_in(folder: Path) -> int:
    from fedprune_app.results.reader import read_info
    from fedprune_app.results.recorder import holds_run

    return clients_of(read_info(folder)) if holds_run(folder) else 0
