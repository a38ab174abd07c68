"""Curves of runs: accuracy by round, traffic and privacy, and each metric with a figure of its own."""

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from fedprune_app.core.named import ValueDict
from fedprune_app.results import metrics
from fedprune_app.results.columns import epsilon_footnote, system_metrics_of
from fedprune_app.results.declarations import DECLARATIONS
from fedprune_app.results.figures.common import (
    SHARE_TICKS,
    Figure,
    Trace,
    Variant,
    Variants,
    axis,
    joining,
    line,
    text_of,
)
from fedprune_app.results.groups import Group, Groups
from fedprune_app.results.metrics import MEGABYTE
from fedprune_app.results.reader import Run
from fedprune_app.results.system_metrics import SystemMetric
from fedprune_app.results.tables import compared_by

Curve = Mapping[int, tuple[float, float]]  # round -> (x, y)
_CURVES_UP_TO = 100  # clients with a curve of their own ε
_BY_ROUND: ValueDict = {"xaxis": axis("Round")}
_MARKERS_UP_TO = 25  # points; more of them would hide the line


def figures_of_measures(groups: Groups) -> Iterator[Figure]:
    """Yield a figure by round for each metric that is declared with a curve, including the groups' own metrics."""
    curves = [(name, column.curve) for name, column in DECLARATIONS.columns.items() if column.curve]
    for name, curve in sorted(curves, key=lambda pair: pair[1].place):
        yield _figure(groups, curve.key, curve, by_round, name)
    for key, metric in system_metrics_of(groups).items():
        if own_curve := metric.shown.curve:
            yield _figure(groups, f"own-{key}", own_curve, partial(_own_by_round, metric=metric), metric.column)


def _figure(groups: Groups, key: str, curve: metrics.Curve, points: Callable[[Run, str], Curve], column: str) -> Figure:
    y_axis = {"tickformat": SHARE_TICKS, "hoverformat": ".1%"} if curve.is_share else {}
    views = lines(groups, points, column, curve.view, _BY_ROUND | {"yaxis": y_axis})
    return Figure(key, curve.title, curve.caption, over_rounds(views))


def over_rounds(views: Variants) -> Variants:
    """Return the views, or none if no curve has a second point."""
    is_curve = any(len({*trace["x"]}) > 1 for view in views for trace in view.traces)
    return views if is_curve else []


def _own_by_round(run: Run, name: str, metric: SystemMetric) -> Curve:
    return by_round(run, name) if metric in run.system_metrics else {}


def by_round(run: Run, name: str) -> Curve:
    return {round: (round, value) for round, value in run.series(name)}


def by_megabytes(run: Run, name: str) -> Curve:
    """Return the curve against the traffic so far; it ends at a round whose bytes were not measured."""
    points, megabytes = {}, 0.0
    for row in run.rounds:
        byte_counts = [
            row.get(key) for key in (("bytes_up", "bytes_down") if row.get("peer_bytes") is None else ("peer_bytes",))
        ]
        if None in byte_counts:
            break
        megabytes += sum(value for value in byte_counts if value is not None) / MEGABYTE
        if row.get(name) is not None:
            points[row["round"]] = (megabytes, row[name])
    return points


def by_epsilon(run: Run, name: str) -> Curve:
    return {
        row["round"]: (row["epsilon_max"], row[name])
        for row in run.rounds
        if row.get("epsilon_max") is not None and row.get(name) is not None
    }


def accuracies(groups: Groups, curve: Callable[[Run, str], Curve], x_title: str) -> Variants:
    layout = {"xaxis": axis(x_title), "yaxis": {"tickformat": SHARE_TICKS, "hoverformat": ".2%"}}
    titles = [(name, column.view) for name, column in DECLARATIONS.columns.items() if column.view]
    main = set(compared_by(groups).values())
    in_order = sorted(titles, key=lambda pair: (pair[0] not in main, pair[1].place))  # the headline's view is first
    return [view for name, title in in_order for view in lines(groups, curve, name, title.text, layout)]


def lines(
    groups: Groups,
    curve: Callable[[Run, str], Curve],
    name: str,
    title: str,
    layout: ValueDict,
) -> Variants:
    """Return a view of a column of rounds.jsonl with a curve per group; no view if no group has the number."""
    traces = [trace for index, group in enumerate(groups) for trace in _traces(index, group, curve, name)]
    return [Variant(title, traces, layout)] if traces else []


def _traces(series: int, group: Group, curve: Callable[[Run, str], Curve], name: str) -> list[Trace]:
    """Return the mean over seeds in the rounds that all seeds have, and the range of several seeds."""
    curves = [curve(run, name) for run in group.runs]
    rounds = sorted(set.intersection(*(set(seed_curve) for seed_curve in curves)))
    if not rounds:
        return []
    points = [[seed_curve[round] for seed_curve in curves] for round in rounds]
    x = [statistics.fmean(x for x, _ in at_round) for at_round in points]
    values = [[y for _, y in at_round] for at_round in points]
    mode = "lines+markers" if len(rounds) <= _MARKERS_UP_TO else "lines"
    mean = line(series, group, x, [statistics.fmean(at_round) for at_round in values], mode=mode)
    if len(curves) == 1:
        return [mean]
    if len(rounds) == 1:  # a band would have no width
        return [joining(series, x * 2, [min(values[0]), max(values[0])]), mean]
    low = joining(series, x, list(map(min, values)), band=True)
    return [low, joining(series, x, list(map(max, values)), band=True, fill="tonexty"), mean]


def epsilon(groups: Groups) -> Variants:
    layout = _BY_ROUND | {"yaxis": axis(f"ε{epsilon_footnote(groups)}", rangemode="tozero")}
    budgets = [trace for index, group in enumerate(groups) if (trace := _budget_line(index, group))]
    views = lines(groups, by_round, "epsilon_max", "Largest of all clients", layout)
    traces: list[Trace] = []
    for index, group in enumerate(groups):
        x: list[int | None] = []
        y: list[float | None] = []
        for run in group.runs:
            curves: dict[int, list[tuple[int, float]]] = {}
            for row in run.clients:
                if row.get("epsilon") is not None:
                    curves.setdefault(row["partition"], []).append((row["round"], row["epsilon"]))
            for client in sorted(curves)[:_CURVES_UP_TO]:
                rounds, values = zip(*sorted(curves[client]), strict=True)
                x += [*rounds, None]  # a gap: one trace holds all clients
                y += [*values, None]
        if x:
            style = {"thin": True, "line": {"shape": "hv"}, "hoverinfo": "skip"}
            traces.append(line(index, group, x, y, mode="lines", **style))
    if traces:
        note = f"Shown are the first {_CURVES_UP_TO} clients of each run at most."
        views.append(Variant("Each client", traces, layout, note))
    return [replace(view, traces=[*view.traces, *budgets]) for view in views]


def _budget_line(series: int, group: Group) -> Trace | None:
    config = group.first.config
    limits = [config[key] for key in ("dp.epsilon-budget", "dp.target-epsilon") if config.get(key)]
    last = max((row["round"] for run in group.runs for row in run.rounds), default=0)
    if not (limits and last and config.get("dp.enabled")):
        return None
    name, text = text_of(f"budget of {group.label}"), [f"budget {min(limits):g}", ""]
    style = {"name": name, "mode": "lines+text", "text": text, "limit": True, "hoverinfo": "skip"}
    return line(series, group, [1, last], [min(limits)] * 2, **style)
