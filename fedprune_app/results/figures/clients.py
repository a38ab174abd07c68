"""Figures of clients: accuracies, classes, and traffic."""

import statistics

from fedprune_app.results.declarations import DECLARATIONS
from fedprune_app.results.figures.common import (
    HEATMAP_UP_TO,
    SHARE_TICKS,
    Trace,
    Variant,
    Variants,
    axis,
    class_name,
    heatmap,
    line,
    megabytes_text,
    number_of,
    row_axis,
    run_name,
    text_of,
)
from fedprune_app.results.groups import Groups, Statistic
from fedprune_app.results.metrics import MEGABYTE
from fedprune_app.results.reader import last_of_clients
from fedprune_app.results.statistics import worst_decile

_POINTS_UP_TO = 400  # clients that are shown as points beside their box


def by_class(groups: Groups) -> Variants:
    views = []
    for group in groups:
        run = group.first
        shares = {int(row["partition"]): row["accuracy_by_class"] for row in last_of_clients(run, "accuracy_by_class")}
        if not shares:
            continue
        step = -(-len(shares) // HEATMAP_UP_TO)
        clients = sorted(shares)[::step]
        classes = sorted({int(label) for share_by_class in shares.values() for label in share_by_class})
        trace = heatmap(
            [text_of(run.client_name(client)) for client in clients],
            [text_of(class_name(run, label)) for label in classes],
            [[_rounded(shares[client].get(str(label))) for client in clients] for label in classes],
            "client %{x}, class %{y}<br>%{z:.1%} correct",
            zmin=0,
            zmax=1,
            colorbar={"tickformat": ".0%"},
        )
        axes = {
            "xaxis": axis("Client", type="category"),
            "yaxis": axis("Class", type="category"),
        }
        note = f"Shown is one client in {step}." if step > 1 else ""
        views.append(Variant(run_name(group, run), [trace], axes, note))
    return views


def _rounded(share: float | None) -> float | None:
    return None if share is None else round(share, 3)


def accuracies(groups: Groups) -> Variants:
    layout = {"xaxis": {"tickformat": SHARE_TICKS}, "yaxis": row_axis(groups), "boxgap": 0}
    variants = []
    titles = [(name, metric.view) for name, metric in DECLARATIONS.of_clients.items() if metric.view]
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


def by_density(groups: Groups) -> Variants:
    """Return a view of runs whose clients differ in density, as in Dis-PFL's Figure 4; density has two decimals."""
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
    layout = {"xaxis": axis("Density of the client", **share), "yaxis": {"tickformat": SHARE_TICKS}}
    return [Variant("Personal", traces, layout)] if traces else []


def partition(groups: Groups) -> Variants:
    """Return one view for each distinct partition of the data, which compared systems usually share."""
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
        clients = [text_of(run.client_name(row["partition"])) for row in rows]
        names = [text_of(class_name(run, label)) for label in range(classes)]
        trace = heatmap(clients, names, counts, "client %{x}, class %{y}: %{z} examples")
        y_axis = axis("Class", type="category", automargin=True)
        views[repr(rows)] = Variant(title, [trace], {"xaxis": axis("Client"), "yaxis": y_axis})
    return list(views.values())


# --- traffic ----------------------------------------------------------------------------------------------------------


_PEER_CAPTION = (
    " ⇄ is what the clients send one another; the server only relays it here, so ↑ and ↓ show the same messages again."
)
_IN_A_STAR = {"bytes_up": "↑", "paper_bytes_up": "↑ formula", "bytes_down": "↓", "paper_bytes_down": "↓ formula"}
_OF_PEERS = {  # bytes that one peer sends are those that another one receives
    "peer_bytes": "⇄ peer to peer",
    "bytes_up": "↑ relayed",
    "paper_bytes_up": "⇄ formula",
    "bytes_down": "↓ relayed",
}


def on_peers(groups: Groups) -> str:
    return _PEER_CAPTION if any(run.total("peer_bytes") is not None for group in groups for run in group.runs) else ""


def bytes_of_runs(groups: Groups) -> Variants:
    traces: list[Trace] = []
    longest = 0.0
    for index, group in enumerate(groups):
        titles = _IN_A_STAR if group.first.total("peer_bytes") is None else _OF_PEERS
        totals = {title: Statistic.of(run.total(name) for run in group.runs) for name, title in titles.items()}
        megabytes = {title: total.mean / MEGABYTE for title, total in totals.items() if total}
        if not megabytes:
            continue
        longest = max(longest, *megabytes.values())
        traces.append(
            {
                "type": "bar",
                "series": index,
                "name": text_of(group.label),
                "orientation": "h",
                "x": list(megabytes.values()),
                "y": [index + 0.19 * (place - (len(megabytes) - 1) / 2) for place in range(len(megabytes))],
                "width": 0.17,
                "text": [f"{megabytes_text(size)} {title}" for title, size in megabytes.items()],
                "marker": {"pattern": {"shape": ["/" if "formula" in title else "" for title in megabytes]}},
                "hovertemplate": "%{text}<extra></extra>",
            }
        )
    x_axis = axis("MB (10⁶ bytes)", range=[0, longest * 1.5 or 1])  # room for the bars' texts
    return [Variant("Traffic", traces, {"xaxis": x_axis, "yaxis": row_axis(groups)})] if traces else []


def by_layer_set(groups: Groups) -> Variants:
    """Return FedP3's Figure 6 for runs whose clients send only some layers, as a mean over seeds with the set."""
    tables = [[run.info.get("bytes_by_layer_set") or {} for run in group.runs] for group in groups]
    sets = list(dict.fromkeys(name for seeds in tables for table in seeds for name in sorted(table)))
    places = {name: place for place, name in enumerate(sorted(sets, key=lambda name: (len(name.split()), name)))}
    x_axis = {
        "tickvals": list(places.values()),
        "ticktext": [_layer_set_label(name) for name in places],
        "tickangle": -30,  # to the left, so that the last one fits
    }
    variants = []
    for title, key in (("Upload ↑", "bytes_up"), ("Download ↓", "bytes_down")):
        traces: list[Trace] = []
        ratios: list[str] = []
        for index, (group, seeds) in enumerate(zip(groups, tables, strict=True)):
            means = {name: Statistic.of(table[name][key] for table in seeds if name in table) for name in places}
            megabytes = {name: mean.mean / MEGABYTE for name, mean in means.items() if mean}
            if not megabytes:
                continue
            ratios.append(f"{group.label}: {max(megabytes.values()) / min(megabytes.values()):,.3g}")
            traces.append(
                {
                    "type": "bar",
                    "series": index,
                    "name": text_of(group.label),
                    "x": [places[name] for name in megabytes],
                    "y": list(megabytes.values()),
                    "text": [megabytes_text(value) for value in megabytes.values()],
                    "hovertext": [text_of(name) for name in megabytes],
                    "hovertemplate": "%{y:.4g} MB, %{hovertext}",
                }
            )
        layout = {"xaxis": x_axis, "yaxis": axis("MB (10⁶ bytes)", rangemode="tozero")}
        note = f"The largest set is this many times the smallest. {'; '.join(ratios)}."
        variants += [Variant(title, traces, layout, note)] if traces else []
    return variants


def _layer_set_label(name: str) -> str:
    layers = name.split()
    return text_of(" + ".join(layers) if len(layers) <= 3 else f"{layers[0]} … {layers[-1]} ({len(layers)})")
