"""Write what is made of the declarations of settings: `make settings`.

That is the page of all settings, docs/reference/settings.md, and fedprune/__init__.pyi, by which editors complete them.
"""

from __future__ import annotations

import inspect
from pathlib import Path

import fedprune_app
from fedprune_app import api
from fedprune_app.config import OPTIONS, toml_value

STUB = Path(__file__).parents[2] / "fedprune" / "__init__.pyi"
PAGE = Path(__file__).parents[1] / "reference" / "settings.md"


def settings_page() -> str:
    """Return the page: a list of the settings of all systems, and one of each system's or group's own."""
    lines = [
        "# Settings",
        "",
        "`fedprune list --keys` prints the same, and `fedprune list --keys SYSTEM` the settings that have an",
        "effect with one system. A setting is given as `KEY=VALUE`, in a run-config file, or as an argument in Python.",
        "Behind a key stand its default and the allowed range.",
    ]
    table = ""
    keys: dict[str, str] = {}  # by meaning, the first key that has it
    for key, option in OPTIONS.items():
        name = key.partition(".")[0] if "." in key else "all systems"
        if name != table:
            table = name
            lines += ["", f"## {table}", ""]
        meaning = option.help + "".join(f"<br>`{choice}`: {words}" for choice, words in option.choices.items())
        if (first := keys.setdefault(meaning, key)) != key and option.choices:
            meaning = f"As `{first}`."
        allowed = f"; {option.range.replace(' and ', ', ')}" if option.range else ""
        lines.append(f"* **`{key}`** (`{toml_value(option.default)}`{allowed}): {meaning}")
    return "\n".join(lines) + "\n"


STUB_HEAD = '''"""What editors know of ``import fedprune``; `make settings` writes it from the declarations."""

from collections.abc import Callable
from typing import TypedDict, Unpack, overload

from fedprune_app import __version__ as __version__
from fedprune_app.api import AnyPath, Settings
'''


def stub() -> str:
    """Return the API for editors: ``run`` takes every setting of fedprune itself by name, and those of plug-ins."""
    tables: dict[str, dict[str, str]] = {"": {}}
    for key, option in OPTIONS.items():
        table, _, name = key.rpartition(".")
        tables.setdefault(table, {})[name.replace("-", "_")] = type(option.default).__name__
    own = tables.pop("")
    lines = [f"from fedprune_app.api import {name} as {name}" for name in fedprune_app.__all__ if name != "run"]
    lines.append("from fedprune_app.core.named import Values")
    for table, names in tables.items():
        lines += ["", f"class _{table.title()}(TypedDict, total=False):", *_fields(names)]
        own[table] = f"_{table.title()}"
    lines += ["", "class _Keys(TypedDict, total=False):", *_fields(own), ""]
    *arguments, _ = inspect.signature(api.run).parameters.values()
    first, *others = [f"    {each.name}: {each.annotation} = ...," for each in arguments]
    for keys in ("Unpack[_Keys]", "object"):
        lines += ["@overload", "def run(", first, "    /,", "    *,", *others, f"    **settings: {keys},"]
        lines.append(") -> Run: ...")
    return STUB_HEAD + "\n".join(lines) + "\n"


def _fields(names: dict[str, str]) -> list[str]:
    return [f"    {name}: {kind}" for name, kind in sorted(names.items())]


if __name__ == "__main__":
    PAGE.write_text(settings_page())
    STUB.write_text(stub())
