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
    costs: dict[str, tuple[str, Callable[[Run], float | None]]] = {
        "Privacy": (f"Largest ε of any client{epsilon_remark(groups)}", lambda run: run.last("epsilon_max")),
        "Traffic": ("Measured traffic (MB)", _megabytes),
    }
    by_label = compared_by(groups)
    data = {group.label: number for number, each in enumerate(of_the_same_data(groups)) for group in each}
    variants = []
    for title, (axis, cost) in costs.items():
        points: dict[str, list[tuple[float, float, int]]] = {}
        alike: dict[object, list[Trace]] = {}  # by the model and the data that accuracy is of
        for index, group in enumerate(groups):
            spent = Statistic.of(cost(run) for run in group.runs)
            accuracy = by_label[group.label]
            reached = Statistic.of(run.last(accuracy) for run in group.runs) if accuracy_words(accuracy) else None
            if spent is None or reached is None:
                continue
            points.setdefault(group.system, []).append((spent.mean, reached.mean, index))
            marker = point(group, index, spent.mean, reached, "%{y:.2%} at %{x:.3~g}")
            alike.setdefault((accuracy, data[group.label]), []).append(marker)
        traces = list(itertools.chain.from_iterable(alike.values()))
        if len(traces) < 2:
            continue
        for of_system in points.values():
            x, y, indices = zip(*sorted(of_system), strict=True)
            if len(x) > 1:
                traces.insert(0, joining(indices[0], x, y, thin=True))
        for markers in alike.values():
            front = _front([(marker["x"][0], marker["y"][0]) for marker in markers])
            for marker in markers:
                if (marker["x"][0], marker["y"][0]) not in front:
                    marker["dominated"] = True
            if len(front) > 1:
                x, y = zip(*front, strict=True)
                line = {"type": "scatter", "x": x, "y": y, "mode": "lines", "front": True, "hoverinfo": "skip"}
                traces.insert(0, line)
        layout = {"xaxis": {"title": {"text": axis}, "rangemode": "tozero"}, "yaxis": {"tickformat": SHARE_TICKS}}
        variants.append(Variant(title, traces, layout | {"hovermode": "closest"}))
    return variants


def _front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points (spent, reached), by what was spent, of which no other reaches as much for as little."""
    front: list[tuple[float, float]] = []
    for spent, reached in sorted(set(points), key=lambda point: (point[0], -point[1])):
        if not front or reached > front[-1][1]:
            front.append((spent, reached))
    return front


def _megabytes(run: Run) -> float | None:
    total = traffic_of(run)
    return None if total is None else total / MEGABYTE
