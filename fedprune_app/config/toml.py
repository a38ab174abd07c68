"""Settings as text: run-config files, the shipped configurations, and ``key=value`` of a command line."""

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedprune_app.config.config import OPTIONS
from fedprune_app.config.errors import ConfigError, naming_source, not_allowed
from fedprune_app.config.options import Scalar, Settings

_REGISTERED = re.compile(r'register_system\(\s*"([^"]+)"')


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested tables as dotted keys, as Flower does with ``--run-config`` files.

    Raises :class:`ConfigError` for a key in both forms.
    """
    flat: dict[str, Any] = {}
    for key, value in table.items():
        name = f"{prefix}{key}"
        entries = flatten(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
        if duplicates := flat.keys() & entries.keys():
            raise ConfigError(min(duplicates), ..., "once", which="is given twice, with a dot and in a table")
        flat.update(entries)
    return flat


def read_toml(path: Path) -> dict[str, Any]:
    """Return the flat keys of the run-config file ``path``. Raises :class:`ConfigError` that names the file."""
    try:
        with naming_source(f"config file {str(path)!r}"):
            return flatten(tomllib.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ConfigError("config file", path, which="does not exist") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError("config file", path, which="cannot be read", hint=str(error)) from None


def parse_override(text: str) -> tuple[str, Scalar]:
    """Return key and value of ``text``, a ``key=value``; a value that is no TOML is plain text.

    The value of an option of type text is always a text, quoted or not: ``data-dir=2024_01`` is a folder, not a number.
    Raises :class:`ConfigError` for another form, and for a list or table.
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError("setting", text, "KEY=VALUE, such as system=NAME; a file is given as -c FILE")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value
    option = OPTIONS.get(key.strip())
    if isinstance(parsed, str):
        return key.strip(), parsed
    if option and isinstance(option.default, str):
        return key.strip(), value.strip()
    if not isinstance(parsed, bool | int | float):
        raise ConfigError(key.strip(), value, "a number, true, false or a text")
    return key.strip(), parsed


def to_toml(values: Settings) -> str:
    """Return flat ``values`` as TOML for Flower and :func:`read_toml`."""
    lines = []
    for key, value in sorted(values.items(), key=lambda item: ("." in item[0], item[0])):
        quoted = f'"{key}"' if "." in key else key
        lines.append(f"{quoted} = {toml_value(value)}")
    return "\n".join(lines) + "\n"


def toml_value(value: Scalar) -> str:
    if isinstance(value, str):
        # JSON's escapes are TOML's, except for the delete character
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else repr(value)


def shipped_configs() -> dict[str, Path]:
    """Return the files of the shipped configurations by name, such as ``subfedavg``."""
    folder = shipped_folder("configs")
    return {path.stem: path for path in sorted(folder.glob("*.toml"))} if folder else {}


def shipped_folder(name: str) -> Path | None:
    """Return a folder that comes with fedprune: in a wheel it is in the package, in the repository beside it."""
    package = Path(__file__).parents[1]
    return next((folder for folder in (package / name, package.parent / name) if folder.is_dir()), None)


def gallery_systems() -> dict[str, Path]:
    """Return by system the plug-ins of the gallery, which are read and not imported."""
    folder = shipped_folder("gallery")
    files = sorted(folder.glob("*.py")) if folder else []
    return {name: file for file in files for name in _REGISTERED.findall(file.read_text(encoding="utf-8"))}


def config_file(path: Path) -> Path:
    """Return ``path`` if it is a file, or else the shipped configuration of that name.

    Raises :class:`ConfigError` for a name that is neither.
    """
    if (path.exists() and not path.is_dir()) or path.suffix or path.parent != Path():
        return path
    shipped = shipped_configs()
    if str(path) not in shipped:
        raise not_allowed("--config", str(path), [*shipped, "or a file"])
    return shipped[str(path)]
