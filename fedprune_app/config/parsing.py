"""From flat keys to a configuration, and from one to another."""

from collections.abc import Mapping
from dataclasses import fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from fedprune_app.config.common import CommonOptions, Table
from fedprune_app.config.config import OPTIONS, Config
from fedprune_app.config.errors import ConfigError, unknown_key
from fedprune_app.config.options import Kind, Scalar
from fedprune_app.config.plugged import table_of, without_carrier

T = TypeVar("T", bound=CommonOptions | Table)


def parse_config(values: Mapping[str, object]) -> Config:
    """Return the configuration that flat ``values`` describe; missing keys take their defaults.

    What depends on other keys is settled: ``test_split`` is never 'auto'. Plug-ins have to be loaded before.

    Raises :class:`ConfigError` for an unknown key, a wrong type, a value out of range, or options that do not go
    together. Names of systems, datasets, partitions and models are checked where these are registered.
    """
    values = without_carrier(values)
    for key in values:
        if key not in OPTIONS:
            raise unknown_key(key, OPTIONS)
    parsed = {key: OPTIONS[key].parse(key, value) for key, value in values.items()}
    return _checked_config(frozenset(parsed.items()), table_of(values.get("system")))


@lru_cache(maxsize=16)  # a client is told its run's configuration with every message
def _checked_config(items: frozenset[tuple[str, Scalar]], own_options: Table) -> Config:
    defaults = {key: option.default for key, option in OPTIONS.items()}
    config = _with_values(Config(own=own_options), defaults | dict(items)).settled()
    config.check()
    return config


def _with_values(blank: T, values: Mapping[str, Scalar], prefix: str = "") -> T:
    changes: dict[str, Any] = {}
    for item in fields(blank):
        key, value = f"{prefix}{item.name.replace('_', '-')}", getattr(blank, item.name)
        changes[item.name] = (
            _with_values(value, values, f"{value.name or key}.") if isinstance(value, Table) else values[key]
        )
    return replace(blank, **changes)


def paths_from_here(values: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Return ``values`` with absolute paths: on a command line relative paths begin at the current folder."""
    return {key: OPTIONS[key].from_here(value) if key in OPTIONS else value for key, value in values.items()}


def written_below(folder: Path, config: Config) -> Config:
    """Return ``config`` as a new run that writes in ``folder`` alone: records, clients' state and ledgers."""
    kinds = (Kind.RUN_FOLDER, Kind.STATE_FOLDER)
    places = {key: "" for key, option in OPTIONS.items() if option.kind in kinds}
    return parse_config({**config.to_dict(), **places, "out-dir": str(folder)})


def check_resumable(settings: Mapping[str, object], config: Config) -> None:
    """Raise :class:`ConfigError` where ``config`` would not continue a run that began with these ``settings``."""
    fixed = config.fixed_on_resume()
    for key, value in config.to_dict().items():
        if settings.get(key) != value and (key in fixed or not OPTIONS[key].resumable):
            raise ConfigError(
                key,
                value,
                f"{settings.get(key)!r}, as the run began",
                condition="when resuming",
                hint=fixed.get(key, ""),
            )
