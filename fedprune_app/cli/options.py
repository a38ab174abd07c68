"""The options shared by all commands, and how a shell completes settings, configurations and run folders.

A completion that returns nothing leaves the shell's own, that of files.
"""

import os
from glob import glob
from pathlib import Path
from typing import Annotated

import typer

from fedprune_app.config import OPTIONS
from fedprune_app.config.toml import shipped_configs


def complete_setting(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete KEY=VALUE, which is one word to most shells, and to bash three words, of which the second is "="."""
    key, equals, _ = incomplete.partition("=")
    if equals:
        return [f"{key}={name}" for name in values_of(key)]
    words = [word for word in ctx.params.get("overrides") or [] if word != "="]
    if words and words[-1] in OPTIONS:
        return values_of(words[-1])
    found = [f"{key}=" for key in OPTIONS if key.startswith(incomplete)]
    if len(found) == 1:  # with values there is more than one candidate, so that no shell ends the word behind the sign
        found += [f"{found[0]}{name}" for name in values_of(found[0][:-1])]
    return found


def values_of(key: str) -> list[str]:
    if key in (names := names_by_key()):
        return list(names[key])
    option = OPTIONS.get(key)
    if option is None:
        return []
    return list(option.choices) or (["true", "false"] if isinstance(option.default, bool) else [str(option.default)])


def names_by_key() -> dict[str, dict[str, str]]:
    """Return all systems, datasets, partitions and models, each with one line on it."""
    from fedprune_app.data.names import DATASETS, PARTITIONS, TEXTS
    from fedprune_app.models.names import MODELS
    from fedprune_app.plugins import installed
    from fedprune_app.registry import SYSTEMS

    found = {
        "system": {name: system.summary for name, system in SYSTEMS.items()},
        "dataset": {**DATASETS, **TEXTS},
        "partition": dict(PARTITIONS),
        "model": dict(MODELS),
    }
    for key, modules in installed().items():
        for name, module in modules.items():
            found[key].setdefault(name, f"of the installed plug-in {module}")
    return found


def complete_run(incomplete: str) -> list[str]:
    """Complete the folder of a run in one of the next two levels."""
    found = glob(f"{incomplete}*/run.json") + glob(f"{incomplete}*/*/run.json")
    return [os.path.dirname(path) for path in found]


Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", autocompletion=complete_setting)]
Configs = Annotated[
    list[Path] | None,
    typer.Option(
        "-c",
        "--config",
        help="Read settings from this run-config file, or from the shipped one of this name, such as subfedavg. "
        "You may repeat the option. A later file wins over an earlier one, and KEY=VALUE over both.",
        autocompletion=lambda: list(shipped_configs()),
    ),
]
Plugins = Annotated[
    list[str] | None,
    typer.Option(
        "--plugin",
        help="Load this module or file.py, which adds systems, networks, datasets or partitions. You may repeat the "
        "option.",
    ),
]
Out = Annotated[Path, typer.Option("--out", help="The folder for the results.")]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers",
        help="How many processes hold clients (ray). By default eight per GPU (one for a language model), or one per "
        "CPU core.",
    ),
]
RayAddress = Annotated[str, typer.Option("--ray-address", help="Simulate on the Ray cluster at HOST:PORT.")]
AcceptLoss = Annotated[
    bool, typer.Option("--accept-loss", help="With --resume, go on even if a damaged file changes the result.")
]
Engine = Annotated[
    str,
    typer.Option("--engine", help="Run on ray, on flower (Flower's own simulation), or inprocess for debugging."),
]
