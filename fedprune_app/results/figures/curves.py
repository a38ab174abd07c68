"""These curves show how runs went: accuracy by round, by traffic and by privacy, and each number with its own curve."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fedprune_app.results import measures
from fedprune_app.results.figures.common import SHARE_TICKS, Figure, Trace, Variant, text_of
from fedprune_app.results.measures import MEGABYTE
from fedprune_app.results.own_measures import OwnMeasure
from fedprune_app.results.reader import Run
from fedprune_app.results.tables import Group, epsilon_remark, own_measures_of

Curve = Mapping[int, tuple[float, float]]  # round -> (x, y)
_MARKERS_UP_TO = 25  # points; more of them would hide the line


def accuracy(groups: Sequence[Group]) -> Figure:
    """The figure shows accuracy by round."""
    return Figure(
        "accuracy",
        "Accuracy by round",
        "Mean over all clients, or over those drawn by evaluate-clients, each on its own test split.",
        _accuracy_variants(groups, by_round, "Round"),
    )


def efficiency(groups: Sequence[Group]) -> Figure:
    """The figure shows accuracy by the traffic so far."""
    return Figure(
        "efficiency",
        "Accuracy by traffic",
        "Against the training traffic so far, as measured on the serialised messages: to and from the server, or "
        "over all links where models go from peer to peer.",
        _accuracy_variants(groups, _by_megabytes, "Measured traffic (MB)"),
    )


def privacy(groups: Sequence[Group]) -> Figure:
    """The figure shows accuracy by the privacy spent so far."""
    return Figure(
        "privacy",
        "Accuracy by privacy",
        "Against the largest ε of any client so far, from the ledger of what ran: the smaller, the more private.",
        _accuracy_variants(groups, _by_epsilon, f"Largest ε so far{epsilon_remark(groups)}"),
    )


def declared(groups: Sequence[Group]) -> Iterator[Figure]:
    """Yield a figure by round for each number that is declared with a curve of its own.

    The systems of the ``groups`` may have declared numbers of their own.
    """
    share = {"tickformat": SHARE_TICKS, "hoverformat": ".1%"}
    own = ((column.name, column.curve) for column in measures.MEASURES.columns.values() if column.curve)
    for name, curve in sorted(own, key=lambda each: each[1].place):
        axes = {"x": "Round", "y": share if curve.is_share else {}}
        yield unless_a_point(
            Figure(curve.key, curve.title, curve.caption, lines(groups, by_round, name, curve.view, axes))
        )
    for key, each in own_measures_of(groups).items():
        if own_curve := each.shown.curve:
            axes = {"x": "Round", "y": share if own_curve.is_share else {}}
            views = lines(groups, partial(_own_by_round, own=each), each.column, own_curve.view, axes)
            yield unless_a_point(Figure(f"own-{key}", own_curve.title, own_curve.caption, views))


def _own_by_round(run: Run, name: str, own: OwnMeasure) -> Curve:
    return by_round(run, name) if own in run.own_measures else {}


def unless_a_point(figure: Figure) -> Figure:
    """Return a figure by round without its views where no curve has a second point: one round has nothing to show."""
    is_a_point = all(len(trace["x"]) == 1 for variant in figure.variants for trace in variant.traces)
    return replace(figure, variants=[]) if is_a_point else figure


def by_round(run: Run, name: str) -> Curve:
    """Return the curve of a column of rounds.jsonl, with the round as x."""
    return {round: (round, value) for round, value in run.series(name)}


def _by_megabytes(run: Run, name: str) -> Curve:
    """Return the curve against the traffic so far; it ends where a round's bytes were not measured."""
    points, spent = {}, 0.0
    for row in run.rounds:
        moved = [
            row.get(key) for key in (("bytes_up", "bytes_down") if row.get("peer_bytes") is None else ("peer_bytes",))
        ]
        if None in moved:
            break
        spent += sum(value for value in moved if value is not None) / MEGABYTE
        if row.get(name) is not None:
            points[row["round"]] = (spent, row[name])
    return points


def _by_epsilon(run: Run, name: str) -> Curve:
    """Return the curve against ε so far, of rounds in which both are known."""
    return {
        row["round"]: (row["epsilon_max"], row[name])
        for row in run.rounds
        if row.get("epsilon_max") is not None and row.get(name) is not None
    }


def _accuracy_variants(groups: Sequence[Group], curve: Callable[[Run, str], Curve], x_title: str) -> list[Variant]:
    axes = {"x": x_title, "y": {"tickformat": SHARE_TICKS, "hoverformat": ".2%"}}
    titled = [(name, column.view) for name, column in measures.MEASURES.columns.items() if column.view]
    main = {group.runs[0].headline for group in groups} & {name for name, _ in titled}
    in_order = sorted(titled, key=lambda each: (each[0] not in main, each[1].place))  # the main number's view is first
    views = [view for name, title in in_order for view in lines(groups, curve, name, title.text, axes)]
    if len(main) == 1:
        return views
    traces = [
        trace
        for index, group in enumerate(groups)
        if group.runs[0].headline in main
        for trace in _traces(index, group, curve, group.runs[0].headline)
    ]
    mixed = [Variant("Main number", traces, line_layout(axes))] if traces else []
    return mixed + views


def lines(
    groups: Sequence[Group],
    curve: Callable[[Run, str], Curve],
    name: str,
    title: str,
    axes: Mapping[str, Any],
) -> list[Variant]:
    """Return a view of a column of rounds.jsonl with a curve per group; there is none where no group has the number."""
    traces = [trace for index, group in enumerate(groups) for trace in _traces(index, group, curve, name)]
    return [Variant(title, traces, line_layout(axes))] if traces else []


def line_layout(axes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a layout with a title for the x axis and the y axis as given."""
    return {"xaxis": {"title": {"text": axes["x"]}}, "yaxis": dict(axes["y"])}


def _traces(series: int, group: Group, curve: Callable[[Run, str], Curve], name: str) -> list[Trace]:
    """Return the mean over seeds in the rounds that all of them have and, for several seeds, their range around it."""
    curves = [curve(run, name) for run in group.runs]
    rounds = sorted(set.intersection(*(set(each) for each in curves)))
    if not rounds:
        return []
    points = [[each[round] for each in curves] for round in rounds]
    x = [statistics.fmean(x for x, _ in at_round) for at_round in points]
    values = [[y for _, y in at_round] for at_round in points]
    line: Trace = {
        "type": "scatter",
        "series": series,
        "name": text_of(group.label),
        "x": x,
        "y": [statistics.fmean(at_round) for at_round in values],
        "mode": "lines+markers" if len(rounds) <= _MARKERS_UP_TO else "lines",
    }
    if len(curves) == 1:
        return [line]
    edge: Trace = {"type": "scatter", "series": series, "x": x, "mode": "lines", "hoverinfo": "skip", "band": True}
    low, high = edge | {"y": list(map(min, values))}, edge | {"y": list(map(max, values)), "fill": "tonexty"}
    return [low, high, line]
