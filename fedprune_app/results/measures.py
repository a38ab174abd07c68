"""Every number that a run reports is declared here, once: :data:`MEASURES`.

A new number costs two places: the client puts it into its reply under the name of its :class:`Measure`, and the
measure says here

* in which replies it is and between which bounds, so that the server checks it;
* whether each client's number is recorded in clients.jsonl;
* how the numbers of all clients become columns of rounds.jsonl;
* how such a column is shown: in the final table, in a figure, and in the line that tells of a round.

A number that the server itself counts or measures is a :class:`Column` alone. The order of the declarations is the
order of the columns in both files. All numbers are shares in [0, 1], bytes, seconds or counts, and null where they were
not measured. A plug-in declares its own numbers by ``results/own_measures.py``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, partial
from typing import Any, Literal

from fedprune_app.core import metrics
from fedprune_app.core.bounds import LARGEST_SAID, bounded
from fedprune_app.results.texts import own_models, tested_on

Row = Mapping[str, Any]
Take = Callable[[Sequence[float]], float | None]
Remark = Callable[[Sequence[Row], str], str]
"""A remark says in a word or two what a reader of a column's numbers must know; it is empty where there is nothing.

It is made of rows and of the column's name. The rows are one, or the last ones of several runs whose numbers are shown
as their mean."""
LAST = 1000
"""The place of what is shown after all else."""
MEGABYTE = 1e6
"""Bytes of a megabyte, as the papers count."""
MOST_CLASSES = 1000
"""Accuracies by class are recorded of so many classes at most."""


class Reply(Enum):
    """A kind of reply says which numbers a client tells in it."""

    TRAINING = "after training"
    EVALUATION = "after an evaluation on images"
    LAYER = "after one layer of a language model was pruned"
    PERPLEXITY = "after an evaluation on text"
    PRIVACY = "any reply of a private run, beside its own numbers"

    @property
    def is_evaluation(self) -> bool:
        """The replies of an evaluation end a round, so that their numbers are the round's."""
        return self in (Reply.EVALUATION, Reply.PERPLEXITY)


class Kind(Enum):
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


# --- over clients -----------------------------------------------------------------------------------------------


def mean(values: Sequence[float]) -> float:
    """Return the mean, which counts each client once; NaN for no values."""
    return metrics.summary(values).mean


def spread(values: Sequence[float]) -> float:
    """Return the population's standard deviation; NaN for no values."""
    return metrics.summary(values).std


def lowest_tenth(values: Sequence[float]) -> float:
    """Return the mean of the lowest ⌈n / 10⌉ of n values; NaN for no values."""
    return metrics.worst_decile(values)


def running_mean(values: Sequence[float]) -> float | None:
    """Return the mean by adding the values from the first to the last; None for no values.

    It may differ from :func:`mean` in the last bit, so a column stays with the one that it had first.
    """
    return sum(values) / len(values) if values else None


def number(values: Sequence[float]) -> float | None:
    return len(values) or None


def largest(values: Sequence[float]) -> float | None:
    return max(values, default=None)


def noise_of_mean(deviations: Sequence[float]) -> float | None:
    """Return the standard deviation of the noise in a mean of numbers with these independent ones; None for none."""
    return math.hypot(*deviations) / len(deviations) if deviations else None


def noise_remark(rows: Sequence[Row], column: str) -> str:
    """Say which epsilons are simulated: who knows the seed can subtract noise that derives from it."""
    said = {None: "noise unknown", 0: "", 1: "simulated"}
    return _of_each(said.get(row.get("epsilon_simulated"), "partly simulated") for row in rows)


def accuracy_remark(rows: Sequence[Row], column: str) -> str:
    """Give the standard deviation of the noise in a mean of accuracies that clients tell with noise."""
    found = ((row.get("noise_by_column") or {}).get(column, row.get("accuracy_noise")) for row in rows)
    noises = [noise for noise in found if noise is not None]
    noise = noise_of_mean(noises)
    return "" if noise is None else _of_some(f"noise ± {100 * noise:.1f}", len(noises), len(rows))


def noised_remark(rows: Sequence[Row], column: str) -> str:
    """Say that a number is made of noised accuracies, whose noise moves it in one direction."""
    return _of_each("" if row.get("accuracy_noise") is None else "of noised accuracies" for row in rows)


def fewer_remark(rows: Sequence[Row], column: str, counted: str = "evaluated") -> str:
    """Say over how many clients a mean is, where they are fewer than the run has.

    ``counted`` names the column of their number, where no column ``clients_by_column`` tells it.
    """

    def said(row: Row) -> str:
        few, clients = (row.get("clients_by_column") or {}).get(column, row.get(counted)), row.get("clients")
        return "" if few is None or clients is None or few >= clients else f"{few:.0f} of {clients:.0f} clients"

    return _of_each(map(said, rows))


def _both(*remarks: Remark) -> Remark:
    """Several remarks on one number stand behind each other."""
    return lambda rows, column: ", ".join(filter(None, (remark(rows, column) for remark in remarks)))


def _of_each(texts: Iterable[str]) -> str:
    """Where rows differ, each text stands with the number of runs that have it."""
    found = Counter(texts)
    return ", ".join(_of_some(text, count, found.total()) for text, count in sorted(found.items()) if text)


def _of_some(text: str, count: int, total: int) -> str:
    return text if count == total else f"{text}: {count} of {total} runs"


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

    ``log`` names it in the log. ``terminal`` names it beside the progress bar, and may depend on the round; a column
    without that name does not stand there. The number is multiplied by ``scale``, written in the ``format`` and
    followed by ``unit``. A number that was measured ``on_a_text`` is followed by that text.
    """

    log: str
    terminal: str | Callable[[int], str] = ""
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

    ``take`` makes it of the clients' numbers, where it belongs to a :class:`Measure`; a column without it is put
    together by the code that measures the number. A run may be judged by a column that ``is_headline``. ``view`` titles
    its view of the figures of accuracy. A column with ``lost`` counts replies that were lost, and stands under that
    title in the report's table of them. The ``remark`` on rows stands in parentheses wherever people read their number.
    A column that ``is_noised_mean`` is a mean over clients of accuracies whose noise they tell: of those on test data.
    """

    name: str
    take: Take | None = None
    recorded: Recorded = Recorded.ALWAYS
    kind: Kind = Kind.NUMBER
    is_headline: bool = False
    table: InTable | None = None
    view: Title | None = None
    curve: Curve | None = None
    line: InLine | None = None
    lost: Title | None = None
    remark: Remark | None = None
    is_noised_mean: bool = False

    def remarked(self, *rows: Row) -> str:
        """Return the remark on those of the rows that have a number, ready to stand behind the number, or empty."""
        told = [row for row in rows if row.get(self.name) is not None]
        remark = self.remark(told, self.name) if self.remark else ""
        return f" ({remark})" if remark else ""


@dataclass(frozen=True)
class Measure:
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
    required: frozenset[Reply] = frozenset()
    optional: frozenset[Reply] = frozenset()
    least: float = -LARGEST_SAID
    most: float = LARGEST_SAID
    is_count: bool = False
    withheld: bool = False
    may_be_noised: bool = False
    by: Literal["", "layer", "class"] = ""
    recorded: Recorded = Recorded.ALWAYS
    kind: Kind = Kind.NUMBER
    view: Title | None = None
    columns: tuple[Column, ...] = ()

    @property
    def wire_name(self) -> str:
        """The number's field in a reply has the number's name with dashes, unless the declaration says another."""
        return self.field or self.name.replace("_", "-")

    @property
    def replies(self) -> frozenset[Reply]:
        """These kinds of reply may tell the number."""
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

    def found(self, fields: Row, reply: Reply, names: Mapping[str, Iterable[str]], private: bool = False) -> Any:
        """Return what a reply of this kind tells: one number, or numbers by name, or None if it is optional there.

        ``names`` says which layers and classes there are.
        """
        if self.by:
            told = (name for name in names.get(self.by, ()) if f"{self.wire_name}/{name}" in fields)
            return {name: self.of(fields, about=name, private=private) for name in told} or None
        return self.of(fields, private=private) if reply in self.required or self.wire_name in fields else None


class Measures(tuple[Measure | Column, ...]):
    """All declarations together say what the files, tables and figures hold."""

    @cached_property
    def of_clients(self) -> dict[str, Measure]:
        """The numbers of a client are listed by name."""
        return {each.name: each for each in self if isinstance(each, Measure)}

    @cached_property
    def columns(self) -> dict[str, Column]:
        """The columns of rounds.jsonl are listed by name."""
        found = (each.columns if isinstance(each, Measure) else (each,) for each in self)
        return {column.name: column for columns in found for column in columns}

    @cached_property
    def round_fields(self) -> tuple[str, ...]:
        """Every row of rounds.jsonl has these fields."""
        return tuple(name for name, each in self.columns.items() if each.recorded is Recorded.ALWAYS)

    @cached_property
    def client_fields(self) -> tuple[str, ...]:
        """Every row of clients.jsonl has these fields."""
        own = (name for name, each in self.of_clients.items() if each.recorded is Recorded.ALWAYS)
        return ("round", "partition", *own)

    @cached_property
    def of_the_round_alone(self) -> frozenset[str]:
        """These numbers of clients are not in clients.jsonl, but only in what the round makes of them."""
        return frozenset(name for name, each in self.of_clients.items() if each.recorded is Recorded.NEVER)

    @cached_property
    def headlines(self) -> tuple[str, ...]:
        """A run may be judged by one of these columns; the first is the usual one."""
        return tuple(name for name, each in self.columns.items() if each.is_headline)

    @cached_property
    def losses(self) -> dict[str, str]:
        """The columns that count lost replies have these titles, in their order."""
        found = [(each.lost, name) for name, each in self.columns.items() if each.lost]
        return {name: title.text for title, name in sorted(found, key=lambda each: each[0].place)}

    @cached_property
    def kinds(self) -> dict[Kind, frozenset[str]]:
        """The fields of both files are grouped by what they hold."""
        own = ((each.name, each.kind) for each in self.of_clients.values() if each.recorded is not Recorded.NEVER)
        found = {("partition", Kind.NUMBER), *own, *((each.name, each.kind) for each in self.columns.values())}
        return {kind: frozenset(name for name, its in found if its is kind) for kind in Kind}

    @cached_property
    def lines(self) -> tuple[tuple[Column, InLine, bool], ...]:
        """These columns stand in the line that tells of a round, each with whether training tells the number."""
        trained = {
            column.name
            for each in self.of_clients.values()
            if each.replies and not each.is_evaluated
            for column in each.columns
        }
        return tuple((each, each.line, each.name in trained) for each in self.columns.values() if each.line)

    def told_in(self, reply: Reply) -> list[Measure]:
        """Return the numbers that a reply of this kind may tell."""
        return [each for each in self.of_clients.values() if reply in each.replies]


_TRAINING, _EVALUATION = frozenset({Reply.TRAINING}), frozenset({Reply.EVALUATION})
_LAYER, _PERPLEXITY, _PRIVACY = frozenset({Reply.LAYER}), frozenset({Reply.PERPLEXITY}), frozenset({Reply.PRIVACY})
_WHERE_MEASURED, _NEVER = Recorded.WHERE_MEASURED, Recorded.NEVER


def _megabytes(key: str, title: str, of_rounds: Literal["total", "mean"], place: int) -> InTable:
    decimals = 2 if of_rounds == "total" else 3
    return InTable(key, title, decimals, 1 / MEGABYTE, of_rounds, is_cost=True, place=place)


def _epsilon(name: str, table: InTable, line: InLine | None = None) -> Measure:
    """Declare an ε: the round has the largest of all clients, with a remark where noise derives from the seed."""
    column = Column(f"{name}_max", largest, table=table, line=line, remark=noise_remark)
    return Measure(name, optional=_PRIVACY, least=0, columns=(column,))


MEASURES = Measures(
    (
        Column("round"),
        Column("seconds"),
        # clients that trained and whose reply was used
        Column("replies"),
        Column("failures", lost=Title("Failures", 10)),
        Column("stragglers", lost=Title("Stragglers", 20)),
        # sampled clients that dropped out of the round
        Column("dropped", lost=Title("Dropped out", 40)),
        # training messages, as serialised
        Column("bytes_up", table=_megabytes("megabytes_up", "MB up", "total", 10)),
        Column("bytes_down", table=_megabytes("megabytes_down", "MB down", "total", 20)),
        Column("evaluation_bytes_up"),
        Column("evaluation_bytes_down"),
        # what all clients sent one another; null in a star
        Column("peer_bytes", table=_megabytes("peer_megabytes", "MB, peer to peer", "total", 40)),
        # heavier direction of the busiest node: a star's server, else a client
        Column("busiest_node_bytes", table=_megabytes("busiest_megabytes", "Busiest node, MB/round", "mean", 50)),
        # heavier direction of a client, mean over those that took part
        Column("node_bytes_mean", table=_megabytes("node_megabytes", "Per node, MB/round", "mean", 70)),
        # what the paper's own formula charges for the round, and for its busiest node in one direction
        Column("paper_bytes_up"),
        Column("paper_bytes_down"),
        Column(
            "paper_busiest_bytes",
            table=_megabytes("paper_busiest_megabytes", "Busiest node, MB/round, paper's formula", "mean", 60),
        ),
        Measure("num_examples", least=1, is_count=True),
        Measure(
            "accuracy_personal",
            optional=_EVALUATION,
            least=0,
            most=1,
            may_be_noised=True,
            view=Title("Personal", 10),
            columns=(
                Column(
                    "accuracy_personal_mean",
                    mean,
                    is_headline=True,
                    table=InTable("personal_accuracy", "Personal (%)", 2, 100, place=5),
                    view=Title("Personal", 10),
                    line=InLine("personal accuracy", "personal", ".1f", 100, " %"),
                    remark=_both(accuracy_remark, fewer_remark),
                    is_noised_mean=True,
                ),
                Column("accuracy_personal_std", spread, remark=noised_remark),
                Column(
                    "accuracy_personal_worst_decile",
                    lowest_tenth,
                    table=InTable("worst_decile", "Personal, worst decile (%)", 2, 100, place=30),
                    view=Title("Worst decile", 40),
                    remark=_both(noised_remark, fewer_remark),
                ),
            ),
        ),
        # of clients that were held out, after they joined
        Measure(
            "accuracy_newcomer",
            least=0,
            most=1,
            may_be_noised=True,
            recorded=_WHERE_MEASURED,
            columns=(
                Column(
                    "accuracy_newcomer_mean",
                    recorded=_WHERE_MEASURED,
                    table=InTable("newcomer_accuracy", "New clients (%)", 2, 100, place=29),
                    remark=noised_remark,
                ),
            ),
        ),
        # tested before training, in the training reply or by the evaluation
        Measure(
            "accuracy_received",
            optional=_TRAINING | _EVALUATION,
            least=0,
            most=1,
            may_be_noised=True,
            view=Title("Received", 30),
            columns=(
                Column(
                    "accuracy_received_mean",
                    mean,
                    table=InTable("received_accuracy", "Received (%)", 2, 100, place=28),
                    view=Title("Received", 30),
                    remark=_both(accuracy_remark, partial(fewer_remark, counted="accuracy_received_clients")),
                    is_noised_mean=True,
                ),
                # where models go from peer to peer, clients receive one in the rounds alone in which they train
                Column("accuracy_received_clients", number, recorded=_WHERE_MEASURED),
            ),
        ),
        Measure(
            "accuracy_validation",
            optional=_EVALUATION,
            least=0,
            most=1,
            may_be_noised=True,
            columns=(
                Column(
                    "accuracy_validation_mean",
                    mean,
                    view=Title("Validation", 50),
                    remark=fewer_remark,
                ),
            ),
        ),
        Measure(
            "accuracy_global",
            optional=_EVALUATION,
            least=0,
            most=1,
            may_be_noised=True,
            recorded=_WHERE_MEASURED,
            view=Title("Global model", 20),
            columns=(
                Column(
                    "accuracy_global",
                    mean,
                    is_headline=True,
                    table=InTable("global_accuracy", "Global model (%)", 2, 100, place=40),
                    view=Title("Global model", 20),
                    line=InLine("global accuracy", "global", ".1f", 100, " %"),
                    remark=_both(accuracy_remark, fewer_remark),
                    is_noised_mean=True,
                ),
            ),
        ),
        # standard deviation of the noise in each of the client's accuracies on test data
        Measure(
            "accuracy_noise",
            optional=_EVALUATION,
            least=0,
            recorded=_WHERE_MEASURED,
            columns=(Column("accuracy_noise", noise_of_mean, recorded=_WHERE_MEASURED),),
        ),
        # by column, where a number is of fewer clients than were evaluated: of how many, and the noise in their mean
        Column("clients_by_column", recorded=_WHERE_MEASURED, kind=Kind.BY_NAME),
        Column("noise_by_column", recorded=_WHERE_MEASURED, kind=Kind.BY_NAME),
        # of the personal model, on the client's test examples of each class, by the class's number
        Measure(
            "accuracy_by_class",
            "accuracy-of-class",
            optional=_EVALUATION,
            least=0,
            most=1,
            withheld=True,
            by="class",
            recorded=_WHERE_MEASURED,
            kind=Kind.BY_NAME,
            columns=(Column("accuracy_by_class", running_mean, recorded=_WHERE_MEASURED, kind=Kind.BY_NAME),),
        ),
        # language models: on the run's first test text, others are in perplexity_by_text
        Measure(
            "perplexity_personal",
            columns=(
                Column(
                    "perplexity_personal_mean",
                    line=InLine("personal perplexity", own_models, on_a_text=True),
                    remark=partial(fewer_remark, counted="personal_models"),
                ),
                Column("perplexity_personal_std"),
            ),
        ),
        # over how many clients these are: those whose own model has every layer pruned
        Column("personal_models"),
        Column(
            "perplexity_global",
            is_headline=True,
            table=InTable("perplexity", "Perplexity, global model", place=50),
            line=InLine("global perplexity", "global", on_a_text=True),
        ),
        # layers of the client's own language model that it has pruned
        Measure("pruned_layers", least=0, is_count=True),
        # FedSpaLLM's loss is the mean relative error of the layers that were pruned
        Measure(
            "loss",
            required=_TRAINING,
            withheld=True,
            recorded=_WHERE_MEASURED,
            columns=(
                Column(
                    "loss_mean",
                    running_mean,
                    curve=Curve(
                        "loss", "Training loss", "Mean over the clients that trained in the round.", "Loss", place=20
                    ),
                    line=InLine("loss", format=".3f"),
                ),
            ),
        ),
        Measure(
            "density",
            required=_TRAINING | _EVALUATION | _LAYER | _PERPLEXITY,
            least=0,
            most=1,
            columns=(
                Column(
                    "density_mean",
                    mean,
                    table=InTable("density", "Density, whole model", 3, place=80),
                    curve=Curve(
                        "density",
                        "Density of the whole model by round",
                        "Kept share of all tensors, mean over clients.",
                        "Density",
                        is_share=True,
                        place=10,
                    ),
                    line=InLine("density", "density", ".3f"),
                ),
            ),
        ),
        # share of convolution channels left; null where none are removed
        Measure(
            "channel_density",
            optional=_EVALUATION,
            least=0,
            most=1,
            columns=(
                Column("channel_density_mean", mean, table=InTable("channel_density", "Channels left", 3, place=90)),
            ),
        ),
        # one example's forward pass through the personal model, each layer times its density
        Measure(
            "inference_flops",
            required=_EVALUATION,
            least=0,
            columns=(
                Column(
                    "inference_flops_mean",
                    mean,
                    table=InTable("inference_megaflops", "MFLOPs per prediction", 3, 1e-6, is_cost=True, place=90),
                ),
            ),
        ),
        # of the global model's prunable weights, where it is pruned, and before the server expanded its masks
        Column("density_global", table=InTable("global_density", "Density, pruned matrices", 3, place=100)),
        Column(
            "density_before_expansion",
            table=InTable("union_density", "Density, pruned matrices before expansion", 3, place=110),
        ),
        Measure(
            "density_by_layer",
            "density",
            optional=_EVALUATION,
            least=0,
            most=1,
            by="layer",
            recorded=_WHERE_MEASURED,
            kind=Kind.BY_NAME,
            columns=(Column("density_by_layer", running_mean, kind=Kind.BY_NAME),),
        ),
        Measure("flops", required=_TRAINING, least=0, recorded=_WHERE_MEASURED, columns=(Column("flops", sum),)),
        Measure("bytes_up"),
        Measure("bytes_down"),
        # what each client has spent of its privacy so far; null without dp.enabled
        _epsilon("epsilon", InTable("epsilon", "ε", place=120), InLine("epsilon", "ε", format=".3g")),
        # the same by each accountant: privacy loss distributions and Rényi divergences
        _epsilon("epsilon_pld", InTable("pld_epsilon", "ε by PLD", place=122)),
        _epsilon("epsilon_rdp", InTable("rdp_epsilon", "ε by RDP", place=124), InLine("epsilon by RDP", format=".3g")),
        # epsilon at dp.second-delta
        _epsilon("epsilon_second", InTable("second_epsilon", "ε at the second δ", place=130)),
        # Fed-LTP's printed formula, which is no guarantee
        _epsilon("epsilon_paper", InTable("paper_epsilon", "ε, Fed-LTP's formula", 3, place=140)),
        # 1 where the client's noise derives from the run's seed, 0 where it comes from the operating system
        Measure(
            "epsilon_simulated",
            optional=_PRIVACY,
            least=0,
            most=1,
            is_count=True,
            recorded=_WHERE_MEASURED,
            columns=(Column("epsilon_simulated", mean, recorded=_WHERE_MEASURED),),
        ),
        # of a client's work; how long the work takes may depend on the data
        Measure("seconds", required=_TRAINING | _LAYER, least=0, withheld=True),
        # Fed-LTP: (noised) share of correct predictions that the round is judged by, and clients that told a score
        Column("validation_score"),
        Column("validations"),
        # within bytes_up and bytes_down
        Column("validation_bytes_up"),
        Column("validation_bytes_down"),
        # by validation_score, so far: the round whose model is evaluated, and final
        Column("best_round"),
        # clients that take part no more, because their privacy budget would not bear it
        Column("budgets_spent"),
        Column("failure_reasons", recorded=_WHERE_MEASURED, kind=Kind.TEXTS),
        # FedSpaLLM: what was measured of each decoder layer, by its number
        Column("layers", recorded=_WHERE_MEASURED, kind=Kind.TABLE),
        Column("evaluated", recorded=_WHERE_MEASURED),  # clients, see evaluate-clients
        Column("clients", recorded=_WHERE_MEASURED),  # of the run
        Column("evaluation_failures", recorded=_WHERE_MEASURED, lost=Title("Evaluation failures", 30)),
        Column("perplexity_by_text", recorded=_WHERE_MEASURED, kind=Kind.TABLE),
        # zero-shot, by task: of the dense model and of the global one
        Column("accuracy_by_task", recorded=_WHERE_MEASURED, kind=Kind.TABLE),
        Column("evaluation_seconds", recorded=_WHERE_MEASURED),
        Column("notes", recorded=_WHERE_MEASURED, kind=Kind.TEXTS),
        # how far a layer's output is from the dense layer's; told by those that prune it
        Measure("relative_error", least=0, recorded=_NEVER),
        Measure("layers_pruned", recorded=_WHERE_MEASURED),
        # mean cross entropy of the next token, in nats, over the steps of a round of recovery
        Measure(
            "recovery_loss",
            least=0,
            recorded=_WHERE_MEASURED,
            columns=(Column("recovery_loss", mean, recorded=_WHERE_MEASURED),),
        ),
        Measure("perplexity", least=0, recorded=_WHERE_MEASURED, kind=Kind.BY_NAME),
        # of a client's own text
        Measure("windows", least=1, most=2**31, is_count=True, recorded=_WHERE_MEASURED),
        Measure("windows_in_text", least=1, most=2**31, is_count=True, recorded=_WHERE_MEASURED),
    )
)
"""All numbers that are reported, in the order in which they are recorded."""


# --- what the server does with a reply --------------------------------------------------------------------------


def told(name: str, fields: Row, *, about: str | None = None, most: float | None = None) -> float:
    """Return the number ``name`` from the fields of a reply, checked as :meth:`Measure.of` says."""
    return MEASURES.of_clients[name].of(fields, about=about, most=most)


def row_of(
    reply: Reply,
    fields: Row,
    *,
    private: bool = False,
    layers: Iterable[str] = (),
    num_classes: int = 0,
    declared: Measures | None = None,
) -> dict[str, Any]:
    """Return the numbers of this kind of reply by name, each checked.

    An optional number that is not told is None. In a ``private`` run what is withheld is None whatever the reply says.
    Numbers by layer are asked of ``layers`` alone, and numbers by class of so many classes. ``declared`` are all
    numbers that there are, by default fedprune's own. ``ValueError`` names the first field that is missing or out of
    bounds.
    """
    names = {"layer": sorted(layers), "class": [str(number) for number in range(min(num_classes, MOST_CLASSES))]}
    return {
        each.name: None if private and each.withheld else each.found(fields, reply, names, private)
        for each in (declared or MEASURES).told_in(reply)
    }


def from_training(row: Row, trained: Row) -> dict[str, Any]:
    """Return the numbers that the ``row`` of an evaluation lacks and the training of the round told."""
    both = (name for name, each in MEASURES.of_clients.items() if _is_of_either(each))
    return {name: trained.get(name) for name in both if row[name] is None}


def _is_of_either(each: Measure) -> bool:
    return {Reply.TRAINING, Reply.EVALUATION} <= each.replies


def recorded_of_client(row: Row) -> dict[str, Any]:
    """Clients.jsonl records these fields of a row: no number of the round alone, and no object that was not told."""
    left_out = MEASURES.of_the_round_alone
    objects = MEASURES.kinds[Kind.BY_NAME]
    return {
        name: value for name, value in row.items() if name not in left_out and not (value is None and name in objects)
    }


def over_clients(
    rows: Iterable[Row], reply: Reply, others: Sequence[Row] = (), declared: Measures | None = None
) -> dict[str, Any]:
    """Return the columns of a round, by name, that the clients' rows of one kind of reply make.

    A client that lacks a number is left out of its columns. Numbers by layer or class become a column of numbers by
    name, in the order in which the clients tell of the names. ``others`` are the training rows of clients that were not
    evaluated in the round: what either reply may tell is taken over them, too. ``declared`` are all numbers that there
    are, by default fedprune's own.
    """
    rows = list(rows)
    found: dict[str, Any] = {}
    for each in (declared or MEASURES).told_in(reply):
        if each.is_evaluated and not reply.is_evaluation:
            continue
        values = [row[each.name] for row in _telling(each, rows, others)]
        for column in each.columns:
            if column.take is not None:
                found[column.name] = _by_name(values, column.take) if each.by else column.take(values)
    return found | (_of_fewer(rows, others) if reply is Reply.EVALUATION else {})


def _telling(each: Measure, rows: Sequence[Row], others: Sequence[Row]) -> list[Row]:
    asked = (*rows, *others) if _is_of_either(each) else rows
    return [row for row in asked if row.get(each.name) is not None]


def _of_fewer(rows: Sequence[Row], others: Sequence[Row]) -> dict[str, Any]:
    """Return two columns, with an entry for each column of accuracies that some of the clients did not tell.

    One says how many clients told the number. The other has the noise in their mean, where they told how much of it is
    noise: a client whose privacy budget is spent tells no accuracy, and a client without test images has none.
    """
    clients: dict[str, float] = {}
    noises: dict[str, float | None] = {}
    for each in (each for each in MEASURES.told_in(Reply.EVALUATION) if each.may_be_noised):
        telling = _telling(each, rows, others)
        if len(telling) not in (0, len(rows)):
            clients |= {column.name: len(telling) for column in each.columns if column.remark}
            if found := [row["accuracy_noise"] for row in telling if row.get("accuracy_noise") is not None]:
                noises |= {column.name: noise_of_mean(found) for column in each.columns if column.is_noised_mean}
    told = {"clients_by_column": clients, "noise_by_column": noises}
    return {name: found for name, found in told.items() if found}


def _by_name(rows: Iterable[Mapping[str, float]], take: Take) -> dict[str, float | None]:
    values: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            values.setdefault(name, []).append(value)
    return {name: take(of_name) for name, of_name in values.items()}


# --- the line that tells of a round -----------------------------------------------------------------------------


def summary_line(row: Row, declared: Measures | None = None) -> str:
    """Return the log's line on a round: replies, what training told, what it cost, what the evaluation told.

    ``declared`` are all numbers that there are, by default fedprune's own.
    """

    def words(of_training: bool) -> list[str]:
        lines = (declared or MEASURES).lines
        of_kind = [(column, line) for column, line, trained in lines if trained == of_training]
        shown = [(column, line, row.get(column.name)) for column, line in of_kind]
        return [
            f"{line.log} {line.number(value)}{column.remarked(row)}"
            + (f" ({tested_on(row)})" if line.on_a_text else "")
            for column, line, value in shown
            if value is not None and not math.isnan(value)
        ]

    traffic = f"{(row['bytes_up'] + row['bytes_down']) / MEGABYTE:.2f} MB"
    cost = [traffic, f"{row['seconds']:.1f} s"]
    return ", ".join([f"{row['replies']} replies", f"{row['failures']} failures", *words(True), *cost, *words(False)])


def progress_line(row: Row) -> str:
    """Return the numbers of a row of rounds.jsonl that the progress bar shows; empty if it has none of them."""
    shown = []
    for column, line, _ in MEASURES.lines:
        if line.terminal and row.get(column.name) is not None:
            name = line.terminal if isinstance(line.terminal, str) else line.terminal(row["round"])
            shown.append(f"{name} {line.number(row[column.name])}{column.remarked(row)}  ")
    return "".join([*shown, f"({text})  " if (text := tested_on(row)) else ""])
