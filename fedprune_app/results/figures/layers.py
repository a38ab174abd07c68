"""These figures show what is left of each layer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedprune_app.results.figures.common import Figure, Trace, Variant, last_table, text_of
from fedprune_app.results.tables import Group, Statistic


def densities(groups: Sequence[Group]) -> Figure:
    """The figure shows the density of each layer."""
    return Figure(
        "layers",
        "Density by layer",
        "Kept share of each layer in the last evaluation, mean over clients.",
        _layer_variants(groups),
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
        "yaxis": {"tickformat": ".0%", "hoverformat": ".1%", "rangemode": "tozero"},
    }
    return [Variant("Layers", traces, layout)] if traces else []


def _common_start(names: Sequence[str]) -> str:
    """Return the start that all of many names share, with its dot, such as ``model.layers.`` in a language model."""
    parts = [name.split(".")[:-2] for name in names]
    shared = itertools.takewhile(lambda at: len(set(at)) == 1, zip(*parts, strict=False))
    return "".join(f"{at[0]}." for at in shared) if len(names) > 1 else ""


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
