"""This figure shows what accuracy costs: the number that runs are compared by, against what was spent for it."""

import itertools
from collections.abc import Callable, Sequence

from fedprune_app.results.columns import epsilon_remark, traffic_of
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
    variants = []
    for title, (axis, cost, unit) in costs.items():
        markers_by_system: dict[str, list[Trace]] = {}
        for index, group in enumerate(groups):
            expense = Statistic.of(cost(run) for run in group.runs)
            accuracy = by_label[group.label]
            outcome = Statistic.of(run.last(accuracy) for run in group.runs) if accuracy_words(accuracy) else None
            if expense is None or outcome is None:
                continue
            marker = point(group, index, expense.mean / unit, outcome, "%{y:.2%} at %{x:.3~g}")
            markers_by_system.setdefault(group.system, []).append(marker)
        traces = list(itertools.chain.from_iterable(markers_by_system.values()))
        if len(traces) < 2:
            continue
        for markers in markers_by_system.values():
            if len(markers) > 1:
                x, y = zip(*sorted((marker["x"][0], marker["y"][0]) for marker in markers), strict=True)
                traces.insert(0, joining(markers[0]["series"], x, y, thin=True))
        layout = {"xaxis": {"title": {"text": axis}, "rangemode": "tozero"}, "yaxis": {"tickformat": SHARE_TICKS}}
        variants.append(Variant(title, traces, layout | {"hovermode": "closest"}))
    return variants
