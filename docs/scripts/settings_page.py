"""Write the page of all settings, docs/reference/settings.md, from their declarations: `make settings`."""

from __future__ import annotations

from pathlib import Path

from fedprune_app.config import OPTIONS, toml_value

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


if __name__ == "__main__":
    PAGE.write_text(settings_page())
