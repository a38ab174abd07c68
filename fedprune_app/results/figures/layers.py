"""These figures show what is left of each layer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from fedprune_app.results.figures.common import (
    SHARE_TICKS,
    Trace,
    Variant,
    group_lines,
    heatmap,
    run_name,
    text_of,
)
from fedprune_app.results.groups import Group, Statistic
from fedprune_app.results.reader import Run

_SMALL_PLOTS = 12  # clients whose masks are shown beside one another


def densities(groups: Sequence[Group]) -> list[Variant]:
    """Return a view of the last density of each layer, as a mean over clients and seeds."""
    layout = {
        "xaxis": {"type": "category"},
        "yaxis": {"tickformat": SHARE_TICKS, "hoverformat": ".1%", "rangemode": "tozero"},
    }
    return group_lines(groups, "Layers", _densities, layout)


def _densities(group: Group) -> dict[str, float]:
    tables = [run.last_table("density_by_layer") for run in group.runs]
    layers = dict.fromkeys(layer for densities in tables for layer in densities)  # a set that keeps its order
    over_seeds = {layer: Statistic.of(densities.get(layer) for densities in tables) for layer in layers}
    means = {layer: statistic.mean for layer, statistic in over_seeds.items() if statistic}
    start = _common_start(list(means))
    ending = ".weight" if start else ""
    return {text_of(layer.removeprefix(start).removesuffix(ending)): mean for layer, mean in means.items()}


def by_round(groups: Sequence[Group]) -> list[Variant]:
    """Return a view for each group: each client's mask by layer and round, in small plots beside one another."""
    return [view for group in groups if (view := _by_round(group, group.runs[0]))]


def _by_round(group: Group, run: Run) -> Variant | None:
    """Return a view of a run: a small plot for each of some clients, unless all of them keep all weights."""
    shares_by_client: dict[int, dict[int, Mapping[str, float]]] = {}
    for row in run.clients:
        if row.get("density_by_layer"):
            shares_by_client.setdefault(int(row["partition"]), {})[int(row["round"])] = row["density_by_layer"]
    if all(
        share == 1 for rounds in shares_by_client.values() for shares in rounds.values() for share in shares.values()
    ):
        return None
    clients = sorted(shares_by_client)
    shown_clients = clients[:: -(-len(clients) // _SMALL_PLOTS)]
    layers = list(
        dict.fromkeys(layer for rounds in shares_by_client.values() for shares in rounds.values() for layer in shares)
    )
    start = _common_start(layers)
    names = [text_of(layer.removeprefix(start).removesuffix(".weight")) for layer in layers]
    traces: list[Trace] = []
    for number, client in enumerate(shown_clients, start=1):
        rounds = sorted(shares_by_client[client])
        z = [[_rounded(shares_by_client[client][round].get(layer)) for round in rounds] for layer in layers]
        template = f"client {client}, round %{{x}}<br>%{{y}} keeps %{{z:.1%}}"
        scale = {"zmin": 0, "zmax": 1, "showscale": number == len(shown_clients), "colorbar": {"tickformat": ".0%"}}
        traces.append(heatmap([str(round) for round in rounds], names, z, template, number, **scale))
    axes = {"xaxis": {"type": "category", "nticks": 4}, "yaxis": {"type": "category", "autorange": "reversed"}}
    note = "" if len(shown_clients) == len(clients) else f"Shown are {len(shown_clients)} of {len(clients):,} clients."
    return Variant(run_name(group, run), traces, axes, note, tuple(f"Client {client}" for client in shown_clients))


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _common_start(names: Sequence[str]) -> str:
    """Return the start that all of many names share, with its dot, such as ``model.layers.`` in a language model."""
    parts = [name.split(".")[:-2] for name in names]
    shared = itertools.takewhile(lambda level: len(set(level)) == 1, zip(*parts, strict=False))
    return "".join(f"{level[0]}." for level in shared) if len(names) > 1 else ""


def decoder_layers(groups: Sequence[Group]) -> list[Variant]:
    """Return views of how the clients' masks of each decoder layer agree, and what the server makes of them."""
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
    variants = (group_lines(groups, title, partial(_by_layer, value=value), layout) for title, value in views.items())
    return list(itertools.chain.from_iterable(variants))


def _by_layer(group: Group, value: Callable[[Mapping[str, Any]], float | None]) -> dict[int, float]:
    tables = [run.last_table("layers") for run in group.runs]
    layers = sorted(set.intersection(*(set(table) for table in tables)), key=int)
    means = {int(layer): Statistic.of(value(table[layer]) for table in tables) for layer in layers}
    return {layer: statistic.mean for layer, statistic in means.items() if statistic}
