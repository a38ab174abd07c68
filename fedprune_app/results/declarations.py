"""All numbers of a run are declared here, in the order in which they are recorded: :data:`MEASURES`."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property, partial
from typing import Any, Literal, get_args

from fedprune_app.config import ConfigError
from fedprune_app.core.bounds import LARGEST_SAID, bounded
from fedprune_app.results import measures
from fedprune_app.results.measures import (
    MEGABYTE,
    Column,
    Curve,
    InLine,
    InTable,
    Kind,
    Measure,
    Measures,
    Recorded,
    Remark,
    Reply,
    Row,
    Title,
)


def noise_of_mean(deviations: Sequence[float]) -> float | None:
    """Return the standard deviation of the noise in a mean of numbers with these independent ones; None for none."""
    return math.hypot(*deviations) / len(deviations) if deviations else None


def noise_remark(rows: Sequence[Row], column: str) -> str:
    """Say which epsilons are simulated: who knows the seed can subtract noise that derives from it.

    Say also what they protect, where that is no single example.
    """
    words = {None: "noise unknown", 0: "", 1: "simulated"}
    noise = [words.get(row.get("epsilon_simulated"), "partly simulated") for row in rows]
    units = {row.get("protected_unit", "example") for row in rows} - {"example"}
    return _each_once([*(f"per {unit}" for unit in units), *noise])


def accuracy_remark(rows: Sequence[Row], column: str) -> str:
    """Give the standard deviation of the noise in a mean of accuracies that clients tell with noise."""
    deviations = ((row.get("noise_by_column") or {}).get(column, row.get("accuracy_noise")) for row in rows)
    noise = noise_of_mean([0 if deviation is None else deviation for deviation in deviations])
    return f"noise ± {100 * noise:.1f}" if noise else ""


def noised_remark(rows: Sequence[Row], column: str) -> str:
    """Say that a number is made of noised accuracies, whose noise moves it in one direction."""
    return _each_once("" if row.get("accuracy_noise") is None else "of noised accuracies" for row in rows)


def fewer_remark(rows: Sequence[Row], column: str, count_column: str = "evaluated") -> str:
    """Say over how many clients a mean is, where they are fewer than the run has.

    ``count_column`` names the column of their number, where no column ``clients_by_column`` tells it.
    """

    def remark(row: Row) -> str:
        count, clients = (row.get("clients_by_column") or {}).get(column, row.get(count_column)), row.get("clients")
        return "" if count is None or clients is None or count >= clients else f"{count:.0f} of {clients:.0f} clients"

    return _each_once(map(remark, rows))


def both(*remarks: Remark) -> Remark:
    return lambda rows, column: ", ".join(filter(None, (remark(rows, column) for remark in remarks)))


def _each_once(texts: Iterable[str]) -> str:
    return ", ".join(sorted({text for text in texts if text}))


def mean(values: Sequence[float]) -> float:
    """Return the mean, which counts each client once; NaN for no values."""
    return measures.summary(values).mean


def spread(values: Sequence[float]) -> float:
    """Return the population's standard deviation; NaN for no values."""
    return measures.summary(values).std


def running_mean(values: Sequence[float]) -> float | None:
    """Return the mean by adding the values from the first to the last; None for no values.

    It may differ from :func:`mean` in the last bit, so a column stays with the one that it had first.
    """
    return sum(values) / len(values) if values else None


def number(values: Sequence[float]) -> float | None:
    return len(values) or None


def largest(values: Sequence[float]) -> float | None:
    return max(values, default=None)


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
        # bytes that all clients sent one another; null in a star
        Column("peer_bytes", table=_megabytes("peer_megabytes", "MB, peer to peer", "total", 40)),
        # heavier direction of the busiest node: a star's server, else a client
        Column("busiest_node_bytes", table=_megabytes("busiest_megabytes", "Busiest node, MB/round", "mean", 50)),
        # heavier direction of a client, mean over those that took part
        Column("node_bytes_mean", table=_megabytes("node_megabytes", "Per node, MB/round", "mean", 70)),
        # bytes that the paper's own formula charges for the round, and for its busiest node in one direction
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
                    remark=both(accuracy_remark, fewer_remark),
                    is_noised_mean=True,
                ),
                Column("accuracy_personal_std", spread, remark=noised_remark),
                Column(
                    "accuracy_personal_worst_decile",
                    measures.worst_decile,
                    table=InTable("worst_decile", "Personal, worst decile (%)", 2, 100, place=30),
                    view=Title("Worst decile", 40),
                    remark=both(noised_remark, fewer_remark),
                ),
            ),
        ),
        # accuracy of clients that were held out, after they joined
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
        # accuracy after one more local phase of all clients, and what that cost
        Measure(
            "accuracy_last_phase",
            least=0,
            most=1,
            recorded=_WHERE_MEASURED,
            columns=(
                Column(
                    "accuracy_last_phase_mean",
                    recorded=_WHERE_MEASURED,
                    table=InTable("last_phase_accuracy", "After a last phase (%)", 2, 100, place=28),
                    remark=accuracy_remark,
                ),
                *(
                    Column(f"last_phase_{cost}", recorded=_WHERE_MEASURED)
                    for cost in ("bytes_up", "bytes_down", "flops")
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
                    remark=both(accuracy_remark, partial(fewer_remark, count_column="accuracy_received_clients")),
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
                    remark=both(accuracy_remark, fewer_remark),
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
        # by column, where a number is of fewer clients than were evaluated: their count, and the noise in their mean
        Column("clients_by_column", recorded=_WHERE_MEASURED, kind=Kind.BY_NAME),
        Column("noise_by_column", recorded=_WHERE_MEASURED, kind=Kind.BY_NAME),
        # accuracy of the personal model on the client's test examples of each class, by the class's number
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
                    table=InTable("own_perplexity", "Perplexity, clients' own models", place=60),
                    line=InLine("personal perplexity", "clients' own", on_a_text=True),
                    remark=partial(fewer_remark, count_column="personal_models"),
                ),
                Column("perplexity_personal_std"),
            ),
        ),
        # number of clients in these means: those whose own model has every layer pruned
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
        # density of the global model's prunable weights, where it is pruned, and before the server expanded its masks
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
        # ε that each client has spent so far; null without dp.enabled
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
        # seconds of a client's work; how long the work takes may depend on the data
        Measure("seconds", required=_TRAINING | _LAYER, least=0, withheld=True),
        # Fed-LTP: (noised) share of correct predictions that the round is judged by, and clients that told a score
        Column("validation_score"),
        Column("validations"),
        # within bytes_up and bytes_down
        Column("validation_bytes_up"),
        Column("validation_bytes_down"),
        # the best round so far by validation_score: its model is evaluated, and is the final one
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
        # windows of a client's own text
        Measure("windows", least=1, most=2**31, is_count=True, recorded=_WHERE_MEASURED),
        Measure("windows_in_text", least=1, most=2**31, is_count=True, recorded=_WHERE_MEASURED),
    )
)
"""All numbers that are reported, in the order in which they are recorded."""


# --- numbers of plug-ins ----------------------------------------------------------------------------------------------


Told = Literal["training", "evaluation", "server"]
OverRounds = Literal["last", "total", "mean"]
_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


@dataclass(frozen=True)
class OwnMeasure:
    """A number that a plug-in's system reports: ``register_system(..., measures=[...])``.

    A run writes the declarations into its run.json. So a report of the run shows the numbers where the plug-in is not
    installed, and imports no code.

    ``name`` is the number's name in replies and in clients.jsonl. The mean over clients is the column ``name_mean`` of
    rounds.jsonl. ``title`` names the number in tables and figures.

    * ``told`` says where the number comes from. With "training" or "evaluation" each client tells it, in what its
      method ``report`` or ``evaluation`` returns. With "server" the strategy tells it by ``self.tell(round, name,
      value)``, and ``name`` itself is the column.
    * ``least`` and ``most`` bound the number. A reply with another number is refused.
    * ``percent`` says that the number is a share, of which 1 is shown as 100 %.
    * ``decimals`` is how many decimals are shown.
    * ``over_rounds`` says what the table shows of all rounds: the "last" number, their "total" or their "mean". Total
      and mean are shown where every round has the number.
    * ``public`` says that the number does not depend on a client's data. A private run drops all other numbers before
      the reply leaves the client.

    Raises :class:`ConfigError` for a name that is taken, and for other values than these.
    """

    name: str
    title: str
    told: Told = "training"
    least: float = -LARGEST_SAID
    most: float = LARGEST_SAID
    percent: bool = False
    decimals: int = 2
    over_rounds: OverRounds = "last"
    public: bool = False

    def __post_init__(self) -> None:
        where, allowed = f"measure {self.name!r}", "at most 60 lower-case letters, digits and single '_'"
        if not (isinstance(self.name, str) and len(self.name) <= 60 and _NAME.fullmatch(self.name)):
            raise ConfigError("name", self.name, allowed, where=where)
        if {self.name, self.column} & _taken_names():
            raise ConfigError("name", self.name, "another name", which="is one of fedprune's own numbers", where=where)
        for key, value, values in (
            ("told", self.told, get_args(Told)),
            ("over_rounds", self.over_rounds, get_args(OverRounds)),
        ):
            if value not in values:
                raise ConfigError(key, value, ", ".join(values), where=where)
        if not self.least < self.most:
            raise ConfigError("least", self.least, f"less than most, {self.most!r}", where=where)
        if self.told == "evaluation" and self.over_rounds != "last":
            raise ConfigError(
                "over_rounds",
                self.over_rounds,
                "last",
                condition="with told='evaluation'",
                hint="not every round evaluates",
                where=where,
            )

    @property
    def column(self) -> str:
        return self.name if self.told == "server" else f"{self.name}_mean"

    @cached_property
    def shown(self) -> Column:
        scale, unit = (100.0, " %") if self.percent else (1.0, "")
        title = f"{self.title} (%)" if self.percent else self.title
        caption = "" if self.told == "server" else "Mean over the clients that told it."
        return Column(
            self.column,
            None if self.told == "server" else mean,
            Recorded.WHERE_MEASURED,
            table=InTable(self.name, title, self.decimals, scale, self.over_rounds, place=600),
            curve=Curve(self.name, f"{self.title} by round", caption, self.title, self.percent),
            line=InLine(self.title, format=f".{self.decimals}f", scale=scale, unit=unit),
        )

    @cached_property
    def declaration(self) -> Measure | Column:
        """The number is declared like fedprune's own, but no reply has to tell it."""
        if self.told == "server":
            return self.shown
        return Measure(
            self.name,
            self.name,
            optional=frozenset({Reply[self.told.upper()]}),
            least=self.least,
            most=self.most,
            withheld=not self.public,
            recorded=Recorded.WHERE_MEASURED,
            columns=(self.shown,),
        )

    def number(self, value: object, who: str) -> float:
        """Return a value as a checked float; tensors and arrays of one number are numbers. ``who`` told it.

        Raises ``ValueError``.
        """
        item = value.item() if hasattr(value, "item") and getattr(value, "ndim", 0) == 0 else value
        return float(bounded(item, f"{who} {self.name!r}", self.least, self.most))


def _taken_names() -> set[str]:
    fields = {measure.wire_name for measure in MEASURES.of_clients.values()}
    titles = {column.table.key for column in MEASURES.columns.values() if column.table}
    return {*MEASURES.of_clients, *MEASURES.columns, *fields, *titles, *_OTHER_NAMES}


_OTHER_NAMES = frozenset(
    {"partition", "note", "lost", "declined", "digest"}
    | {"accuracy", "best_accuracy", "minutes", "rounds"}
    | {"paper_megabytes", "gigaflops", "epsilon_remark", "label", "system", "dataset", "status", "seeds"}
)


# --- of a system --------------------------------------------------------------------------------------------------

_of_systems: dict[str, tuple[OwnMeasure, ...]] = {}


def checked(system: str, measures: Iterable[OwnMeasure]) -> tuple[OwnMeasure, ...]:
    """Return the numbers that a plug-in's ``system`` declares. Raises :class:`ConfigError` for a name given twice."""
    all_measures = tuple(measures)
    names = [name for measure in all_measures for name in {measure.name, measure.column}]
    if duplicates := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError("measures", duplicates[0], "each name once", where=f"system {system!r}")
    return all_measures


def declare(system: str, measures: Iterable[OwnMeasure]) -> None:
    _of_systems[system] = checked(system, measures)


def of_system(system: str) -> tuple[OwnMeasure, ...]:
    return _of_systems.get(system, ())


def for_reply(system: str, fields: Mapping[str, Any], is_private: bool, who: str) -> dict[str, Any]:
    """Return the fields of a client's reply with the numbers that the system declares checked; ``who`` tells them.

    Those that are None are left out, and so are a private client's that may depend on its data. Raises ``ValueError``.
    """
    checked_fields = dict(fields)
    for measure in of_system(system):
        value = checked_fields.pop(measure.name, None)
        if value is not None and (measure.public or not is_private):
            checked_fields[measure.name] = measure.number(value, who)
    return checked_fields


def all_of(system: str) -> Measures:
    measures = of_system(system)
    return Measures((*MEASURES, *(measure.declaration for measure in measures))) if measures else MEASURES


# --- in run.json --------------------------------------------------------------------------------------------------


def described(system: str) -> list[dict[str, Any]]:
    return [asdict(measure) for measure in of_system(system)]


def from_info(info: Mapping[str, Any], where: str) -> tuple[OwnMeasure, ...]:
    """Return the declarations in a run.json, which a later version may refuse.

    Raises a one-line ``ValueError`` that says ``where`` they are wrong.
    """
    declarations = info.get("measures") or []
    field_names = {field.name for field in fields(OwnMeasure)}
    try:
        return tuple(
            OwnMeasure(**{key: value for key, value in declaration.items() if key in field_names})
            for declaration in declarations
        )
    except (TypeError, ConfigError) as error:
        raise ValueError(f"{where}: 'measures': {error}") from None
