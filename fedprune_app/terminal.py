"""The console of all output, and the options shared by all commands."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from fedprune_app.engine.printable import printable


class Terminal(Console):
    """A console that prints text literally: without markup, and without control sequences from the text."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)  # before a table measures it

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text), style, control)


console = Terminal(stderr=True)


# --- options of all commands ------------------------------------------------------------------------------------------


Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")]
Configs = Annotated[
    list[Path] | None,
    typer.Option(
        "-c",
        "--config",
        help="Read settings from this run-config file, or from the shipped one of this name, such as subfedavg. "
        "You may repeat the option. A later file wins over an earlier one, and KEY=VALUE over both.",
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


def echo(text: str, label: str = "", style: str = "") -> None:
    """Print one line to the terminal: a coloured ``label``, then ``text`` as it is."""
    console.print(Text.assemble((label, style), text), soft_wrap=True)


def print_rows(rows: Iterable[tuple[str, str]]) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    for subject, words in rows:
        table.add_row(Text(subject, "bold"), words)
    Terminal().print(table)
