"""These figures show how each client fares."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from fedprune_app.core.metrics import worst_decile
from fedprune_app.results import measures
from fedprune_app.results.figures.common import (
    HEATMAP_UP_TO,
    SHARE_TICKS,
    Figure,
    Trace,
    Variant,
    class_name,
    number_of,
    row_axis,
    run_name,
    text_of,
)
from fedprune_app.results.reader import Run
from fedprune_app.results.tables import Group

_POINTS_UP_TO = 400  # clients shown one by one beside their box


def accuracies(groups: Sequence[Group]) -> Figure:
    """The figure shows the accuracy of each client."""
    return Figure(
        "clients",
        "Accuracy of each client",
        "One point per client in the last evaluation; the diamond is the mean of the worst tenth.",
        _client_variants(groups),
        rows=len(groups),
    )


def by_class(groups: Sequence[Group]) -> Figure:
    """The figure shows the accuracy of each client on each class."""
    return Figure(
        "classes",
        "Accuracy by class and client",
        "Accuracy of each client's own model in the last evaluation, on the client's test examples of each class. "
        "A cell is empty where a client has none.",
        [variant for group in groups if (variant := _by_class(group, group.runs[0]))],
        wide=True,
    )


def density_groups(groups: Sequence[Group]) -> Figure:
    """The figure shows the accuracy of each client by its density."""
    return Figure(
        "density-groups",
        "Accuracy by density of the client",
        "One point per client in the last evaluation, by its own kept share; the line joins the means of clients "
        "of the same density.",
        _density_group_variants(groups),
    )


def _by_class(group: Group, run: Run) -> Variant | None:
    """Return a view of a run: classes by the clients that were tested in the last evaluation."""
    rows = [row for row in run.clients if row.get("accuracy_by_class")]
    if not rows:
        return None
    newest = max(row["round"] for row in rows)
    last = {int(row["partition"]): row["accuracy_by_class"] for row in rows if row["round"] == newest}
    step = -(-len(last) // HEATMAP_UP_TO)
    clients = sorted(last)[::step]
    classes = sorted({int(label) for found in last.values() for label in found})
    shares = [[last[client].get(str(label)) for client in clients] for label in classes]
    trace: Trace = {
        "type": "heatmap",
        "x": [str(client) for client in clients],
        "y": [text_of(class_name(run, label)) for label in classes],
        "z": [[None if share is None else round(share, 3) for share in row] for row in shares],
        "zmin": 0,
        "zmax": 1,
        "colorbar": {"tickformat": ".0%"},
        "hovertemplate": "client %{x}, class %{y}<br>%{z:.1%} correct<extra></extra>",
    }
    axes = {
        "xaxis": {"type": "category", "title": {"text": "Client"}},
        "yaxis": {"type": "category", "title": {"text": "Class"}},
    }
    note = f"Shown is one client in {step}." if step > 1 else ""
    return Variant(run_name(group, run), [trace], axes, note)


def _client_variants(groups: Sequence[Group]) -> list[Variant]:
    layout = {"xaxis": {"tickformat": SHARE_TICKS}, "yaxis": row_axis(groups), "boxgap": 0}
    variants = []
    titled = [(name, each.view) for name, each in measures.MEASURES.of_clients.items() if each.view]
    for name, title in sorted(titled, key=lambda each: each[1].place):
        traces = []
        for index, group in enumerate(groups):
            seeds = [values for run in group.runs if (values := _last_of_clients(run, name))]
            points = [value for values in seeds for value in values]
            if not points:
                continue
            row: Trace = {"series": index, "name": text_of(group.label)}
            traces.append(
                row
                | {
                    "type": "box",
                    "x": points,
                    "y": [index] * len(points),
                    "orientation": "h",
                    "width": 0.5,
                    "boxpoints": "all" if len(points) <= _POINTS_UP_TO else "outliers",
                }
            )
            worst = statistics.fmean(worst_decile(values) for values in seeds)
            traces.append(
                row
                | {
                    "type": "scatter",
                    "x": [worst],
                    "y": [index],
                    "mode": "markers",
                    "worst": True,
                    "hovertemplate": "worst decile %{x:.1%}<extra></extra>",
                }
            )
        if traces:
            variants.append(Variant(title.text, traces, layout))
    return variants


def _last_of_clients(run: Run, name: str) -> list[float]:
    """Return the values of the last round in which any client measured ``name``."""
    measured = [row for row in run.clients if isinstance(row.get(name), int | float)]
    last = max((row["round"] for row in measured), default=None)
    return [float(row[name]) for row in measured if row["round"] == last]


def _density_group_variants(groups: Sequence[Group]) -> list[Variant]:
    """Return views of runs whose clients differ in density, as Dis-PFL's Figure 4; density has two decimals."""
    traces: list[Trace] = []
    for index, group in enumerate(groups):
        seeds = [_density_and_accuracy(run) for run in group.runs]
        points = sorted(pair for pairs in seeds if len({density for density, _ in pairs}) > 1 for pair in pairs)
        if not points:
            continue
        alike: dict[float, list[float]] = {}
        for density, reached in points:
            alike.setdefault(density, []).append(reached)
        row: Trace = {"type": "scatter", "series": index, "name": text_of(group.label)}
        traces.append(
            row
            | {
                "x": [density for density, _ in points],
                "y": [reached for _, reached in points],
                "mode": "markers",
                "faint": True,
                "hoverinfo": "skip",
            }
        )
        traces.append(
            row
            | {
                "x": list(alike),
                "y": [statistics.fmean(values) for values in alike.values()],
                "mode": "lines+markers",
                "text": [number_of(len(values), "client") for values in alike.values()],
                "hovertemplate": "%{y:.1%}, mean of %{text}",
            }
        )
    share = {"tickformat": SHARE_TICKS, "hoverformat": ".0%"}
    layout = {"xaxis": {"title": {"text": "Density of the client"}, **share}, "yaxis": {"tickformat": SHARE_TICKS}}
    return [Variant("Personal", traces, layout)] if traces else []


def _density_and_accuracy(run: Run) -> list[tuple[float, float]]:
    """Return (density to two decimals, accuracy) of the clients in the last evaluation."""
    measured = [row for row in run.clients if row.get("accuracy_personal") is not None]
    last = max((row["round"] for row in measured), default=None)
    return [
        (round(row["density"], 2), row["accuracy_personal"])
        for row in measured
        if row["round"] == last and row.get("density") is not None
    ]
