"""The options shared by all commands, and how a shell completes settings, configurations and run folders.

A completion that returns nothing leaves the shell's own, that of files.
"""

from collections.abc import Iterable
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
    keys = [key for key in OPTIONS if key.startswith(incomplete)]
    if len(keys) > 1:
        return [f"{key}=" for key in keys]
    # with values there is more than one candidate, so that no shell ends the word behind the sign
    return [text for key in keys for text in (f"{key}=", *(f"{key}={name}" for name in values_of(key)))]


def values_of(key: str) -> list[str]:
    from fedprune_app.data.names import DATASETS, PARTITIONS, TEXTS
    from fedprune_app.models.names import MODELS
    from fedprune_app.plugins import installed
    from fedprune_app.registry import SYSTEMS

    names: dict[str, Iterable[str]] = {
        "system": SYSTEMS,
        "dataset": {**DATASETS, **TEXTS},
        "partition": PARTITIONS,
        "model": MODELS,
    }
    if key in names:
        return [*names[key], *installed()[key]]
    option = OPTIONS.get(key)
    if option is None or (option.default == "" and not option.choices):
        return []
    return list(option.choices) or (["true", "false"] if isinstance(option.default, bool) else [str(option.default)])


def complete_run(incomplete: str) -> list[str]:
    """Complete the folder of a run in one of the next two levels."""
    path = Path(incomplete)
    folder, start = (path, "") if not incomplete or incomplete.endswith("/") else (path.parent, path.name)
    found = [run.parent for depth in ("", "*/") for run in folder.glob(f"{start}*/{depth}run.json")]
    return sorted(map(str, found))


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
