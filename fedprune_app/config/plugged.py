"""Tables of options that a plug-in declares while the program runs.

A run has the table of its own system, as ``config.own``. Flower refuses keys that the app's pyproject.toml does not
declare, so such options travel as JSON in the one declared key ``plugin-options``.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import get_type_hints

from fedprune_app.config.common import Table
from fedprune_app.config.config import OPTIONS, Config, flat, register_keys
from fedprune_app.config.errors import ConfigError
from fedprune_app.config.options import Scalar, declares_option

_TABLES: dict[str, type[Table]] = {}
"""By system of a plug-in: its table."""
uses_of: dict[str, tuple[str, ...]] = {}
"""By system of a plug-in: the keys and tables of other systems that it reads as well."""
_TYPES = (bool, int, float, str)
CARRIER = "plugin-options"


def register_table(system: str, kind: type[Table]) -> None:
    """Declare the options of a plug-in's ``system``.

    Their table has the name that the class gives it, or else the name of the system. Systems may share a table. Raises
    :class:`ConfigError` for a class that is no frozen dataclass of options, and for a name that is taken.
    """
    where = f"system {system!r}"
    if not (isinstance(kind, type) and issubclass(kind, Table) and is_dataclass(kind)):
        raise ConfigError("options", kind, "a frozen dataclass that extends Table", where=where)
    own_keys = [key for key, hint in inspect.get_annotations(kind).items() if "ClassVar" not in str(hint)]
    if own_keys and "__dataclass_params__" not in vars(kind):
        raise ConfigError("options", kind.__name__, "a class with @dataclass(frozen=True)", where=where)
    _check_fields(system, kind)
    kind.name = kind.name or system
    if kind.name in {item.name.replace("_", "-") for item in fields(Config)}:
        raise ConfigError("name of the options", kind.name, "a name that no table has", where=where)
    _TABLES[system] = kind
    systems = tuple(name for name, table in _TABLES.items() if table is kind)
    prefix = f"{kind.name}."
    register_keys(
        prefix,
        {key: replace(option, needs={"system": systems, **option.needs}) for key, _, option in flat(kind(), prefix)},
    )


def _check_fields(system: str, kind: type[Table]) -> None:
    """Raise :class:`ConfigError` for a field that declares no option, or has a default of another type than it says."""
    try:
        hints = get_type_hints(kind)
    except Exception:  # a name in an annotation may be known where the class was made alone
        hints = {}
    for item in fields(kind):
        where = f"system {system!r}: options {kind.__name__}"
        if not declares_option(item):
            raise ConfigError(item.name, ..., "TYPE = option(DEFAULT, HELP)", which="declares no option", where=where)
        default, hint = item.default, hints.get(item.name, type(item.default))
        if type(default) not in _TYPES or (hint in _TYPES and type(default) is not hint):
            type_names = hint.__name__ if hint in _TYPES else "bool, int, float or str"
            raise ConfigError(f"default of {item.name}", default, f"one of type {type_names}", where=where)


def check_uses(system: str, uses: Collection[str]) -> tuple[str, ...]:
    """Return the keys and tables that a plug-in's ``system`` uses. Raises :class:`ConfigError` for unknown ones."""
    if isinstance(uses, str) or not isinstance(uses, Collection):
        raise ConfigError("uses", uses, "a tuple of keys and tables", where=f"system {system!r}")
    names = {*OPTIONS, *(key.rpartition(".")[0] for key in OPTIONS)} - {""}
    for name in uses:
        if name not in names:
            raise ConfigError("uses", name, "keys and tables of settings", where=f"system {system!r}")
    return tuple(uses)


def table_of(system: object) -> Table:
    """Return the default options of a plug-in's system; an empty table for any other."""
    return _TABLES.get(str(system), Table)()


def is_used(system: str, key: str) -> bool:
    """Return whether a plug-in's ``system`` says that it reads the option ``key`` of another system."""
    return not {key, key.rpartition(".")[0]}.isdisjoint(uses_of.get(system, ()))


def without_carrier(values: Mapping[str, object]) -> dict[str, object]:
    """Return ``values`` with the options that ``plugin-options`` carries under keys of their own."""
    text = values.get(CARRIER)
    settings = {key: value for key, value in values.items() if key != CARRIER}
    if not text:
        return settings
    try:
        carried = json.loads(str(text))
    except ValueError:
        carried = None
    if not isinstance(carried, dict):
        raise ConfigError(CARRIER, text, "a JSON object such as '{\"my-system.mu\": 0.1}'")
    tables = {kind.name for kind in _TABLES.values()}
    for key in carried:
        if key.rpartition(".")[0] not in tables:
            allowed = ", ".join(name for name in OPTIONS if name.rpartition(".")[0] in tables) or "none here"
            raise ConfigError(CARRIER, key, f"the options of plug-ins, {allowed}")
        if key in settings:
            raise ConfigError(key, settings[key], "one of them", which=f"is in {CARRIER} too")
    return {**settings, **carried}


def with_carrier(config: Config) -> dict[str, Scalar]:
    """Return the flat form of a configuration in declared keys alone, as Flower takes it."""
    values = config.to_dict()
    prefix = f"{config.own.name}."
    carried = {key: value for key, value in values.items() if config.own.name and key.startswith(prefix)}
    if not carried:
        return values
    return {**{key: value for key, value in values.items() if key not in carried}, CARRIER: json.dumps(carried)}
