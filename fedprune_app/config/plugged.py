"""Tables of options that a plug-in declares while the program runs.

A run has the table of its own system as ``config.own``. Flower rejects keys that the app's pyproject.toml does not
declare, so these options travel as JSON in the one declared key ``plugin-options``.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import fields, replace

from fedprune_app.config.common import Table
from fedprune_app.config.config import OPTIONS, Config, flat, register_keys
from fedprune_app.config.errors import ConfigError
from fedprune_app.config.options import Scalar
from fedprune_app.config.systems import SYSTEMS, declared

_TYPES = ("bool", "int", "float", "str")
CARRIER = "plugin-options"


def register_table(system: str, kind: type[Table]) -> None:
    """Register the options of a plug-in's ``system``.

    The table's name is that of the class attribute ``name``, or else the system's. Systems may share a table. Raises
    :class:`ConfigError` for a class that is no frozen dataclass of options, and for a name in use.
    """
    where = f"system {system!r}"
    if not (isinstance(kind, type) and issubclass(kind, Table) and "__dataclass_params__" in vars(kind)):
        raise ConfigError("options", kind, "a class that extends Table, with @dataclass(frozen=True)", where=where)
    for item in fields(kind):
        type_name = getattr(item.type, "__name__", item.type)  # a text if annotations are not evaluated
        if not item.metadata or type(item.default).__name__ != type_name or type_name not in _TYPES:
            allowed = f"NAME: TYPE = option(DEFAULT of that TYPE, HELP), TYPE being one of {', '.join(_TYPES)}"
            raise ConfigError(item.name, ..., allowed, which="declares no option", where=where)
    kind.name = kind.name or system
    if kind.name in {item.name.replace("_", "-") for item in fields(Config)}:
        raise ConfigError("name of the options", kind.name, "a name that no table has", where=where)
    systems = (*(name for name, other in SYSTEMS.items() if other.options is kind and name != system), system)
    prefix = f"{kind.name}."
    register_keys(
        prefix,
        {key: replace(option, needs={"system": systems, **option.needs}) for key, _, option in flat(kind(), prefix)},
    )


def check_uses(system: str, uses: Collection[str]) -> tuple[str, ...]:
    """Return the keys and tables that a plug-in's ``system`` uses. Raises :class:`ConfigError` for unknown ones."""
    names = {*OPTIONS, *(key.rpartition(".")[0] for key in OPTIONS)} - {""}
    for name in uses:
        if name not in names:
            raise ConfigError("uses", name, "keys and tables of settings", where=f"system {system!r}")
    return tuple(uses)


def is_used(system: str, key: str) -> bool:
    """Return whether a plug-in's ``system`` declares that it reads the option ``key`` of another system."""
    return not {key, key.rpartition(".")[0]}.isdisjoint(declared(system).uses)


def without_carrier(values: Mapping[str, object]) -> dict[str, object]:
    """Return ``values`` with the options in ``plugin-options`` under their own keys."""
    text = values.get(CARRIER) or "{}"
    settings = {key: value for key, value in values.items() if key != CARRIER}
    try:
        carried = json.loads(str(text))
    except ValueError:
        carried = None
    tables = {system.options.name for system in SYSTEMS.values()} - {""}
    if not isinstance(carried, dict) or any(key.rpartition(".")[0] not in tables for key in carried):
        raise ConfigError(CARRIER, text, "a JSON object of options of plug-ins, such as '{\"my-system.mu\": 0.1}'")
    return {**settings, **carried}


def with_carrier(config: Config) -> dict[str, Scalar]:
    """Return the flat form of a configuration with declared keys only, for Flower."""
    values = config.to_dict()
    prefix = f"{config.own.name}."
    carried = {key: value for key, value in values.items() if config.own.name and key.startswith(prefix)}
    others = {key: value for key, value in values.items() if key not in carried}
    return {**others, CARRIER: json.dumps(carried) if carried else ""}
