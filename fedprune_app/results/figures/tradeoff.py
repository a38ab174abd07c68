"""This figure shows what accuracy costs: the number that runs are compared by, against what was spent for it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from fedprune_app.results.columns import epsilon_remark, traffic_of
from fedprune_app.results.differences import of_the_same_data
from fedprune_app.results.figures.common import SHARE_TICKS, Trace, Variant, joining, point
from fedprune_app.results.groups import Group, Statistic
from fedprune_app.results.measures import MEGABYTE
from fedprune_app.results.reader import Run
from fedprune_app.results.tables import accuracy_words, compared_by


def by_cost(groups: Sequence[Group]) -> list[Variant]:
    """Return a view for each cost that some setting paid, with two settings or more: a single point shows no trade."""
    costs: dict[str, tuple[str, Callable[[Run], float | None], float]] = {
        "Privacy": (f"Largest ε of any client{epsilon_remark(groups)}", lambda run: run.last("epsilon_max"), 1),
        "Traffic": ("Measured traffic (MB)", traffic_of, MEGABYTE),
    }
    by_label = compared_by(groups)
    data = {group.label: number for number, family in enumerate(of_the_same_data(groups)) for group in family}
    variants = []
    for title, (axis, cost, unit) in costs.items():
        markers_by_system: dict[str, list[Trace]] = {}
        markers_by_data: dict[object, list[Trace]] = {}  # by the model and the data that accuracy is of
        for index, group in enumerate(groups):
            expense = Statistic.of(cost(run) for run in group.runs)
            accuracy = by_label[group.label]
            outcome = Statistic.of(run.last(accuracy) for run in group.runs) if accuracy_words(accuracy) else None
            if expense is None or outcome is None:
                continue
            marker = point(group, index, expense.mean / unit, outcome, "%{y:.2%} at %{x:.3~g}")
            markers_by_system.setdefault(group.system, []).append(marker)
            markers_by_data.setdefault((accuracy, data[group.label]), []).append(marker)
        traces = list(itertools.chain.from_iterable(markers_by_data.values()))
        if len(traces) < 2:
            continue
        for markers in markers_by_system.values():
            if len(markers) > 1:
                x, y = zip(*sorted(map(_place, markers)), strict=True)
                traces.insert(0, joining(markers[0]["series"], x, y, thin=True))
        for markers in markers_by_data.values():
            front = _front([_place(marker) for marker in markers])
            for marker in markers:
                marker["dominated"] = _place(marker) not in front
            if len(front) > 1:
                x, y = zip(*front, strict=True)
                line = {"type": "scatter", "x": x, "y": y, "mode": "lines", "front": True, "hoverinfo": "skip"}
                traces.insert(0, line)
        layout = {"xaxis": {"title": {"text": axis}, "rangemode": "tozero"}, "yaxis": {"tickformat": SHARE_TICKS}}
        variants.append(Variant(title, traces, layout | {"hovermode": "closest"}))
    return variants


def _place(marker: Trace) -> tuple[float, float]:
    return marker["x"][0], marker["y"][0]


def _front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points (cost, accuracy), by cost, of which no other reaches as much for as little."""
    front: list[tuple[float, float]] = []
    for cost, accuracy in sorted(set(points), key=lambda point: (point[0], -point[1])):
        if not front or accuracy > front[-1][1]:
            front.append((cost, accuracy))
    return front
