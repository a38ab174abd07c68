"""The columns of the final table, and the numbers of a run that they show."""

import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

from fedprune_app.results import metrics
from fedprune_app.results.declarations import DECLARATIONS
from fedprune_app.results.groups import Groups
from fedprune_app.results.metrics import MEGABYTE
from fedprune_app.results.reader import Row, Run
from fedprune_app.results.system_metrics import SystemMetric

_place = attrgetter("place")


def table_key(name: str) -> str:
    """Return the key in tables of a column of rounds.jsonl; empty for one that stands in none."""
    column = DECLARATIONS.columns.get(name)
    return column.table.key if column and column.table else ""


ACCURACIES = {
    "accuracy",
    "best_accuracy",
    *(table_key(name) for name in DECLARATIONS.columns if name.startswith("accuracy")),
}


@dataclass(frozen=True)
class Column:
    """Shows one value of a run in the final table.

    ``place`` orders the columns; declared ones have theirs in ``results/declarations.py``. The ``footnote`` on the
    number of one run, or on the mean of several, follows the number in tables for people.
    """

    key: str
    title: str
    value: Callable[[Run], float | None]
    scale: float = 1.0
    decimals: int = 1
    place: int = 0
    footnote: Callable[[Sequence[Run]], str] = lambda runs: ""
    of_headline: bool = False  # it shows each system's headline, which differs between systems


def outcome(groups: Groups) -> tuple[Column, ...]:
    """Return the columns of final numbers: declared ones, those of the groups' systems, and compound ones."""
    compound_columns = (
        Column("accuracy", "Accuracy, last round (%)", accuracy, 100, 2, 10, _headline_footnote, of_headline=True),
        Column(
            "best_accuracy",
            "Accuracy, best on validation (%)",
            best_on_validation,
            100,
            2,
            20,
            _best_footnote,
            of_headline=True,
        ),
    )
    all_columns = (*_declared_columns(is_cost=False), *_own_columns(groups), *compound_columns)
    return tuple(sorted(all_columns, key=_place))


def cost() -> tuple[Column, ...]:
    compound_columns = (
        Column("paper_megabytes", "MB, paper's formula", paper_bytes, 1 / MEGABYTE, 2, 30),
        Column("gigaflops", "GFLOPs per client and round", flops_per_client, 1e-9, 2, 80),
        Column("rounds", "Rounds", lambda run: float(len(run.rounds)), 1, 0, metrics.LAST),
        Column("minutes", "Minutes", lambda run: float(run.info["seconds"]), 1 / 60, 1, metrics.LAST),
    )
    return tuple(sorted((*_declared_columns(is_cost=True), *compound_columns), key=_place))


def columns(groups: Groups) -> tuple[Column, ...]:
    return (*outcome(groups), *cost())


def _declared_columns(is_cost: bool) -> Iterator[Column]:
    for name, column in DECLARATIONS.columns.items():
        if (in_table := column.table) and in_table.is_cost == is_cost:
            value = partial(_OF_ROUNDS[in_table.of_rounds], field=name)
            footnote = partial(last_footnote, name=name)
            yield Column(
                in_table.key, in_table.title, value, in_table.scale, in_table.decimals, in_table.place, footnote
            )


def system_metrics_of(groups: Groups) -> dict[str, SystemMetric]:
    """Return the metrics that the systems of these groups declared, each under a unique key.

    If systems declared different metrics of one name, the keys of the later ones end in ``_2`` and so on.
    """
    system_metrics = dict.fromkeys(metric for group in groups for run in group.runs for metric in run.system_metrics)
    keys: dict[str, SystemMetric] = {}
    for metric in system_metrics:
        numbered_names = (f"{metric.name}_{number}" for number in itertools.count(2))
        keys[next(key for key in itertools.chain([metric.name], numbered_names) if key not in keys)] = metric
    return keys


def _own_columns(groups: Groups) -> Iterator[Column]:
    for key, metric in system_metrics_of(groups).items():
        if in_table := metric.shown.table:
            value = partial(_own_value, metric=metric)
            yield Column(key, in_table.title, value, in_table.scale, in_table.decimals, in_table.place)


def _own_value(run: Run, metric: SystemMetric) -> float | None:
    return _OF_ROUNDS[metric.over_rounds](run, metric.column) if metric in run.system_metrics else None


def last_footnote(runs: Sequence[Run], name: str) -> str:
    """Return the footnote on the last numbers of these runs in a column of rounds.jsonl, to stand behind their mean."""
    column = DECLARATIONS.columns.get(name)
    last_rows = []
    for run in runs:
        unit = run.info.get("protected_unit", "example")
        last_rows += [{**row, "protected_unit": unit} for row in run.rounds if row.get(name) is not None][-1:]
    return column.remarked(*last_rows) if column else ""


def _headline_footnote(runs: Sequence[Run]) -> str:
    return last_footnote(runs, runs[0].headline)


def epsilon_footnote(groups: Groups) -> str:
    """Return the footnote on the epsilons of all these runs, for a title; possibly empty."""
    return last_footnote([run for group in groups for run in group.runs], "epsilon_max")


_OF_ROUNDS: Mapping[str, Callable[..., float | None]] = {"last": Run.last, "total": Run.total, "mean": Run.mean}


def accuracy(run: Run) -> float | None:
    return run.last(run.headline) if run.headline.startswith("accuracy") else None


def best_on_validation(run: Run) -> float | None:
    """Return the headline (test) accuracy of the round with the best validation accuracy; None without validation.

    The round is chosen without test accuracy; of equal rounds it is the earliest. Only the evaluations with the most
    clients that reported both accuracies are compared, since with fewer clients chance would decide.
    """
    best = _best_round(run)
    return None if best is None else float(best[run.headline])


def _best_round(run: Run) -> Row | None:
    names = ("accuracy_validation_mean", run.headline)
    evaluations = [row for row in run.rounds if all(row.get(name) is not None for name in names)]
    largest_counts = max((_client_counts(row, names) for row in evaluations), default=(0, 0))
    if run.config.get("evaluate-clients") and largest_counts[0] < len(run.info.get("partition") or ()):
        return None  # each evaluation drew other clients
    rows = [row for row in evaluations if _client_counts(row, names) == largest_counts]
    return max(rows, key=lambda row: (row["accuracy_validation_mean"], -row["round"]), default=None)


def _client_counts(row: Row, names: Sequence[str]) -> tuple[int, int]:
    evaluated = int(row.get("evaluated") or 0)
    clients_by_column = row.get("clients_by_column") or {}
    return evaluated, min(int(clients_by_column.get(name, evaluated)) for name in names)


def _best_footnote(runs: Sequence[Run]) -> str:
    column = DECLARATIONS.columns.get(runs[0].headline)
    return column.remarked(*filter(None, map(_best_round, runs))) if column else ""


def paper_bytes(run: Run) -> float | None:
    """Return the bytes of the whole run by the paper's own formula, in the directions that it counts.

    Between peers a link counts once: one sends the bytes that the other receives.
    """
    is_star = run.total("peer_bytes") is None
    directions = [run.total("paper_bytes_up"), run.total("paper_bytes_down") if is_star else None]
    known_bytes = [value for value in directions if value is not None]
    return sum(known_bytes) if known_bytes else None


def traffic_of(run: Run) -> float | None:
    """Return the bytes of training, to and from the server, or over all links between peers."""
    peers, up, down = (run.total(name) for name in ("peer_bytes", "bytes_up", "bytes_down"))
    if peers is not None:  # up and down together would count relayed bytes twice
        return peers
    return None if up is None or down is None else up + down


def flops_per_client(run: Run) -> float | None:
    """Return the FLOPs of a client in a round: the mean over its clients, averaged over the rounds with training.

    The result is None if a round's FLOPs or the number of its clients were not measured.
    """
    flops_and_replies = [(row.get("flops"), row.get("replies")) for row in run.rounds]
    if any(flops is None or replies is None for flops, replies in flops_and_replies):
        return None
    means = [flops / replies for flops, replies in flops_and_replies if replies]
    return statistics.fmean(means) if means else None
