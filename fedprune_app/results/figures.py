"""Figures as plain plotly.js traces: what is drawn. How it looks (colours, theme, size) is the page's business.

Every trace says which ``series`` (index into the groups) it belongs to; the page gives it that series' colour
and dash and hides it with the legend. All text is escaped, since plotly reads a little HTML.
"""

from __future__ import annotations

import html
import itertools
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fedprune_app.core.metrics import worst_decile
from fedprune_app.results.measures import MEGABYTE
from fedprune_app.results.reader import Run
from fedprune_app.results.similarity import Comparison, compare
from fedprune_app.results.tables import Group, Statistic, accuracy, model_name, perplexity_tables

Trace = dict[str, Any]
Curve = Mapping[int, tuple[float, float]]  # round -> (x, y)

_MARKERS_UP_TO = 25  # points; more of them would hide the line
_POINTS_UP_TO = 400  # clients shown one by one beside their box
_PEER_CAPTION = (
    " ⇄ is what the clients send one another; the server only relays it here, so ↑ and ↓ show the same messages again."
)
_BAR_TEXTS_UP_TO = 24  # bars; the texts of more of them would overlap
_CURVES_UP_TO = 100  # clients whose ε is drawn by itself
_HEATMAP_UP_TO = 200  # clients a side; more of them would be smaller than a pixel
_ACCURACIES = {
    "accuracy_personal_mean": "Personal",
    "accuracy_global": "Global model",
    "accuracy_received_mean": "Received",
    "accuracy_personal_worst_decile": "Worst decile",
    "accuracy_validation_mean": "Validation",
}
_CLIENT_ACCURACIES = {
    "accuracy_personal": "Personal",
    "accuracy_global": "Global model",
    "accuracy_received": "Received",
}


@dataclass(frozen=True)
class Variant:
    """One view of a figure, chosen by its ``name``; ``note`` says about it what the caption cannot.

    ``panels`` titles several plots beside one another: traces name theirs by plotly's ``xaxis`` and ``yaxis``.
    """

    name: str
    traces: list[Trace]
    layout: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    panels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Figure:
    """A titled plot with one or more views; ``rows`` > 0 asks for a height for so many rows."""

    key: str
    title: str
    caption: str
    variants: list[Variant]
    rows: int = 0
    wide: bool = False


def figures(groups: Sequence[Group]) -> list[Figure]:
    """All figures for which some run has data, in reading order."""
    runs = [run for group in groups for run in group.runs]
    share = {"tickformat": ".0%", "hoverformat": ".1%"}
    drawn = [
        Figure(
            "accuracy",
            "Accuracy by round",
            "Mean over all clients, each on its own test split.",
            _accuracy_variants(groups, _by_round, "Round"),
        ),
        Figure(
            "efficiency",
            "Accuracy by traffic",
            "Against the training traffic so far, as measured on the serialised messages: to and from the server, or "
            "over all links where models go from peer to peer.",
            _accuracy_variants(groups, _by_megabytes, "Measured traffic (MB)"),
        ),
        Figure(
            "privacy",
            "Accuracy by privacy",
            "Against the largest ε of any client so far, from the ledger of what ran: the smaller, the more private.",
            _accuracy_variants(groups, _by_epsilon, "Largest ε so far"),
        ),
        Figure(
            "tradeoff",
            "What accuracy costs",
            "One point per setting at the end of the run: the main number against what was spent for it. A line joins "
            "the settings of a system; bars are standard deviations over seeds.",
            _tradeoff_variants(groups),
        ),
        Figure(
            "clients",
            "Accuracy of each client",
            "One point per client in the last evaluation; the diamond is the mean of the worst tenth.",
            _client_variants(groups),
            rows=len(groups),
        ),
        Figure(
            "perplexity",
            "Perplexity by sparsity",
            "The global model (diamonds, solid) and the mean of the clients' own (circles, dotted), on each test text; "
            "lower is better, and the curves begin at the dense model. A view's name says how many windows of how many "
            "tokens were measured. After one round the clients' own are the standalone baseline, later they are not.",
            _perplexity_variants(groups),
        ),
        Figure(
            "decoder-layers",
            "Decoder layers",
            "By layer of a language model, in the last round: how far the clients' masks agree, mean over pairs, and "
            "the density of their mean before and after the server expands its masks.",
            _decoder_layer_variants(groups),
        ),
        Figure(
            "density-groups",
            "Accuracy by density of the client",
            "One point per client in the last evaluation, by its own kept share; the line joins the means of clients "
            "of the same density.",
            _density_group_variants(groups),
        ),
        Figure(
            "bytes",
            "Traffic, measured and by the papers' formulas",
            "Training messages of the whole run, up ↑ and down ↓. Solid: measured. Hatched: the paper's own formula."
            + (_PEER_CAPTION if any(run.total("peer_bytes") is not None for run in runs) else ""),
            _bytes_variants(groups),
            rows=len(groups),
        ),
        Figure(
            "layer-sets",
            "Traffic of a client by the layers it trains",
            "Measured on the last training messages of a client of each set, to it and from it. The last layer, which "
            "all train, is not named.",
            _layer_set_variants(groups),
        ),
        Figure(
            "layers",
            "Density by layer",
            "Kept share of each layer in the last evaluation, mean over clients.",
            _layer_variants(groups),
        ),
        Figure(
            "density",
            "Density by round",
            "Kept share of the whole model, mean over clients.",
            _lines(groups, _by_round, "density_mean", "Density", {"x": "Round", "y": share}),
        ),
        Figure(
            "loss",
            "Training loss",
            "Mean over the clients that trained in the round.",
            _lines(groups, _by_round, "loss_mean", "Loss", {"x": "Round", "y": {}}),
        ),
        Figure(
            "epsilon",
            "Privacy spent",
            "ε from the ledger of what ran. Dotted: the budget, where there is one.",
            _epsilon_variants(groups),
        ),
        Figure(
            "partition",
            "Who has which classes",
            "Training examples of each class at each client; an empty cell is none.",
            _partition_variants(groups),
            wide=True,
        ),
        Figure(
            "masks",
            "Label similarity and mask similarity",
            "Each two clients: cosine of their training label counts, and the share of coordinates in which their "
            "masks agree. In both, clients with alike labels stand side by side.",
            _mask_variants(groups),
            wide=True,
        ),
        Figure(
            "agreement",
            "Agreement of the clients' masks",
            "Each two clients: the share of a language model's weights that both keep or both prune, all decoder "
            "layers together. A client of one document has its name.",
            _agreement_variants(groups),
            wide=True,
        ),
    ]
    return [figure for figure in drawn if figure.variants and not (figure.key in _BY_ROUND and _is_a_point(figure))]


_BY_ROUND = ("density", "loss", "epsilon")


def _is_a_point(figure: Figure) -> bool:
    """Whether no curve of it has a second point: a run of one round has nothing to show by round."""
    return all(len(trace["x"]) == 1 for variant in figure.variants for trace in variant.traces)


def _text(text: str) -> str:
    return html.escape(text, quote=False)


# --- lines ----------------------------------------------------------------------------------------------------


def _by_round(run: Run, name: str) -> Curve:
    return {round: (round, value) for round, value in run.series(name)}


def _by_megabytes(run: Run, name: str) -> Curve:
    """Against traffic so far; the curve ends where a round's bytes were not measured."""
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
    """Against ε so far, of rounds in which both are known."""
    return {
        row["round"]: (row["epsilon_max"], row[name])
        for row in run.rounds
        if row.get("epsilon_max") is not None and row.get(name) is not None
    }


def _accuracy_variants(groups: Sequence[Group], curve: Callable[[Run, str], Curve], x_title: str) -> list[Variant]:
    axes = {"x": x_title, "y": {"tickformat": ".0%", "hoverformat": ".2%"}}
    main = {group.runs[0].headline for group in groups} & _ACCURACIES.keys()
    names = sorted(_ACCURACIES, key=lambda name: name not in main)  # stable: the main number's view is first
    views = [view for name in names for view in _lines(groups, curve, name, _ACCURACIES[name], axes)]
    if len(main) == 1:
        return views
    traces = [
        trace
        for index, group in enumerate(groups)
        if group.runs[0].headline in main
        for trace in _curve_traces(index, group, curve, group.runs[0].headline)
    ]
    mixed = [Variant("Main number", traces, _line_layout(axes))] if traces else []
    return mixed + views


def _lines(
    groups: Sequence[Group],
    curve: Callable[[Run, str], Curve],
    name: str,
    title: str,
    axes: Mapping[str, Any],
) -> list[Variant]:
    traces = [trace for index, group in enumerate(groups) for trace in _curve_traces(index, group, curve, name)]
    return [Variant(title, traces, _line_layout(axes))] if traces else []


def _line_layout(axes: Mapping[str, Any]) -> dict[str, Any]:
    return {"xaxis": {"title": {"text": axes["x"]}}, "yaxis": dict(axes["y"])}


def _curve_traces(series: int, group: Group, curve: Callable[[Run, str], Curve], name: str) -> list[Trace]:
    """The mean over seeds in the rounds that all of them have and, for several seeds, their range around it."""
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
        "name": _text(group.label),
        "x": x,
        "y": [statistics.fmean(at_round) for at_round in values],
        "mode": "lines+markers" if len(rounds) <= _MARKERS_UP_TO else "lines",
    }
    if len(curves) == 1:
        return [line]
    edge: Trace = {"type": "scatter", "series": series, "x": x, "mode": "lines", "hoverinfo": "skip", "band": True}
    low, high = edge | {"y": list(map(min, values))}, edge | {"y": list(map(max, values)), "fill": "tonexty"}
    return [low, high, line]


# --- what it cost ---------------------------------------------------------------------------------------------


def _tradeoff_variants(groups: Sequence[Group]) -> list[Variant]:
    """A view for each cost that some setting paid, with two settings or more: a single point shows no trade."""
    costs: dict[str, tuple[str, Callable[[Run], float | None]]] = {
        "Privacy": ("Largest ε of any client", lambda run: run.last("epsilon_max")),
        "Traffic": ("Measured traffic (MB)", _total_megabytes),
    }
    variants = []
    for title, (axis, cost) in costs.items():
        points: dict[str, list[tuple[float, float, int]]] = {}
        traces: list[Trace] = []
        for index, group in enumerate(groups):
            spent = Statistic.of(cost(run) for run in group.runs)
            reached = Statistic.of(accuracy(run) for run in group.runs)
            if spent is None or reached is None:
                continue
            points.setdefault(group.system, []).append((spent.mean, reached.mean, index))
            point: Trace = {
                "type": "scatter",
                "series": index,
                "name": _text(group.label),
                "x": [spent.mean],
                "y": [reached.mean],
                "mode": "markers",
                "marker": {"size": 10},
                "hovertemplate": f"%{{y:.2%}} at %{{x:.3~g}}<extra>{_text(group.label)}</extra>",
            }
            if reached.std:
                point["error_y"] = {"type": "data", "array": [reached.std], "thickness": 1.25, "width": 4}
            traces.append(point)
        if len(traces) < 2:
            continue
        for of_system in points.values():
            x, y, indices = zip(*sorted(of_system), strict=True)
            if len(x) > 1:
                line = {"type": "scatter", "series": indices[0], "x": x, "y": y, "mode": "lines", "thin": True}
                traces.insert(0, line | {"hoverinfo": "skip"})
        layout = {"xaxis": {"title": {"text": axis}, "rangemode": "tozero"}, "yaxis": {"tickformat": ".0%"}}
        variants.append(Variant(title, traces, layout | {"hovermode": "closest"}))
    return variants


def _total_megabytes(run: Run) -> float | None:
    """Of training, to and from the server, or over all links where models go from peer to peer."""
    peers, up, down = (run.total(name) for name in ("peer_bytes", "bytes_up", "bytes_down"))
    if peers is not None:
        return peers / MEGABYTE
    return None if up is None or down is None else (up + down) / MEGABYTE


def _epsilon_variants(groups: Sequence[Group]) -> list[Variant]:
    """The largest of all clients, and each client's own, under the budget if the run had one."""
    axes = {"x": "Round", "y": {"rangemode": "tozero", "title": {"text": "ε"}}}
    budgets = [trace for index, group in enumerate(groups) if (trace := _budget_line(index, group))]
    views = _lines(groups, _by_round, "epsilon_max", "Largest of all clients", axes)
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
            for partition in sorted(curves)[:: step or 1]:
                rounds, values = zip(*sorted(curves[partition]), strict=True)
                x += [*rounds, None]  # a gap: one trace holds all clients
                y += [*values, None]
        if x:
            line: Trace = {"type": "scatter", "series": index, "name": _text(group.label), "mode": "lines"}
            own.append(line | {"x": x, "y": y, "thin": True, "line": {"shape": "hv"}, "hoverinfo": "skip"})
    note = f"Shown is one client in {left_out}." if left_out > 1 else ""
    if own:
        views.append(Variant("Each client", own, _line_layout(axes), note))
    return [replace(view, traces=[*view.traces, *budgets]) for view in views]


def _budget_line(series: int, group: Group) -> Trace | None:
    """The smaller of the two limits that a configuration can set, over all rounds that ran."""
    config = group.runs[0].config
    limits = [config.get(key) for key in ("dp.epsilon-budget", "dp.target-epsilon")]
    known = [limit for limit in limits if isinstance(limit, int | float) and limit > 0]
    last = max((row["round"] for run in group.runs for row in run.rounds), default=0)
    if not (known and last and config.get("dp.enabled")):
        return None
    return {
        "type": "scatter",
        "series": series,
        "name": _text(f"budget of {group.label}"),
        "x": [1, last],
        "y": [min(known)] * 2,
        "mode": "lines+text",
        "text": [f"budget {min(known):g}", ""],
        "limit": True,
        "hoverinfo": "skip",
    }


# --- rows: one per group --------------------------------------------------------------------------------------


def _row_axis(groups: Sequence[Group]) -> dict[str, Any]:
    """A vertical axis with one labelled row per group, the first on top."""
    return {
        "tickvals": list(range(len(groups))),
        "ticktext": [_row_label(group.label) for group in groups],
        "range": [len(groups) - 0.4, -0.6],
    }


def _row_label(label: str) -> str:
    lines = [line if len(line) <= 24 else f"{line[:23]}…" for line in label.split(" · ")]
    return "<br>".join(map(_text, lines[:3]))


def _client_variants(groups: Sequence[Group]) -> list[Variant]:
    layout = {"xaxis": {"tickformat": ".0%"}, "yaxis": _row_axis(groups), "boxgap": 0}
    variants = []
    for name, title in _CLIENT_ACCURACIES.items():
        traces = []
        for index, group in enumerate(groups):
            seeds = [values for run in group.runs if (values := _last_of_clients(run, name))]
            points = [value for values in seeds for value in values]
            if not points:
                continue
            row: Trace = {"series": index, "name": _text(group.label)}
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
            variants.append(Variant(title, traces, layout))
    return variants


def _last_of_clients(run: Run, name: str) -> list[float]:
    """The values of the last round in which any client measured ``name``."""
    measured = [row for row in run.clients if isinstance(row.get(name), int | float)]
    last = max((row["round"] for row in measured), default=None)
    return [float(row[name]) for row in measured if row["round"] == last]


def _density_group_variants(groups: Sequence[Group]) -> list[Variant]:
    """Runs whose clients differ in density, as Dis-PFL's Figure 4; density is rounded to two decimals."""
    traces: list[Trace] = []
    for index, group in enumerate(groups):
        seeds = [_density_and_accuracy(run) for run in group.runs]
        points = sorted(pair for pairs in seeds if len({density for density, _ in pairs}) > 1 for pair in pairs)
        if not points:
            continue
        alike: dict[float, list[float]] = {}
        for density, reached in points:
            alike.setdefault(density, []).append(reached)
        row: Trace = {"type": "scatter", "series": index, "name": _text(group.label)}
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
                "text": [_number_of(len(values), "client") for values in alike.values()],
                "hovertemplate": "%{y:.1%}, mean of %{text}",
            }
        )
    share = {"tickformat": ".0%", "hoverformat": ".0%"}
    layout = {"xaxis": {"title": {"text": "Density of the client"}, **share}, "yaxis": {"tickformat": ".0%"}}
    return [Variant("Personal", traces, layout)] if traces else []


def _density_and_accuracy(run: Run) -> list[tuple[float, float]]:
    """(density to two decimals, accuracy) of the clients in the last evaluation."""
    measured = [row for row in run.clients if row.get("accuracy_personal") is not None]
    last = max((row["round"] for row in measured), default=None)
    return [
        (round(row["density"], 2), row["accuracy_personal"])
        for row in measured
        if row["round"] == last and row.get("density") is not None
    ]


def _number_of(count: int, thing: str) -> str:
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def _bytes_variants(groups: Sequence[Group]) -> list[Variant]:
    bars = {
        "peer_bytes": "⇄ peer to peer",
        "bytes_up": "↑",
        "paper_bytes_up": "↑ formula",
        "bytes_down": "↓",
        "paper_bytes_down": "↓ formula",
    }
    traces: list[Trace] = []
    longest = 0.0
    for index, group in enumerate(groups):
        totals = {name: Statistic.of(run.total(name) for run in group.runs) for name in bars}
        relayed = " relayed" if totals["peer_bytes"] else ""
        known = [
            (total.mean / MEGABYTE, bars[name] + (relayed if name in ("bytes_up", "bytes_down") else ""))
            for name, total in totals.items()
            if total is not None
        ]
        if not known:
            continue
        shown = [
            (megabytes, index + 0.19 * (place - (len(known) - 1) / 2), title, "/" if "formula" in title else "")
            for place, (megabytes, title) in enumerate(known)
        ]
        longest = max(longest, *(megabytes for megabytes, *_ in shown))
        traces.append(
            {
                "type": "bar",
                "series": index,
                "name": _text(group.label),
                "orientation": "h",
                "x": [megabytes for megabytes, *_ in shown],
                "y": [place for _, place, *_ in shown],
                "width": 0.17,
                "text": [f"{_megabytes(megabytes)} {title}" for megabytes, _, title, _ in shown],
                "marker": {"pattern": {"shape": [shape for *_, shape in shown]}},
                "hovertemplate": "%{text}<extra></extra>",
            }
        )
    x_axis = {"title": {"text": "MB (10⁶ bytes)"}, "range": [0, longest * 1.5 or 1]}  # room for the bars' texts
    return [Variant("Traffic", traces, {"xaxis": x_axis, "yaxis": _row_axis(groups)})] if traces else []


def _layer_set_variants(groups: Sequence[Group]) -> list[Variant]:
    """FedP3's Figure 6, of runs whose clients send some layers alone; the mean over seeds that have the set."""
    measured = [[run.info.get("bytes_by_layer_set") or {} for run in group.runs] for group in groups]
    sets = list(dict.fromkeys(name for seeds in measured for found in seeds for name in sorted(found)))
    places = {name: place for place, name in enumerate(sorted(sets, key=lambda name: (len(name.split()), name)))}
    axis = {
        "tickvals": list(places.values()),
        "ticktext": [_layer_set_label(name) for name in places],
        "tickangle": -30,  # to the left, where there is room for the last one
    }
    variants = []
    for title, key in (("Upload ↑", "bytes_up"), ("Download ↓", "bytes_down")):
        traces: list[Trace] = []
        ratios: list[str] = []
        for index, (group, seeds) in enumerate(zip(groups, measured, strict=True)):
            means = {name: Statistic.of(found[name][key] for found in seeds if name in found) for name in places}
            known = {name: mean.mean / MEGABYTE for name, mean in means.items() if mean}
            if not known:
                continue
            ratios.append(f"{group.label}: {max(known.values()) / min(known.values()):,.3g}")
            traces.append(
                {
                    "type": "bar",
                    "series": index,
                    "name": _text(group.label),
                    "x": [places[name] for name in known],
                    "y": list(known.values()),
                    "text": [_megabytes(value) for value in known.values()],
                    "hovertext": [_text(name) for name in known],
                    "hovertemplate": "%{y:.4g} MB, %{hovertext}",
                }
            )
        if sum(len(trace["x"]) for trace in traces) > _BAR_TEXTS_UP_TO:
            traces = [{key: value for key, value in trace.items() if key != "text"} for trace in traces]
        layout = {"xaxis": axis, "yaxis": {"title": {"text": "MB (10⁶ bytes)"}, "rangemode": "tozero"}}
        note = f"The largest set is this many times the smallest. {'; '.join(ratios)}."
        variants += [Variant(title, traces, layout, note)] if traces else []
    return variants


def _layer_set_label(name: str) -> str:
    layers = name.split()
    return _text(" + ".join(layers) if len(layers) <= 3 else f"{layers[0]} … {layers[-1]} ({len(layers)})")


def _megabytes(megabytes: float) -> str:
    decimals = 0 if megabytes >= 100 else 1 if megabytes >= 10 else 2 if megabytes >= 0.1 else 4
    return f"{megabytes:,.{decimals}f}"


# --- layers and partition -------------------------------------------------------------------------------------


def _layer_variants(groups: Sequence[Group]) -> list[Variant]:
    traces: list[Trace] = []
    for index, group in enumerate(groups):
        last: list[Mapping[str, float]] = [
            next((row["density_by_layer"] for row in reversed(run.rounds) if row.get("density_by_layer")), {})
            for run in group.runs
        ]
        layers = dict.fromkeys(layer for densities in last for layer in densities)  # a set that keeps its order
        over_seeds = {layer: Statistic.of(densities.get(layer) for densities in last) for layer in layers}
        known = {layer: statistic.mean for layer, statistic in over_seeds.items() if statistic}
        if known:
            start = _common_start(list(known))
            traces.append(
                {
                    "type": "scatter",
                    "series": index,
                    "name": _text(group.label),
                    "x": [_text(layer.removeprefix(start).removesuffix(".weight" if start else "")) for layer in known],
                    "y": list(known.values()),
                    "mode": "lines+markers",
                }
            )
    layout = {
        "xaxis": {"type": "category"},
        "yaxis": {"tickformat": ".0%", "hoverformat": ".1%", "rangemode": "tozero"},
    }
    return [Variant("Layers", traces, layout)] if traces else []


def _common_start(names: Sequence[str]) -> str:
    """The modules that all of many names are in, with their dot: ``model.layers.`` of a language model."""
    parts = [name.split(".")[:-2] for name in names]
    shared = itertools.takewhile(lambda at: len(set(at)) == 1, zip(*parts, strict=False))
    return "".join(f"{at[0]}." for at in shared) if len(names) > 1 else ""


def _perplexity_variants(groups: Sequence[Group]) -> list[Variant]:
    """A view for each test text; runs that measured other windows of it have a view of their own."""
    layout = {
        "xaxis": {"title": {"text": "Sparsity of the global model's matrices"}, "tickformat": ".0%"},
        "yaxis": {"type": "log", "title": {"text": "Perplexity"}},
    }
    tables = perplexity_tables(groups)
    return [Variant(title, _perplexity_traces(groups, found), layout) for title, found in tables.items()]


_MARKERS = {"personal_mean": ("circle-open", "dot"), "global": ("diamond", "solid")}  # and the line between them


def _perplexity_traces(groups: Sequence[Group], found: Mapping[str, list[Mapping[str, float]]]) -> list[Trace]:
    """A point for each group and model; lines join those that differ in density alone, and begin at the dense model."""
    traces: list[Trace] = []
    curves: dict[str, list[tuple[float, float, int]]] = {}  # (sparsity, perplexity, series)
    for index, group in enumerate(groups):
        rows = found.get(group.label, [])
        sparsity = Statistic.of(
            None if (kept := run.last("density_global")) is None else 1 - kept for run in group.runs
        )
        if not rows or sparsity is None:
            continue
        alike = repr((group.system, [(key, value) for key, value in group.settings.items() if key != "density"]))
        for key, (symbol, _) in _MARKERS.items():
            value = Statistic.of(row.get(key) for row in rows)
            if value is None:
                continue
            curve = curves.setdefault(f"{key} {alike}", [])
            if not curve and (dense := Statistic.of(row.get("dense") for row in rows)):
                curve.append((0.0, dense.mean, index))
            curve.append((sparsity.mean, value.mean, index))
            trace: Trace = {
                "type": "scatter",
                "series": index,
                "name": _text(f"{group.label}, {model_name(key, group)}"),
                "x": [sparsity.mean],
                "y": [value.mean],
                "mode": "markers",
                "marker": {"symbol": symbol, "size": 10},
            }
            traces.append(trace)
    lines: list[Trace] = []
    for name, points in curves.items():
        if len(points) > 1:
            line = {"dash": _MARKERS[name.partition(" ")[0]][1], "width": 1.25}
            ordered = sorted(points)
            lines.append(
                {
                    "type": "scatter",
                    "series": points[0][2],
                    "x": [x for x, _, _ in ordered],
                    "y": [y for _, y, _ in ordered],
                    "mode": "lines",
                    "hoverinfo": "skip",
                    "line": line,
                }
            )
    return lines + traces


def _last_table(run: Run, name: str) -> Mapping[str, Any]:
    """An object of rounds.jsonl as it was last recorded; empty if it never was."""
    return next((row[name] for row in reversed(run.rounds) if row.get(name)), {})


def _decoder_layer_variants(groups: Sequence[Group]) -> list[Variant]:
    layout = {
        "xaxis": {"title": {"text": "Decoder layer"}, "dtick": 1},
        "yaxis": {"tickformat": ".2~%", "hoverformat": ".2%"},
    }

    def agreement(row: Mapping[str, Any]) -> float | None:
        return None if row.get("mask_distance") is None else 1 - row["mask_distance"]

    def share(row: Mapping[str, Any], key: str) -> float | None:
        kept, weights = row.get(key), row.get("weights")
        return kept / weights if kept is not None and weights else None

    views: dict[str, Callable[[Mapping[str, Any]], float | None]] = {
        "Agreement of masks": agreement,
        "Density before expansion": lambda row: share(row, "kept_before_expansion"),
        "after": lambda row: share(row, "kept"),
    }
    variants = []
    for title, value in views.items():
        traces: list[Trace] = []
        for index, group in enumerate(groups):
            last = [_last_table(run, "layers") for run in group.runs]
            points = {}
            for layer in sorted(set.intersection(*(set(each) for each in last)), key=int):
                statistic = Statistic.of(value(each[layer]) for each in last)
                if statistic:
                    points[int(layer)] = statistic.mean
            if points:
                traces.append(
                    {
                        "type": "scatter",
                        "series": index,
                        "name": _text(group.label),
                        "x": list(points),
                        "y": list(points.values()),
                        "mode": "lines+markers",
                    }
                )
        if traces:
            variants.append(Variant(title, traces, layout))
    return variants


def _partition_variants(groups: Sequence[Group]) -> list[Variant]:
    """One view for each distinct way the data were dealt out: systems that are compared usually share it."""
    views: dict[str, Variant] = {}
    titles: Counter[str] = Counter()
    for owner, run in ((group.label, run) for group in groups for run in group.runs):
        rows = [row for row in run.info.get("partition") or [] if row.get("train")]
        if not rows or repr(rows) in views:
            continue
        title = f"seed {run.seed}"
        titles[title] += 1
        if titles[title] > 1:
            title += f" · {owner}"
        classes = max(len(row["train"]) for row in rows)
        counts = [
            [(row["train"][label] or None) if label < len(row["train"]) else None for row in rows]
            for label in range(classes)
        ]
        trace: Trace = {
            "type": "heatmap",
            "x": [row["partition"] for row in rows],
            "y": list(range(classes)),
            "z": counts,  # (classes, clients)
            "hovertemplate": "client %{x}, class %{y}: %{z} examples<extra></extra>",
        }
        axis: dict[str, Any] = {"title": {"text": "Class"}} | ({"dtick": 1} if classes <= 20 else {})
        views[repr(rows)] = Variant(title, [trace], {"xaxis": {"title": {"text": "Client"}}, "yaxis": axis})
    return list(views.values())


# --- pairs of clients -----------------------------------------------------------------------------------------


def _mask_variants(groups: Sequence[Group]) -> list[Variant]:
    """Dis-PFL's Figure 5: a view for each run that compared its clients' masks."""
    compared = [(group, run, found) for group in groups for run in group.runs if (found := compare(run))]
    return [_mask_variant(_run_name(group, run), found) for group, run, found in compared]


def _run_name(group: Group, run: Run) -> str:
    return group.label if len(group.runs) == 1 else f"{group.label} · seed {run.seed}"


def _mask_variant(name: str, found: Comparison) -> Variant:
    clients = len(found.partitions)
    step = -(-clients // _HEATMAP_UP_TO)
    names = [str(partition) for partition in found.partitions[::step]]
    panels = {
        "Cosine of label counts": (found.label_cosine, "cosine of label counts"),
        "1 − Hamming distance of masks": (1 - found.mask_distance, "1 − Hamming distance"),
    }
    traces: list[Trace] = []
    for number, (values, what) in enumerate(panels.values()):
        shown = values.round(4).astype(object)
        np.fill_diagonal(shown, None)  # a client compared with itself says nothing and would stretch the colours
        traces.append(
            {
                "type": "heatmap",
                "x": names,
                "y": names,
                "z": shown[::step, ::step].tolist(),
                "hovertemplate": f"clients %{{x}} and %{{y}}<br>{what} %{{z:.3f}}<extra></extra>",
            }
            | ({"xaxis": f"x{number + 1}", "yaxis": f"y{number + 1}"} if number else {})
        )
    note = (
        f"Over the {_number_of(clients * (clients - 1) // 2, 'pair')} of clients after round {found.round}, label "
        f"similarity and mask distance have linear correlation {_signed(found.pearson)} (Pearson) and rank correlation "
        f"{_signed(found.spearman)} (Spearman): below zero, clients with alike labels have alike masks."
    )
    if step > 1:
        note += f" Shown is one client in {step}."
    axes = {"xaxis": {"type": "category"}, "yaxis": {"type": "category", "autorange": "reversed"}}
    return Variant(name, traces, axes, note, tuple(panels))


def _agreement_variants(groups: Sequence[Group]) -> list[Variant]:
    """A view for each run on a language model that compared its clients' masks."""
    variants = []
    for group in groups:
        for run in group.runs:
            rows = run.info.get("partition") or ()
            documents = {row["partition"]: row["documents"] for row in rows if isinstance(row.get("documents"), list)}
            if run.masks is None or not documents:
                continue
            names = []
            for partition in run.masks.partitions:
                own = documents.get(partition) or []
                names.append(_text(f"{partition} {own[0]}" if len(own) == 1 else str(partition)))
            shown = (1 - run.masks.distance).round(4).astype(object)
            np.fill_diagonal(shown, None)
            step = -(-len(names) // _HEATMAP_UP_TO)
            trace: Trace = {
                "type": "heatmap",
                "x": names[::step],
                "y": names[::step],
                "z": shown[::step, ::step].tolist(),
                "hovertemplate": "clients %{x} and %{y}<br>agree on %{z:.2%}<extra></extra>",
            }
            axes = {"xaxis": {"type": "category"}, "yaxis": {"type": "category", "autorange": "reversed"}}
            variants.append(Variant(_run_name(group, run), [trace], axes, panels=("Share of equal mask entries",)))
    return variants


def _signed(value: float | None) -> str:
    return "undefined" if value is None else f"{value:+.2f}".replace("-", "−")
