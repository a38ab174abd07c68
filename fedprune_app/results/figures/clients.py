"""These figures show how each client fares, and which client has which classes."""

import statistics
from collections.abc import Sequence

from fedprune_app.core.metrics import worst_decile
from fedprune_app.results.declarations import MEASURES
from fedprune_app.results.figures.common import (
    HEATMAP_UP_TO,
    SHARE_TICKS,
    Trace,
    Variant,
    class_name,
    heatmap,
    line,
    number_of,
    row_axis,
    run_name,
    text_of,
)
from fedprune_app.results.groups import Group
from fedprune_app.results.reader import last_of_clients

_POINTS_UP_TO = 400  # clients shown one by one beside their box


def by_class(groups: Sequence[Group]) -> list[Variant]:
    views = []
    for group in groups:
        run = group.runs[0]
        shares = {int(row["partition"]): row["accuracy_by_class"] for row in last_of_clients(run, "accuracy_by_class")}
        if not shares:
            continue
        step = -(-len(shares) // HEATMAP_UP_TO)
        clients = sorted(shares)[::step]
        classes = sorted({int(label) for share_by_class in shares.values() for label in share_by_class})
        trace = heatmap(
            [str(client) for client in clients],
            [text_of(class_name(run, label)) for label in classes],
            [[_rounded(shares[client].get(str(label))) for client in clients] for label in classes],
            "client %{x}, class %{y}<br>%{z:.1%} correct",
            zmin=0,
            zmax=1,
            colorbar={"tickformat": ".0%"},
        )
        axes = {
            "xaxis": {"type": "category", "title": {"text": "Client"}},
            "yaxis": {"type": "category", "title": {"text": "Class"}},
        }
        note = f"Shown is one client in {step}." if step > 1 else ""
        views.append(Variant(run_name(group, run), [trace], axes, note))
    return views


def _rounded(share: float | None) -> float | None:
    return None if share is None else round(share, 3)


def accuracies(groups: Sequence[Group]) -> list[Variant]:
    layout = {"xaxis": {"tickformat": SHARE_TICKS}, "yaxis": row_axis(groups), "boxgap": 0}
    variants = []
    titles = [(name, measure.view) for name, measure in MEASURES.of_clients.items() if measure.view]
    for name, title in sorted(titles, key=lambda pair: pair[1].place):
        traces = []
        for index, group in enumerate(groups):
            rows_of_seeds = [rows for run in group.runs if (rows := last_of_clients(run, name))]
            seeds = [[float(row[name]) for row in rows] for rows in rows_of_seeds]
            points = [value for values in seeds for value in values]
            if not points:
                continue
            row: Trace = {"series": index, "name": text_of(group.label)}
            box = {
                "type": "box",
                "x": points,
                "y": [index] * len(points),
                "orientation": "h",
                "width": 0.5,
                "boxpoints": "all" if len(points) <= _POINTS_UP_TO else "outliers",
            }
            worst = {
                "type": "scatter",
                "x": [statistics.fmean(worst_decile(values) for values in seeds)],
                "y": [index],
                "mode": "markers",
                "worst": True,
                "hovertemplate": "worst decile %{x:.1%}<extra></extra>",
            }
            traces += [row | box, row | worst]
        if traces:
            variants.append(Variant(title.text, traces, layout))
    return variants


def by_density(groups: Sequence[Group]) -> list[Variant]:
    """Return a view of runs whose clients differ in density, as Dis-PFL's Figure 4; density has two decimals."""
    traces: list[Trace] = []
    for index, group in enumerate(groups):
        rows = [row for run in group.runs for row in last_of_clients(run, "accuracy_personal")]
        pairs = [(row.get("density"), row["accuracy_personal"]) for row in rows]
        points = sorted((round(density, 2), accuracy) for density, accuracy in pairs if density is not None)
        if len({density for density, _ in points}) < 2:
            continue
        accuracies_by_density: dict[float, list[float]] = {}
        for density, accuracy in points:
            accuracies_by_density.setdefault(density, []).append(accuracy)
        x, y = zip(*points, strict=True)
        traces.append(line(index, group, list(x), list(y), mode="markers", faint=True, hoverinfo="skip"))
        means = {density: statistics.fmean(values) for density, values in accuracies_by_density.items()}
        counts = [number_of(len(values), "client") for values in accuracies_by_density.values()]
        template = "%{y:.1%}, mean of %{text}"
        traces.append(line(index, group, list(means), list(means.values()), text=counts, hovertemplate=template))
    share = {"tickformat": SHARE_TICKS, "hoverformat": ".0%"}
    layout = {"xaxis": {"title": {"text": "Density of the client"}, **share}, "yaxis": {"tickformat": SHARE_TICKS}}
    return [Variant("Personal", traces, layout)] if traces else []


def partition(groups: Sequence[Group]) -> list[Variant]:
    """Return one view for each distinct way in which the data were dealt out: compared systems usually share it."""
    views: dict[str, Variant] = {}
    for label, run in ((group.label, run) for group in groups for run in group.runs):
        rows = [row for row in run.info.get("partition") or [] if row.get("train")]
        if not rows or repr(rows) in views:
            continue
        title = f"seed {run.seed}"
        if title in [view.name for view in views.values()]:
            title += f" · {label}"
        classes = max(len(row["train"]) for row in rows)
        counts = [
            [(row["train"][label] or None) if label < len(row["train"]) else None for row in rows]
            for label in range(classes)
        ]
        clients = [row["partition"] for row in rows]
        names = [text_of(class_name(run, label)) for label in range(classes)]
        trace = heatmap(clients, names, counts, "client %{x}, class %{y}: %{z} examples")
        axis = {"title": {"text": "Class"}, "type": "category", "automargin": True}
        views[repr(rows)] = Variant(title, [trace], {"xaxis": {"title": {"text": "Client"}}, "yaxis": axis})
    return list(views.values())
