"""How metrics are declared: :class:`ClientMetric` and :class:`Column`, listed in ``results/declarations.py``.

A new metric needs two places: the client puts it into its reply under the name of its :class:`ClientMetric`, and its
declaration has

* the replies that have it and its bounds, by which the server checks it;
* whether each client's number is recorded in clients.jsonl;
* how the numbers of all clients become columns of rounds.jsonl;
* how such a column is shown: in the final table, in a figure, and in the line about a round.

A number that the server itself counts or measures is only a :class:`Column`. The order of the declarations is the
order of the columns in both files. All numbers are shares in [0, 1], bytes, seconds or counts, and null if they were
not measured. A plug-in declares its own metrics by ``results/system_metrics.py``.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any, Literal

from fedprune_app.core.bounds import LARGEST_NUMBER, bounded
from fedprune_app.core.named import Values

Row = Values
Take = Callable[[Sequence[float]], float | None]
# Returns a word or two that a reader of a number has to know, or an empty text, from rows and the column's name. The
# rows are one, or the last ones of several runs whose mean is shown.
Footnote = Callable[[Sequence[Row], str], str]
# The place of entries that are shown last.
LAST = 1000
# Bytes of a megabyte, as the papers count.
MEGABYTE = 1e6


class ReplyKind(Enum):
    """The occasion of a reply, which determines the metrics in it."""

    TRAINING = "after training"
    EVALUATION = "after an evaluation on images"
    LAYER = "after one layer of a language model was pruned"
    PERPLEXITY = "after an evaluation on text"
    ANSWER = "to a question within a round"
    PRIVACY = "any reply of a private run, beside its own numbers"

    @property
    def is_evaluation(self) -> bool:
        """Whether the replies are those of an evaluation, which ends a round."""
        return self in (ReplyKind.EVALUATION, ReplyKind.PERPLEXITY)


class FieldKind(Enum):
    """The JSON type of a field in rounds.jsonl or clients.jsonl."""

    NUMBER = "a number"
    BY_NAME = "an object of numbers"
    TABLE = "an object of objects of numbers"
    TEXTS = "a list of texts"


class Recorded(Enum):
    """Which rows of its file have a field."""

    ALWAYS = "in every row, null where it was not measured"
    WHERE_MEASURED = "in those rows alone whose replies tell it"
    NEVER = "in no row"


# --- how a column is shown --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class InTable:
    """How the final table shows a column, as one number for a whole run.

    ``key`` is its name in table.csv. ``of_rounds`` is how the numbers of all rounds become one. It is multiplied by
    ``scale`` and shown with ``decimals``. Costs have a table of their own. ``place`` orders the titles.
    """

    key: str
    title: str
    decimals: int = 2
    scale: float = 1.0
    of_rounds: Literal["last", "total", "mean"] = "last"
    is_cost: bool = False
    place: int = 500


@dataclass(frozen=True)
class Title:
    """The text above a view or loss; titles are ordered by ``place``."""

    text: str
    place: int = LAST


@dataclass(frozen=True)
class Curve:
    """A figure that shows only this column, by round.

    ``view`` names the number. With ``is_share`` the axis is in percent. ``place`` orders such figures.
    """

    key: str
    title: str
    caption: str
    view: str
    is_share: bool = False
    place: int = LAST


@dataclass(frozen=True)
class InLine:
    """How the line about a round shows a column.

    ``log`` is its name in the log, ``terminal`` that beside the progress bar; without ``terminal`` it is not shown
    there. The number is multiplied by ``scale``, written in ``format`` and followed by ``unit``. With ``on_a_text`` the
    test text follows.
    """

    log: str
    terminal: str = ""
    format: str = ".2f"
    scale: float = 1.0
    unit: str = ""
    on_a_text: bool = False

    def number(self, value: float) -> str:
        return f"{value * self.scale:{self.format}}{self.unit}"


# --- declarations -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    """Declares one number per round, a column of rounds.jsonl.

    ``take`` computes it from the clients' numbers, if it belongs to a :class:`ClientMetric`; other columns are computed
    by the code that measures them. A run may be judged by a column that ``is_headline``. ``view`` is its title in the
    figures of accuracy. A column with ``lost`` counts lost replies, under that title in the report's table. The
    ``footnote`` on rows is shown in parentheses after their number. A column that ``is_noised_mean`` is a mean over
    clients of test accuracies whose noise is reported. One that ``needs_open`` is not computed from noised numbers,
    whose noise would dominate their spread.
    """

    name: str
    take: Take | None = None
    recorded: Recorded = Recorded.ALWAYS
    kind: FieldKind = FieldKind.NUMBER
    is_headline: bool = False
    table: InTable | None = None
    view: Title | None = None
    curve: Curve | None = None
    line: InLine | None = None
    lost: Title | None = None
    footnote: Footnote | None = None
    is_noised_mean: bool = False
    needs_open: bool = False

    def remarked(self, *rows: Row) -> str:
        """Return the footnote on the rows that have a number, in parentheses after a space, or an empty text."""
        measured_rows = [row for row in rows if row.get(self.name) is not None]
        footnote = self.footnote(measured_rows, self.name) if self.footnote else ""
        return f" ({footnote})" if footnote else ""


@dataclass(frozen=True)
class ClientMetric:
    """Declares one number per client and reply, and the columns made from it.

    ``name`` is its column in clients.jsonl, and with dashes its field in a reply, unless ``field`` gives another name.
    It is ``required`` or ``optional`` in these kinds of reply, from ``least`` to ``most``; a count becomes an integer.
    In a private run a ``withheld`` number is ignored, and one that ``may_be_noised`` may exceed the bounds by 1. A
    number ``by`` layer or class has several fields, as ``field/layer``. ``view`` is its title in the figure of all
    clients.

    The ``columns`` are over the replies of an evaluation if these have the number, else over those of training.
    """

    name: str
    field: str = ""
    required: frozenset[ReplyKind] = frozenset()
    optional: frozenset[ReplyKind] = frozenset()
    least: float = -LARGEST_NUMBER
    most: float = LARGEST_NUMBER
    is_count: bool = False
    withheld: bool = False
    may_be_noised: bool = False
    by: Literal["", "layer", "class"] = ""
    recorded: Recorded = Recorded.ALWAYS
    kind: FieldKind = FieldKind.NUMBER
    view: Title | None = None
    columns: tuple[Column, ...] = ()

    @property
    def wire_name(self) -> str:
        """The name of its field in a reply: ``field``, or else ``name`` with dashes."""
        return self.field or self.name.replace("_", "-")

    @property
    def replies(self) -> frozenset[ReplyKind]:
        return self.required | self.optional

    @property
    def is_evaluated(self) -> bool:
        """Whether replies of an evaluation may have the number; its columns are then over these."""
        return any(reply.is_evaluation for reply in self.replies)

    def of(self, fields: Row, *, about: str | None = None, most: float | None = None, private: bool = False) -> float:
        """Return the number from the fields of a reply, checked.

        With ``about`` it is the number of that layer or text. ``most`` replaces the declared bound. Raises
        ``ValueError`` that names a field that is missing or out of bounds.
        """
        name = self.wire_name if about is None else f"{self.wire_name}/{about}"
        beyond = 1.0 if private and self.may_be_noised else 0.0
        least, most = self.least - beyond, (self.most if most is None else most) + beyond
        value = bounded(fields.get(name), f"field '{name}'", least, most)
        return int(value) if self.is_count else value

    def value_in(self, fields: Row, reply: ReplyKind, names: Mapping[str, Iterable[str]], private: bool = False) -> Any:
        """Return the number, or numbers by name, in a reply of this kind; None for a missing optional one.

        ``names`` has the names of all layers and classes.
        """
        if self.by:
            names_in_reply = (name for name in names.get(self.by, ()) if f"{self.wire_name}/{name}" in fields)
            return {name: self.of(fields, about=name, private=private) for name in names_in_reply} or None
        return self.of(fields, private=private) if reply in self.required or self.wire_name in fields else None


class Declarations(tuple[ClientMetric | Column, ...]):
    """All declarations of a run, with the fields, headlines and lines that follow from them."""

    @cached_property
    def of_clients(self) -> dict[str, ClientMetric]:
        return {metric.name: metric for metric in self if isinstance(metric, ClientMetric)}

    @cached_property
    def columns(self) -> dict[str, Column]:
        column_tuples = (entry.columns if isinstance(entry, ClientMetric) else (entry,) for entry in self)
        return {column.name: column for columns in column_tuples for column in columns}

    @cached_property
    def round_fields(self) -> tuple[str, ...]:
        return tuple(name for name, column in self.columns.items() if column.recorded is Recorded.ALWAYS)

    @cached_property
    def client_fields(self) -> tuple[str, ...]:
        own = (name for name, metric in self.of_clients.items() if metric.recorded is Recorded.ALWAYS)
        return ("round", "partition", *own)

    @cached_property
    def headlines(self) -> tuple[str, ...]:
        return tuple(name for name, column in self.columns.items() if column.is_headline)

    @cached_property
    def losses(self) -> dict[str, str]:
        titles = [(column.lost, name) for name, column in self.columns.items() if column.lost]
        return {name: title.text for title, name in sorted(titles, key=lambda pair: pair[0].place)}

    @cached_property
    def kinds(self) -> dict[FieldKind, frozenset[str]]:
        own = (
            (metric.name, metric.kind) for metric in self.of_clients.values() if metric.recorded is not Recorded.NEVER
        )
        pairs = {
            ("partition", FieldKind.NUMBER),
            *own,
            *((column.name, column.kind) for column in self.columns.values()),
        }
        return {kind: frozenset(name for name, field_kind in pairs if field_kind is kind) for kind in FieldKind}

    @cached_property
    def lines(self) -> tuple[tuple[Column, InLine, bool], ...]:
        """The columns in the line about a round, each with whether it comes from training."""
        trained = {
            column.name
            for metric in self.of_clients.values()
            if metric.replies and not metric.is_evaluated
            for column in metric.columns
        }
        return tuple((column, column.line, column.name in trained) for column in self.columns.values() if column.line)

    def in_reply(self, reply: ReplyKind) -> list[ClientMetric]:
        return [metric for metric in self.of_clients.values() if reply in metric.replies]
