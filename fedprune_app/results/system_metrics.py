"""Metrics that a plug-in's system declares; a run writes the declarations into its run.json."""

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Literal, get_args

from fedprune_app.config import ConfigError, declared
from fedprune_app.core.bounds import LARGEST_NUMBER, bounded
from fedprune_app.core.named import ValueDict, Values
from fedprune_app.results.declarations import DECLARATIONS
from fedprune_app.results.metrics import (
    ClientMetric,
    Column,
    Curve,
    Declarations,
    InLine,
    InTable,
    Recorded,
    ReplyKind,
)
from fedprune_app.results.statistics import mean

Source = Literal["training", "evaluation", "server"]


OverRounds = Literal["last", "total", "mean"]


_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


@dataclass(frozen=True)
class SystemMetric:
    """Declares a metric of a plug-in's system: ``register_system(..., metrics=[...])``.

    A run writes the declaration into its run.json, so that a report shows the metric without the plug-in's code.

    ``name`` is the metric's name in replies and in clients.jsonl. The mean over clients is the column ``name_mean`` of
    rounds.jsonl. ``title`` is its name in tables and figures.

    * ``source``: who reports it. With "training" or "evaluation" each client does, in the result of its method
      ``report`` or ``evaluation``. With "server" the strategy does, by ``self.record(round, name, value)``, and
      ``name`` itself is the column.
    * ``least``, ``most``: bounds. A reply with a value outside them is rejected.
    * ``percent``: whether the metric is a share, of which 1 is shown as 100 %.
    * ``decimals``: the number of decimals shown.
    * ``over_rounds``: how the table combines all rounds: the "last" value, their "total" or their "mean". Total and
      mean are shown only if every round has the metric.
    * ``public``: whether the metric does not depend on a client's data. A private run drops all other metrics before
      the reply leaves the client.

    Raises :class:`ConfigError` for a name in use, and for other values than these.
    """

    name: str
    title: str
    source: Source = "training"
    least: float = -LARGEST_NUMBER
    most: float = LARGEST_NUMBER
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
            ("source", self.source, get_args(Source)),
            ("over_rounds", self.over_rounds, get_args(OverRounds)),
        ):
            if value not in values:
                raise ConfigError(key, value, ", ".join(values), where=where)
        if not self.least < self.most:
            raise ConfigError("least", self.least, f"less than most, {self.most!r}", where=where)
        if self.source == "evaluation" and self.over_rounds != "last":
            raise ConfigError(
                "over_rounds",
                self.over_rounds,
                "last",
                condition="with source='evaluation'",
                hint="not every round evaluates",
                where=where,
            )

    @property
    def column(self) -> str:
        return self.name if self.source == "server" else f"{self.name}_mean"

    @cached_property
    def shown(self) -> Column:
        scale, unit = (100.0, " %") if self.percent else (1.0, "")
        title = f"{self.title} (%)" if self.percent else self.title
        caption = "" if self.source == "server" else "Mean over the clients that told it."
        return Column(
            self.column,
            None if self.source == "server" else mean,
            Recorded.WHERE_MEASURED,
            table=InTable(self.name, title, self.decimals, scale, self.over_rounds, place=600),
            curve=Curve(self.name, f"{self.title} by round", caption, self.title, self.percent),
            line=InLine(self.title, format=f".{self.decimals}f", scale=scale, unit=unit),
        )

    @cached_property
    def declaration(self) -> ClientMetric | Column:
        """The declaration among fedprune's own; the metric is optional in replies."""
        if self.source == "server":
            return self.shown
        return ClientMetric(
            self.name,
            self.name,
            optional=frozenset({ReplyKind[self.source.upper()]}),
            least=self.least,
            most=self.most,
            withheld=not self.public,
            recorded=Recorded.WHERE_MEASURED,
            columns=(self.shown,),
        )

    def number(self, value: object, who: str) -> float:
        """Return a value as a checked float; a tensor or array of one number will do. Errors begin with ``who``.

        Raises ``ValueError``.
        """
        item = value.item() if hasattr(value, "item") and getattr(value, "ndim", 0) == 0 else value
        return float(bounded(item, f"{who} {self.name!r}", self.least, self.most))


def _taken_names() -> set[str]:
    fields = {metric.wire_name for metric in DECLARATIONS.of_clients.values()}
    titles = {column.table.key for column in DECLARATIONS.columns.values() if column.table}
    return {*DECLARATIONS.of_clients, *DECLARATIONS.columns, *fields, *titles, *_OTHER_NAMES}


_OTHER_NAMES = frozenset(
    {"partition", "note", "lost", "declined", "digest"}
    | {"accuracy", "best_accuracy", "minutes", "rounds"}
    | {"paper_megabytes", "gigaflops", "epsilon_footnote", "label", "system", "dataset", "status", "seeds"}
)


def checked(system: str, metrics: Iterable[SystemMetric]) -> tuple[SystemMetric, ...]:
    """Return the metrics of a plug-in's ``system``, checked. Raises :class:`ConfigError` for a duplicate name."""
    all_measures = tuple(metrics)
    names = [name for metric in all_measures for name in {metric.name, metric.column}]
    if duplicates := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError("metrics", duplicates[0], "each name once", where=f"system {system!r}")
    return all_measures


def of_system(system: str) -> tuple[SystemMetric, ...]:
    return declared(system).metrics


def for_reply(system: str, fields: Values, is_private: bool, who: str) -> ValueDict:
    """Return the fields of a client's reply, with the system's own metrics checked. Errors begin with ``who``.

    Metrics that are None are left out; so are those of a private client that may depend on its data. Raises
    ``ValueError``.
    """
    checked_fields = dict(fields)
    for metric in of_system(system):
        value = checked_fields.pop(metric.name, None)
        if value is not None and (metric.public or not is_private):
            checked_fields[metric.name] = metric.number(value, who)
    return checked_fields


def all_of(system: str) -> Declarations:
    metrics = of_system(system)
    return Declarations((*DECLARATIONS, *(metric.declaration for metric in metrics))) if metrics else DECLARATIONS


def described(system: str) -> list[ValueDict]:
    return [asdict(metric) for metric in of_system(system)]


def from_info(info: Values, where: str) -> tuple[SystemMetric, ...]:
    """Return the declarations in a run.json. Raises a one-line ``ValueError`` with ``where`` for invalid ones."""
    declarations = info.get("measures") or []
    field_names = {field.name for field in fields(SystemMetric)}
    try:
        # "told" is the name of ``source`` in runs of earlier versions
        declarations = [{"source": each.get("told", "training")} | each for each in declarations]
        return tuple(
            SystemMetric(**{key: value for key, value in each.items() if key in field_names}) for each in declarations
        )
    except (AttributeError, TypeError, ConfigError) as error:
        raise ValueError(f"{where}: 'measures': {error}") from None
