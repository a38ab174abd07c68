"""Conversion of flat keys to a configuration, checks of a resumed run, and which keys have an effect."""

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from fedprune_app.config.common import CommonOptions, Table
from fedprune_app.config.config import OPTIONS, Config
from fedprune_app.config.errors import ConfigError, unknown_key
from fedprune_app.config.options import Needs, NoneOf, PathKind, Scalar, Settings
from fedprune_app.config.plugged import is_used, without_carrier
from fedprune_app.config.systems import declared

T = TypeVar("T", bound=CommonOptions | Table)


def parse_config(values: Mapping[str, object]) -> Config:
    """Return the configuration of flat ``values``; missing keys have their defaults.

    Values that depend on other keys are resolved: ``test_split`` is never 'auto'. Plug-ins must be loaded before.

    Raises :class:`ConfigError` for an unknown key, a wrong type, a value out of range, or contradicting options. Names
    of systems, datasets, partitions and models are checked by their registries.
    """
    values = without_carrier(values)
    for key in values:
        if key not in OPTIONS:
            raise unknown_key(key, OPTIONS)
    parsed = {key: OPTIONS[key].parse(key, value) for key, value in values.items()}
    return _checked_config(frozenset(parsed.items()), declared(values.get("system")).options())


@lru_cache(maxsize=16)  # every message to a client has its run's configuration
def _checked_config(items: frozenset[tuple[str, Scalar]], own_options: Table) -> Config:
    config = _with_values(Config(own=own_options), dict(items)).settled()
    config.check()
    return config


def _with_values(blank: T, values: Settings, prefix: str = "") -> T:
    changes: dict[str, Any] = {}
    for item in fields(blank):
        key, value = f"{prefix}{item.name.replace('_', '-')}", getattr(blank, item.name)
        changes[item.name] = (
            _with_values(value, values, f"{value.name or key}.") if isinstance(value, Table) else values.get(key, value)
        )
    return replace(blank, **changes)


def paths_from_here(values: Settings) -> dict[str, Scalar]:
    """Return the ``values`` of a command line with absolute paths; relative ones begin at the current folder."""
    return {key: OPTIONS[key].from_here(value) if key in OPTIONS else value for key, value in values.items()}


def written_below(folder: Path, config: Config) -> Config:
    """Return ``config`` for a new run that writes only below ``folder``: records, clients' state and ledgers."""
    kinds = (PathKind.RUN_FOLDER, PathKind.STATE_FOLDER)
    places = {key: "" for key, option in OPTIONS.items() if option.kind in kinds}
    return parse_config({**config.to_dict(), **places, "out-dir": str(folder)})


def check_resumable(settings: Mapping[str, object], config: Config) -> None:
    """Raise :class:`ConfigError` if ``config`` cannot continue a run that began with these ``settings``."""
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


def is_whole(info: Mapping[str, Any], config: Config) -> bool:
    """Return whether the run of this run.json has nothing left to do: its rounds, or those that its budgets allowed."""
    planned = config.num_server_rounds in (info["rounds_completed"], info["config"]["num-server-rounds"])
    return bool(info["status"] == "completed" and planned)


# --- which keys have an effect ----------------------------------------------------------------------------------------


# By key and system: the system's own key for the same quantity, as the end of a sentence.
_INSTEAD = {
    ("density", "subfedavg"): "; system 'subfedavg' has subfedavg.target-rate, the percentage that is pruned",
    ("density", "subfedavg-hy"): "; system 'subfedavg-hy' has subfedavg.target-rate, the percentage that is pruned",
    ("density", "dpsgd"): "; system 'dpsgd' has dpsgd.density",
    ("density", "dpsgd-ft"): "; system 'dpsgd-ft' has dpsgd.density",
    ("density", "fedspa"): "; system 'fedspa' has fedspa.share",
    ("density", "fjord"): "; system 'fjord' has fjord.widths",
    ("local-epochs", "ditto"): "; system 'ditto' has ditto.global-epochs and ditto.personal-epochs",
}

# By key and system: further needs of a common key with that system.
_ALSO: Mapping[tuple[str, str], Needs] = {
    ("density", "fedltp"): {"fedltp.tickets": NoneOf((0,))},
    ("density", "dispfl"): {"dispfl.densities": ("",)},
    ("density", "fedp3"): {"fedp3.layer-set": NoneOf(("all",))},
    ("density", "fedspallm"): {"fedspallm.pattern": ("", "cut")},
    # a client that trains all layers has none to prune
    ("density", "fedcr"): {"fedcr.layer-set": NoneOf(("all",))},
    ("fedp3.assignment", "fedcr"): {"fedcr.layer-set": NoneOf(("all",))},
}


def has_effect(key: str, config: Config) -> bool:
    """Return whether the option ``key`` can change a run with this configuration."""
    return _unmet_need(key, config) is None


def check_effects(keys: Iterable[str], config: Config) -> None:
    """Raise :class:`ConfigError` for a key among ``keys`` that has no effect in a run with this configuration.

    Otherwise a user would believe that the results depend on it.
    """
    for key in keys:
        if (need := _unmet_need(key, config)) is not None:
            (name, values), settings = need, config.to_dict()
            raise ConfigError(
                key,
                settings.get(key, ...),
                which=f"has no effect with {name} {settings[name]!r}",
                hint=f"{key} needs {name} {_words(values)}{_INSTEAD.get((key, config.system), '')}",
            )


def _unmet_need(key: str, config: Config) -> tuple[str, tuple[Scalar, ...]] | None:
    if not (needs := {**OPTIONS[key].needs, **_ALSO.get((key, config.system), {})}):
        return None
    values = config.to_dict()
    if is_used(config.system, key):
        needs = {name: allowed for name, allowed in needs.items() if name != "system"}
    return next(((name, allowed) for name, allowed in needs.items() if values[name] not in allowed), None)


def _words(values: tuple[Scalar, ...]) -> str:
    words = " or ".join(str(value).lower() if isinstance(value, bool) else repr(value) for value in tuple(values))
    return f"other than {words}" if isinstance(values, NoneOf) else words
