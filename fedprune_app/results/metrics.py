"""What a run reports is made of :class:`ClientMetric` and :class:`Column`, listed in ``results/declarations.py``.

A new number costs two places: the client puts it into its reply under the name of its :class:`ClientMetric`, and its
declaration says

* in which replies it is and between which bounds, so that the server checks it;
* whether each client's number is recorded in clients.jsonl;
* how the numbers of all clients become columns of rounds.jsonl;
* how such a column is shown: in the final table, in a figure, and in the line that tells of a round.

A number that the server itself counts or measures is a :class:`Column` alone. The order of the declarations is the
order of the columns in both files. All numbers are shares in [0, 1], bytes, seconds or counts, and null where they were
not measured. A plug-in declares its own numbers by ``results/system_metrics.py``.
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
# A remark says in a word or two what a reader of a column's numbers must know; it is empty where there is nothing.
# It is made of rows and of the column's name. The rows are one, or the last ones of several runs whose numbers are
# shown as their mean.
Footnote = Callable[[Sequence[Row], str], str]
# The place of what is shown after all else.
LAST = 1000
# Bytes of a megabyte, as the papers count.
MEGABYTE = 1e6


class ReplyKind(Enum):
    """A kind of reply says which numbers a client tells in it."""

    TRAINING = "after training"
    EVALUATION = "after an evaluation on images"
    LAYER = "after one layer of a language model was pruned"
    PERPLEXITY = "after an evaluation on text"
    ANSWER = "to a question within a round"
    PRIVACY = "any reply of a private run, beside its own numbers"

    @property
    def is_evaluation(self) -> bool:
        """The replies of an evaluation end a round, so that their numbers are the round's."""
        return self in (ReplyKind.EVALUATION, ReplyKind.PERPLEXITY)


class FieldKind(Enum):
    """A kind of field says what rounds.jsonl or clients.jsonl holds there."""

    NUMBER = "a number"
    BY_NAME = "an object of numbers"
    TABLE = "an object of objects of numbers"
    TEXTS = "a list of texts"


class Recorded(Enum):
    """A field is recorded in every row of its file, in some, or in none."""

    ALWAYS = "in every row, null where it was not measured"
    WHERE_MEASURED = "in those rows alone whose replies tell it"
    NEVER = "in no row"


# --- how a column is shown --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class InTable:
    """A column stands in the final table under a title, with one number for a whole run.

    ``key`` names it in table.csv. ``of_rounds`` says which number of all rounds it is. A number is shown with
    ``decimals`` after it was multiplied by ``scale``. Costs stand in a table of their own. ``place`` orders the titles.
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
    """A title stands among others in the order of their ``place``."""

    text: str
    place: int = LAST


@dataclass(frozen=True)
class Curve:
    """A figure of its own shows a column by round.

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
    """A column stands in the line that tells of a round.

    ``log`` names it in the log. ``terminal`` names it beside the progress bar; a column without that name does not
    stand there. The number is multiplied by ``scale``, written in the ``format`` and
    followed by ``unit``. A number that was measured ``on_a_text`` is followed by that text.
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
    """A column of rounds.jsonl is one number of each round.

    ``take`` makes it of the clients' numbers, where it belongs to a :class:`ClientMetric`; a column without it is put
    together by the code that measures the number. A run may be judged by a column that ``is_headline``. ``view`` titles
    its view of the figures of accuracy. A column with ``lost`` counts replies that were lost, and stands under that
    title in the report's table of them. The ``remark`` on rows stands in parentheses wherever people read their number.
    A column that ``is_noised_mean`` is a mean over clients of accuracies whose noise they tell: of those on test data.
    One that ``needs_open`` numbers is not taken of noised ones: noise alone would spread them.
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
        """Return the remark on those of the rows that have a number, ready to stand behind the number, or empty."""
        measured_rows = [row for row in rows if row.get(self.name) is not None]
        footnote = self.footnote(measured_rows, self.name) if self.footnote else ""
        return f" ({footnote})" if footnote else ""


@dataclass(frozen=True)
class ClientMetric:
    """A measure is one number of each client.

    ``name`` is its column in clients.jsonl, and with dashes its field in a reply; ``field`` is another name for that
    field. The number is ``required`` in some kinds of reply and ``optional`` in others; it lies between ``least`` and
    ``most``. A count is made an integer. A number that is ``withheld`` is not looked at in a private run. One that
    ``may_be_noised`` may lie out of these bounds by 1 in a private run. A number that is told ``by`` layer or class is
    in several fields, as ``field/layer``. ``view`` is its view in the figure of all clients.

    The ``columns`` are taken over the replies of an evaluation if the number is in these, else over those of training.
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
        """The number's field in a reply has the number's name with dashes, unless the declaration says another."""
        return self.field or self.name.replace("_", "-")

    @property
    def replies(self) -> frozenset[ReplyKind]:
        return self.required | self.optional

    @property
    def is_evaluated(self) -> bool:
        """The replies of an evaluation may tell the number, and then its columns are taken over them."""
        return any(reply.is_evaluation for reply in self.replies)

    def of(self, fields: Row, *, about: str | None = None, most: float | None = None, private: bool = False) -> float:
        """Return the number from the fields of a reply, checked.

        With ``about`` the number is the one told of that layer or text. ``most`` takes the place of the declared bound.
        ``ValueError`` names the field that is missing or out of bounds.
        """
        name = self.wire_name if about is None else f"{self.wire_name}/{about}"
        beyond = 1.0 if private and self.may_be_noised else 0.0
        least, most = self.least - beyond, (self.most if most is None else most) + beyond
        value = bounded(fields.get(name), f"field '{name}'", least, most)
        return int(value) if self.is_count else value

    def value_in(self, fields: Row, reply: ReplyKind, names: Mapping[str, Iterable[str]], private: bool = False) -> Any:
        """Return what a reply of this kind tells: one number, or numbers by name, or None if it is optional there.

        ``names`` says which layers and classes there are.
        """
        if self.by:
            names_in_reply = (name for name in names.get(self.by, ()) if f"{self.wire_name}/{name}" in fields)
            return {name: self.of(fields, about=name, private=private) for name in names_in_reply} or None
        return self.of(fields, private=private) if reply in self.required or self.wire_name in fields else None


class Declarations(tuple[ClientMetric | Column, ...]):
    """All declarations together say what the files, tables and figures hold."""

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
        """These columns stand in the line that tells of a round, each with whether training tells the number."""
        trained = {
            column.name
            for metric in self.of_clients.values()
            if metric.replies and not metric.is_evaluated
            for column in metric.columns
        }
        return tuple((column, column.line, column.name in trained) for column in self.columns.values() if column.line)

    def in_reply(self, reply: ReplyKind) -> list[ClientMetric]:
        return [metric for metric in self.of_clients.values() if reply in metric.replies]
