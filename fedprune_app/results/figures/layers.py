"""These figures show what is left of each layer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedprune_app.results.figures.common import SHARE_TICKS, Figure, Trace, Variant, last_table, run_name, text_of
from fedprune_app.results.reader import Run
from fedprune_app.results.tables import Group, Statistic

_SMALL_PLOTS = 12  # clients whose masks are shown beside one another


def densities(groups: Sequence[Group]) -> Figure:
    """The figure shows the density of each layer."""
    return Figure(
        "layers",
        "Density by layer",
        "Kept share of each layer in the last evaluation, mean over clients.",
        _layer_variants(groups),
    )


def by_round(groups: Sequence[Group]) -> Figure:
    """The figure shows how each client's mask changes by layer and round, in small plots beside one another."""
    return Figure(
        "mask-layers",
        "Each client's mask by layer and round",
        "Kept share of each layer of a client's own model, in the evaluated rounds.",
        [variant for group in groups if (variant := _by_round(group, group.runs[0]))],
        wide=True,
    )


def decoder_layers(groups: Sequence[Group]) -> Figure:
    """The figure shows how the clients' masks of each decoder layer agree, and what the server makes of them."""
    return Figure(
        "decoder-layers",
        "Decoder layers",
        "By layer of a language model, in the last round: how far the clients' masks agree, mean over pairs, and "
        "the density of their mean before and after the server expands its masks.",
        _decoder_layer_variants(groups),
    )


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
                    "name": text_of(group.label),
                    "x": [
                        text_of(layer.removeprefix(start).removesuffix(".weight" if start else "")) for layer in known
                    ],
                    "y": list(known.values()),
                    "mode": "lines+markers",
                }
            )
    layout = {
        "xaxis": {"type": "category"},
        "yaxis": {"tickformat": SHARE_TICKS, "hoverformat": ".1%", "rangemode": "tozero"},
    }
    return [Variant("Layers", traces, layout)] if traces else []


def _by_round(group: Group, run: Run) -> Variant | None:
    """Return a view of a run: a small plot for each of some clients, unless all of them keep all weights."""
    known: dict[int, dict[int, Mapping[str, float]]] = {}
    for row in run.clients:
        if row.get("density_by_layer"):
            known.setdefault(int(row["partition"]), {})[int(row["round"])] = row["density_by_layer"]
    if all(share == 1 for rounds in known.values() for shares in rounds.values() for share in shares.values()):
        return None
    clients = sorted(known)
    shown = clients[:: -(-len(clients) // _SMALL_PLOTS)]
    layers = list(dict.fromkeys(layer for rounds in known.values() for shares in rounds.values() for layer in shares))
    start = _common_start(layers)
    names = [text_of(layer.removeprefix(start).removesuffix(".weight")) for layer in layers]
    traces: list[Trace] = []
    for number, client in enumerate(shown, start=1):
        rounds = sorted(known[client])
        traces.append(
            {
                "type": "heatmap",
                "x": [str(round) for round in rounds],
                "y": names,
                "z": [[_rounded(known[client][round].get(layer)) for round in rounds] for layer in layers],
                "zmin": 0,
                "zmax": 1,
                "showscale": number == len(shown),
                "hovertemplate": f"client {client}, round %{{x}}<br>%{{y}} keeps %{{z:.1%}}<extra></extra>",
                "colorbar": {"tickformat": ".0%"},
            }
            | ({"xaxis": f"x{number}", "yaxis": f"y{number}"} if number > 1 else {})
        )
    axes = {"xaxis": {"type": "category", "nticks": 4}, "yaxis": {"type": "category", "autorange": "reversed"}}
    note = "" if len(shown) == len(clients) else f"Shown are {len(shown)} of {len(clients):,} clients."
    return Variant(run_name(group, run), traces, axes, note, tuple(f"Client {client}" for client in shown))


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _common_start(names: Sequence[str]) -> str:
    """Return the start that all of many names share, with its dot, such as ``model.layers.`` in a language model."""
    parts = [name.split(".")[:-2] for name in names]
    shared = itertools.takewhile(lambda at: len(set(at)) == 1, zip(*parts, strict=False))
    return "".join(f"{at[0]}." for at in shared) if len(names) > 1 else ""


def _decoder_layer_variants(groups: Sequence[Group]) -> list[Variant]:
    layout = {
        "xaxis": {"title": {"text": "Decoder layer"}, "dtick": 1},
        "yaxis": {"tickformat": SHARE_TICKS, "hoverformat": ".2%"},
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
            last = [last_table(run, "layers") for run in group.runs]
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
                        "name": text_of(group.label),
                        "x": list(points),
                        "y": list(points.values()),
                        "mode": "lines+markers",
                    }
                )
        if traces:
            variants.append(Variant(title, traces, layout))
    return variants
