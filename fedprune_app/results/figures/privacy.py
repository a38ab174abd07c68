"""This figure shows what runs spent of their clients' privacy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fedprune_app.results.figures.common import Figure, Trace, Variant, text_of
from fedprune_app.results.figures.curves import by_round, line_layout, lines, unless_a_point
from fedprune_app.results.tables import Group, epsilon_remark

_CURVES_UP_TO = 100  # clients whose ε is drawn by itself


def epsilon(groups: Sequence[Group]) -> Figure:
    """The figure shows the privacy spent by round."""
    return unless_a_point(
        Figure(
            "epsilon",
            "Privacy spent",
            "ε from the ledger of what ran. Dotted: the budget, where there is one.",
            _epsilon_variants(groups),
        )
    )


def _epsilon_variants(groups: Sequence[Group]) -> list[Variant]:
    """Return the largest ε of all clients, and each client's own, under the budget if the run had one."""
    axes = {"x": "Round", "y": {"rangemode": "tozero", "title": {"text": f"ε{epsilon_remark(groups)}"}}}
    budgets = [trace for index, group in enumerate(groups) if (trace := _budget_line(index, group))]
    views = lines(groups, by_round, "epsilon_max", "Largest of all clients", axes)
    own: list[Trace] = []
    left_out = 0
    for index, group in enumerate(groups):
        x: list[int | None] = []
        y: list[float | None] = []
        for run in group.runs:
            curves: dict[int, list[tuple[int, float]]] = {}
            for row in run.clients:
                if row.get("epsilon") is not None and row.get("partition") is not None:
                    curves.setdefault(row["partition"], []).append((row["round"], row["epsilon"]))
            step = -(-len(curves) // _CURVES_UP_TO)
            left_out = max(left_out, step)
            for client in sorted(curves)[:: step or 1]:
                rounds, values = zip(*sorted(curves[client]), strict=True)
                x += [*rounds, None]  # a gap: one trace holds all clients
                y += [*values, None]
        if x:
            line: Trace = {"type": "scatter", "series": index, "name": text_of(group.label), "mode": "lines"}
            own.append(line | {"x": x, "y": y, "thin": True, "line": {"shape": "hv"}, "hoverinfo": "skip"})
    note = f"Shown is one client in {left_out}." if left_out > 1 else ""
    if own:
        views.append(Variant("Each client", own, line_layout(axes), note))
    return [replace(view, traces=[*view.traces, *budgets]) for view in views]


def _budget_line(series: int, group: Group) -> Trace | None:
    """Return the smaller of the two limits that a configuration can set, over all rounds that ran."""
    config = group.runs[0].config
    limits = [config.get(key) for key in ("dp.epsilon-budget", "dp.target-epsilon")]
    known = [limit for limit in limits if isinstance(limit, int | float) and limit > 0]
    last = max((row["round"] for run in group.runs for row in run.rounds), default=0)
    if not (known and last and config.get("dp.enabled")):
        return None
    return {
        "type": "scatter",
        "series": series,
        "name": text_of(f"budget of {group.label}"),
        "x": [1, last],
        "y": [min(known)] * 2,
        "mode": "lines+text",
        "text": [f"budget {min(known):g}", ""],
        "limit": True,
        "hoverinfo": "skip",
    }
