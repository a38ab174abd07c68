"""The console of all output."""

from collections.abc import Iterable
from typing import Any

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


def echo(text: str, label: str = "", style: str = "") -> None:
    """Print one line to the terminal: a coloured ``label``, then ``text`` as it is."""
    console.print(Text.assemble((label, style), text), soft_wrap=True)


def print_rows(rows: Iterable[tuple[str, str]]) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    for subject, words in rows:
        table.add_row(Text(subject, "bold"), words)
    Terminal().print(table)
